"""Versions, seams and stamps, on a framework that is always there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises, warned
from laststep.adapters.framework import Framework, advising
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from pathlib import Path


def known(tested: str, package: str = "numpy") -> Framework:
    return Framework(package=package, extra="np", tested=tested)


def test_a_framework_that_is_not_there_is_told_with_the_extra_that_brings_it() -> None:
    with raises(laststep.UsageError, remedy="pip install 'laststep[np]'", found="none"):
        known("1", "no-such-package").check()


@pytest.mark.parametrize("tested", ["999", "0.1", "1", "1.2.34"])
def test_another_release_is_refused(tested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "12.3.4")
    with raises(laststep.UsageError, "numpy", expected=tested, found="12.3.4"):
        known(tested).check()


@pytest.mark.parametrize("tested", ["12.3", "12.3.4"])
def test_bug_fixes_of_the_tested_release_are_fine(
    tested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "12.3.4")
    known(tested).check()


def test_a_stamp_is_known_again_and_another_framework_s_is_refused() -> None:
    one, other = known("2"), known("2", "torch")
    assert one.own(one.stamp(term=3), "runs/a")["term"] == 3
    with raises(laststep.MismatchError, where="runs/a", found="torch"):
        one.own(other.stamp(), "runs/a")
    with raises(laststep.MismatchError, where="runs/a"):
        one.own(None, "runs/a")


def test_resuming_goes_back_to_what_is_sound_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numpy, state = known("2"), {"w": torch.zeros(1 << 20)}
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
    numpy, state = known("2"), {"w": torch.zeros(4)}
    how = {"items": {"state": state}, "progress": False, "flush": "thread"}

    def elsewhere(*_: object) -> laststep.Restored:
        raise laststep.CorruptError("the tokenizer is damaged")

    with laststep.Checkpointer(tmp_path / "run", **as_keywords(how)) as ckpt:
        ckpt.save(1, metadata=numpy.stamp()).result()
        with pytest.raises(laststep.CorruptError, match="tokenizer"):
            numpy.resume(ckpt, elsewhere)


def test_a_mismatch_is_answered_with_what_a_framework_s_user_can_do(tmp_path: Path) -> None:
    how = {"progress": False, "flush": "thread"}
    run = tmp_path / "run"
    with laststep.Checkpointer(run, model=torch.nn.Linear(2, 2), **as_keywords(how)) as ckpt:
        ckpt.save(1)
    with laststep.Checkpointer(run, model=torch.nn.Linear(3, 2), **as_keywords(how)) as ckpt:
        with (
            raises(laststep.MismatchError, remedy=f"laststep.load({str(run)!r}") as caught,
            advising(ckpt),
        ):
            ckpt.restore()
        assert "only=" not in str(caught.value)
        assert caught.value.problems.mismatched
