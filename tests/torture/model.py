"""A model of the whole: anything that may be done to a run, in any order, against a plain record.

A state machine of hypothesis drives a `Subject`. A finding's steps are a script: the calls of a
subject, one a line. `python model.py SEED` does the same trial again and lets hypothesis make the
example as small as it can.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ledger import Rules
from processes import Nursery
from rival import Rival, train
from subject import Subject
from tally import Tally, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = 2
"""So many runs in a trial,"""
STEPS = 25
"""with so many steps each."""

writers = st.integers(0, 1)
steps = st.integers(0, 9)
forms = st.sampled_from((0, 0, 0, 1, 2, 3))
losses = st.sampled_from((0.5, 0.25, 0.75, float("nan"), -1.0))
flushes = st.sampled_from(("thread", "thread", "process"))
rules = st.one_of(
    st.none(),
    st.builds(Rules, last=st.integers(1, 3)),
    st.builds(Rules, last=st.just(1), every=st.integers(2, 3)),
    st.builds(Rules, best=st.integers(1, 2)),
)


@dataclass(slots=True, kw_only=True)
class Place:
    """Where a machine works, and what it finds first."""

    folder: Path
    tally: Tally
    nursery: Nursery
    found: list[Violation] = field(default_factory=list)


class Model(RuleBasedStateMachine):
    """What may be done, at any time; a trial gives it a place."""

    place: Place

    def __init__(self) -> None:
        super().__init__()
        folder = Path(tempfile.mkdtemp(dir=self.place.folder))
        if not self.place.found:
            self.place.tally.steps.clear()
        self._write(f"subject = Subject(Path({str(folder)!r}), Tally())")
        self.subject = Subject(folder, self.place.tally)

    def _write(self, line: str) -> None:
        if not self.place.found:  # hypothesis does it all again to be sure
            self.place.tally.step(line)

    @contextlib.contextmanager
    def _finding(self) -> Iterator[None]:
        try:
            yield
        except Violation as violation:
            self.place.found.append(violation)
            raise
        except Exception:  # noqa: BLE001 (whatever it is, it must not have come out)
            self.place.found.append(Violation("foreign error", traceback.format_exc()))
            raise self.place.found[-1] from None

    def do(self, method: str, *arguments: object, **named: object) -> None:
        """One call, written down before it is made."""
        words = [repr(value) for value in arguments]
        words += [f"{name}={value!r}" for name, value in named.items()]
        self._write(f"subject.{method}({', '.join(words)})")
        with self._finding():
            getattr(self.subject, method)(*arguments, **named)
            self.subject.look()

    @property
    def open(self) -> int:
        return len(self.subject.writers)

    @initialize(flush=flushes, keep=rules, form=forms)
    def first(self, flush: str, keep: Rules | None, form: int) -> None:
        self.do("open", flush=flush, rules=keep, form=form)

    @precondition(lambda self: self.open < 2)
    @rule(flush=flushes, keep=rules, form=forms, restore=st.booleans())
    def start(self, flush: str, keep: Rules | None, form: int, restore: bool) -> None:
        newest, _ = self.subject.ledger.of_newest()
        self.do("open", flush=flush, rules=keep, form=newest[0].form if newest else form)
        if restore:
            self.do("restore", self.open - 1)

    @precondition(lambda self: self.open)
    @rule(writer=writers, step=steps, loss=losses, overwrite=st.booleans(), wait=st.booleans())
    def save(self, writer: int, step: int, loss: float, overwrite: bool, wait: bool) -> None:
        self.do("save", writer % self.open, step=step, loss=loss, overwrite=overwrite, wait=wait)

    @precondition(lambda self: self.open)
    @rule(writer=writers, first=steps, count=st.integers(2, 5))
    def saves(self, writer: int, first: int, count: int) -> None:
        for step in range(first, first + count):
            self.do("save", writer % self.open, step=step, loss=0.5, overwrite=True, wait=False)

    @precondition(lambda self: self.open)
    @rule(writer=writers, step=st.one_of(st.none(), st.none(), steps), fitting=st.booleans())
    def restore(self, writer: int, step: int | None, fitting: bool) -> None:
        newest, _ = self.subject.ledger.of_newest()
        wanted = newest[0] if newest else None
        if step is not None:
            wanted = self.subject.ledger.of_step(step)
        writer %= self.open
        if fitting and wanted and wanted.form != self.subject.writers[writer].live.form:
            self.do("reshape", writer, wanted.form)
        self.do("restore", writer, step=step)

    @precondition(lambda self: self.open)
    @rule(writer=writers, form=forms)
    def reshape(self, writer: int, form: int) -> None:
        self.do("reshape", writer % self.open, form)

    @precondition(lambda self: self.open)
    @rule(writer=writers)
    def close(self, writer: int) -> None:
        self.do("close", writer % self.open)

    @precondition(lambda self: self.open)
    @rule(
        writer=writers,
        step=st.integers(20, 40),
        how=st.sampled_from(
            ("a value that cannot be stored", "its flusher is killed", "files are limited")
        ),
    )
    def fail(self, writer: int, step: int, how: str) -> None:
        self.do("fail", writer % self.open, how=how, step=step)

    @rule(
        which=st.integers(0, 9),
        file=st.integers(0, 3),
        place=st.floats(0, 0.999),
        how=st.sampled_from(("flip", "flip", "truncate", "delete")),
    )
    def corrupt(self, which: int, file: int, place: float, how: str) -> None:
        self.do("corrupt", which, file=file, how=how, place=place)

    @rule(step=steps, pinned=st.booleans())
    def pin(self, step: int, pinned: bool) -> None:
        self.do("pin", step, pinned=pinned)

    @rule(keep=rules.filter(bool), abandoned=st.booleans())
    def prune(self, keep: Rules, abandoned: bool) -> None:
        self.do("prune", keep, abandoned=abandoned)

    @rule(copy=st.booleans())
    def move(self, copy: bool) -> None:
        self.do("move", copy=copy)

    @rule()
    def copy(self) -> None:
        self.do("copy")

    @rule(
        rival=st.builds(
            Rival,
            victim=st.sampled_from(("trainer", "trainer", "flusher", "both", "nobody")),
            fresh=st.booleans(),
            form=forms,
            flush=flushes,
            rules=rules,
            saves=st.integers(1, 6),
            at_start=st.booleans(),
            delay_ms=st.integers(0, 250),
            hurried=st.booleans(),
        )
    )
    def rival(self, rival: Rival) -> None:
        self._write(f"{rival!r}.act(subject, nursery)")
        with self._finding():
            rival.act(self.subject, self.place.nursery)
            self.subject.look()

    def teardown(self) -> None:
        if not self.place.found:
            self.do("end")
        for writer in self.subject.writers:
            writer.checkpointer._work.close()


def trial(
    folder: Path, number: int, tally: Tally, *, phases: tuple[Phase, ...] = (Phase.generate,)
) -> None:
    """Some runs, each with a random history."""
    place = Place(folder=folder, tally=tally, nursery=Nursery(train))
    chosen = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    try:
        machine = seed(number)(type("Model", (Model,), {"place": place}))
        run_state_machine_as_test(machine, settings=chosen)
    except Exception:
        if not place.found or Phase.shrink in phases:
            raise
        raise place.found[0] from None
    finally:
        place.nursery.close()


if __name__ == "__main__":
    # Not in a process of its own: hypothesis prints the smallest example that it finds.
    with tempfile.TemporaryDirectory() as made:
        trial(Path(made), int(sys.argv[1]), Tally(), phases=(Phase.generate, Phase.shrink))
