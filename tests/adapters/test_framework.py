"""Versions, seams and stamps, on a framework that is always there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises, warned
from laststep.adapters.framework import Framework, advising
from laststep.adapters.sources import digests
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


SOURCE = """
MODES = {"max": 1}

class Trainer:
    @property
    def best(self):
        return self._best

    @best.setter
    def best(self, value):
        self._best = value

    def save(self, step):
        if step:
            write(f"step {step}")
            log(step)
"""


def known(oldest: str, package: str = "numpy", newest: str | None = None) -> Framework:
    return Framework(package=package, extra="np", oldest=oldest, newest=newest or oldest)


def test_a_framework_that_is_not_there_is_told_with_the_extra_that_brings_it() -> None:
    with raises(laststep.UsageError, remedy="pip install 'laststep[np]'", found="none"):
        known("1", "no-such-package").check()


@pytest.mark.parametrize("oldest", ["999.0", "12.30", "13.0"])
def test_older_releases_are_refused(oldest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "12.3.4")
    with raises(laststep.UsageError, "numpy", expected=oldest, found="12.3.4", remedy=True):
        known(oldest).check()


@pytest.mark.parametrize("found", ["12.3", "12.9.dev2", "12.10.4", "12.10.0.post1"])
def test_tested_releases_and_their_bug_fixes_are_accepted_silently(
    found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: found)
    known("12.3", newest="12.10").check()
    assert not warned(caplog)


def test_newer_releases_are_refused_if_nothing_is_known_of_the_tested_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "12.4.0")
    with raises(laststep.UsageError, expected="12.3", found="12.4.0", remedy="numpy==12.3.*"):
        known("12.3").check()


Theirs = tuple["Path", "Callable[[], Framework]"]
NAMES = ("MODES", "Trainer.best", "Trainer.save")


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Theirs:
    """Return a framework's source file, and a function that records it as the tested release."""
    package = f"theirs_{tmp_path.name}"
    (tmp_path / package).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / package / "trainer.py"
    source.write_text(SOURCE)

    def record() -> Framework:
        uses = digests({f"{package}/trainer.py": dict.fromkeys(NAMES, "")})
        return Framework(package="numpy", extra="np", oldest="12.3", newest="12.4", uses=uses)

    monkeypatch.setattr("importlib.metadata.version", lambda _: "12.5.1")
    return source, record


def test_a_newer_release_with_the_same_code_is_accepted_with_a_warning(
    theirs: Theirs, caplog: pytest.LogCaptureFixture
) -> None:
    source, record = theirs
    framework = record()
    source.write_text(
        SOURCE.replace(
            "    def save(self, step):", "    def more(self): ...\n\n    def save(self, step):"
        )
    )
    framework.check()
    assert warned(caplog, "laststep.np", "12.3 to 12.4", "12.5.1")


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("            log(step)", "        log(step)", "Trainer.save"),
        ("step {step}", "Step {step}", "Trainer.save"),
        ("self, step", "self, step=0", "Trainer.save"),
        ("self._best = value", "self._best = [value]", "Trainer.best"),
        ("    @property\n", "    @cached_property\n", "Trainer.best"),
        ("def save", "def store", "Trainer.save (missing)"),
        ("MODES = {", "MODES = {0: 0, ", "MODES"),
    ],
)
def test_a_newer_release_with_other_code_is_refused_by_name(
    theirs: Theirs, old: str, new: str, name: str
) -> None:
    source, record = theirs
    framework = record()
    assert old in SOURCE
    source.write_text(SOURCE.replace(old, new))
    with raises(laststep.UsageError, "numpy", expected="12.3 to 12.4", remedy=True) as caught:
        framework.check()
    assert str(caught.value.found).partition(": ")[2] == name


def test_a_newer_release_without_the_file_is_refused_by_all_names(theirs: Theirs) -> None:
    source, record = theirs
    framework = record()
    source.unlink()
    with raises(laststep.UsageError, *(f"{name} (missing)" for name in NAMES)):
        framework.check()


def test_comments_docstrings_and_layout_are_not_changes(
    theirs: Theirs, caplog: pytest.LogCaptureFixture
) -> None:
    source, record = theirs
    framework = record()
    source.write_text(
        SOURCE.replace(
            "def save(self, step):", 'def save(\n  self,  # us\n  step\n ):\n        """Save."""\n'
        )
        .replace("            ", "              ")
        .replace("MODES = {", "# all\nMODES = {\n    ")
    )
    framework.check()
    assert warned(caplog, "12.5.1")


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
