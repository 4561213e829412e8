"""Versions, seams and stamps, on a framework that is always there."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises, warned
from laststep.adapters.framework import Framework
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from pathlib import Path


class Trainer:
    def save(self, step: int, path: str = "") -> None: ...

    @staticmethod
    def now(clock: object) -> None: ...


def known(tested: str, package: str = "numpy") -> Framework:
    return Framework(package=package, extra="np", tested=tested)


def test_a_framework_that_is_not_there_is_told_with_the_extra_that_brings_it() -> None:
    with pytest.raises(laststep.UsageError, match=re.escape("pip install 'laststep[np]'")):
        known("1", "no-such-package").check()


def test_a_version_that_is_too_old_is_refused() -> None:
    with raises(laststep.UsageError, expected="numpy 999.1"):
        known("999.1").check()


@pytest.mark.parametrize(("tested", "told"), [("0.1", True), ("installed", False)])
def test_a_version_that_is_newer_than_the_tested_one_is_told(
    tested: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    installed = ".".join(importlib.metadata.version("numpy").split(".")[:2])
    with caplog.at_level(logging.WARNING):
        known(installed if tested == "installed" else tested).check()
    assert bool(warned(caplog, "numpy")) is told


def test_a_seam_that_is_as_it_was_passes() -> None:
    known("0").seam(Trainer, "save", "step")
    known("0").seam(Trainer, "save", "step", "path")
    known("0").seam(Trainer, "now", "clock")


@pytest.mark.parametrize(
    ("method", "parameters"), [("save", ("path",)), ("save", ("step", "path", "x")), ("gone", ())]
)
def test_a_seam_that_has_changed_is_refused_by_its_name(
    method: str, parameters: tuple[str, ...]
) -> None:
    with raises(laststep.UsageError, f"Trainer.{method}", "numpy"):
        known("0").seam(Trainer, method, *parameters)


def test_a_stamp_is_known_again_and_another_framework_s_is_refused() -> None:
    one, other = known("0"), known("0", "torch")
    assert one.own(one.stamp(term=3), "runs/a")["term"] == 3
    with raises(laststep.MismatchError, where="runs/a", found="torch"):
        one.own(other.stamp(), "runs/a")
    with raises(laststep.MismatchError, where="runs/a"):
        one.own(None, "runs/a")


def test_resuming_goes_back_to_what_is_sound_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numpy, state = known("0"), {"w": torch.zeros(1 << 20)}
    how = {"items": {"state": state}, "progress": False, "flush": "thread"}
    with laststep.Checkpointer(tmp_path / "run", **as_keywords(how)) as ckpt:
        assert numpy.resume(ckpt, lambda *_: ckpt.restore()) is None
        for step in (1, 2):
            state["w"].fill_(step)
            ckpt.save(step, metadata=numpy.stamp(at=step))
    damage(tmp_path / "run", 2)
    stamps = []
    with (
        laststep.Checkpointer(tmp_path / "run", **as_keywords(how)) as ckpt,
        caplog.at_level(logging.WARNING),
    ):
        found = numpy.resume(ckpt, lambda _, stamp: stamps.append(stamp["at"]) or ckpt.restore())
        assert (found.step, stamps) == (1, [2, 1])
    assert warned(caplog, "step 2", "step 1")
    damage(tmp_path / "run", 1)
    with (
        laststep.Checkpointer(tmp_path / "run", **as_keywords(how)) as ckpt,
        raises(laststep.CorruptError, where=tmp_path / "run"),
    ):
        numpy.resume(ckpt, lambda *_: ckpt.restore())


def damage(run: Path, step: int) -> None:
    (file,) = run.glob(f"step-{step:08}*/state.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_damage_elsewhere_is_not_taken_for_damage_of_the_checkpoint(tmp_path: Path) -> None:
    numpy, state = known("0"), {"w": torch.zeros(4)}
    how = {"items": {"state": state}, "progress": False, "flush": "thread"}

    def elsewhere(*_: object) -> laststep.Restored:
        raise laststep.CorruptError("the tokenizer is damaged")

    with laststep.Checkpointer(tmp_path / "run", **as_keywords(how)) as ckpt:
        ckpt.save(1, metadata=numpy.stamp()).result()
        with pytest.raises(laststep.CorruptError, match="tokenizer"):
            numpy.resume(ckpt, elsewhere)
