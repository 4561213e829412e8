"""Seeded trials, each in a process of its own, some at a time, and a tally of what came of them.

A part of the torture is a function `trial(folder, seed, tally)`. It injects faults, compares what
is restored with what must be there, and raises `Violation` at the first thing that must never
happen. Everything random in it comes from its seed, so that the same seed does the same again. This
module knows nothing of what a trial does: it starts it in a forked child with a time limit, and
counts. A trial that neither ends nor reports is a hang, one whose process is killed by a signal of
its own doing (a segfault) is a crash, a process that lives on after its trial is a hang too; all
are findings like any other.

What a trial counts and the steps that it takes are written to a file as they come: they are there
whatever becomes of it. A trial is the adopter of its orphans (a subreaper), so that whatever it
started is found below it, also a flusher in a session of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from processes import command_of, descendants, lives
from tally import Finding, Tally, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Trial = Callable[[Path, int, Tally], None]

__all__ = ["Finding", "Tally", "Violation", "run"]

ENDS_WITHIN_S = 60.0
"""How long a process may live on after its trial: a flusher finishes what it was given."""

_PR_SET_CHILD_SUBREAPER = 36
_SHOWN_LINES = 60


def run(
    part: str,
    trial: Trial,
    folder: Path,
    *,
    seed: int,
    trials: int | None = None,
    seconds: float | None = None,
    limit_s: float = 120.0,
    at_once: int = 1,
) -> Tally:
    """Trials with seeds from `seed` on, until their number or the time is used up."""
    folder.mkdir(parents=True, exist_ok=True)
    total, began, started = Tally(), time.monotonic(), 0
    running: list[_Running] = []
    try:
        while True:
            in_time = seconds is None or time.monotonic() - began < seconds
            more = in_time and (trials is None or started < trials)
            if more and len(running) < at_once:
                running.append(_start(part, trial, folder, seed + started, limit_s))
                started += 1
            elif running:
                for one in _ended(running):
                    running.remove(one)
                    total.add(_finish(part, one))
            else:
                return total
    finally:
        for one in running:  # only where we are interrupted ourselves
            _end(one)


@dataclass(slots=True, kw_only=True)
class _Running:
    """A trial under way, as its parent sees it."""

    seed: int
    pid: int
    pidfd: int
    deadline: float
    limit_s: float
    place: Path
    log: Path
    dump: IO[bytes]
    status: int | None = None


def _start(part: str, trial: Trial, folder: Path, seed: int, limit_s: float) -> _Running:
    place = Path(tempfile.mkdtemp(prefix=f"{part}-{seed}-", dir=folder))
    log = place.with_name(f"{place.name}.log")
    dump = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the trial has ended)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.dup2(dump.fileno(), 2)  # warnings are many here, and worth a look only if it fails
        faulthandler.enable(file=dump)
        faulthandler.register(signal.SIGUSR2, file=dump, all_threads=True, chain=False)
        _in_child(part, trial, place, log, seed)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return _Running(
        seed=seed,
        pid=pid,
        pidfd=os.pidfd_open(pid),
        deadline=time.monotonic() + limit_s,
        limit_s=limit_s,
        place=place,
        log=log,
        dump=dump,
    )


def _in_child(part: str, trial: Trial, place: Path, log: Path, seed: int) -> None:
    """Run the trial and report; never returns."""
    with log.open("w", encoding="utf-8", errors="backslashreplace") as lines:
        tally = Tally(lines, part=part, seed=seed)
        try:
            try:
                trial(place, seed, tally)
                _wait_for_orphans()
            except Violation as violation:
                tally.flaw(violation.kind, violation.what)
            except BaseException:  # noqa: BLE001 (whatever it is, it must not have come out)
                text = traceback.format_exc().splitlines()
                for line in text[-_SHOWN_LINES:]:
                    tally.step(line)
                tally.flaw("foreign error", text[-1])
            tally.end()
        finally:
            _kill_below(os.getpid())  # they would be nobody's once we are gone
            os._exit(0)


def _wait_for_orphans() -> None:
    """Return when nothing that the trial started lives.

    Asked of the kernel, not read from /proc: whoever dies leaves its children to us before it can
    be waited for, so none is missed between two looks.
    """
    deadline = time.monotonic() + ENDS_WITHIN_S
    while _has_children():
        if time.monotonic() > deadline:
            commands = [command_of(pid) for pid in descendants(os.getpid()) if lives(pid)]
            raise Violation("hang", f"processes outlive their trial: {commands}")
        time.sleep(0.02)


def _has_children() -> bool:
    """Whether any is left once the dead ones are waited for."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _ended(running: Sequence[_Running]) -> list[_Running]:
    """Those that have ended or have used up their time, once there are any."""
    until = min(one.deadline for one in running)
    ready, _, _ = select.select(
        [one.pidfd for one in running], [], [], max(0.0, until - time.monotonic())
    )
    now = time.monotonic()
    return [one for one in running if one.pidfd in ready or one.deadline <= now]


def _finish(part: str, one: _Running) -> Tally:
    """Count what an ended trial did; end one that did not."""
    hangs = lives(one.pid)
    if hangs:
        _have_it_dump(one)
    status = _end(one)
    one.dump.seek(0)
    stacks = one.dump.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
    one.dump.close()
    tally, whole = Tally.from_log(one.log)
    if not whole:
        what = f"the process of the trial ended with status {status}"
        if hangs:
            what = f"no end within {one.limit_s:.0f} s"
        tally.findings.append(
            Finding(
                part=part,
                seed=one.seed,
                kind="hang" if hangs else "crash",
                what=what,
                steps=tally.steps + stacks,
            )
        )
    one.log.unlink()
    shutil.rmtree(one.place, ignore_errors=True)
    return tally


def _have_it_dump(one: _Running) -> None:
    """Wait until a trial that hangs has written its stacks down, or never will."""
    before = size = os.fstat(one.dump.fileno()).st_size
    deadline = time.monotonic() + ENDS_WITHIN_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(one.pid, signal.SIGUSR2)
        while time.monotonic() < deadline:
            time.sleep(0.2)
            size, last = os.fstat(one.dump.fileno()).st_size, size
            if size == last > before:
                return


def _end(one: _Running) -> int:
    """Nothing of the trial is left; the status with which it ended."""
    _kill_below(one.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    os.close(one.pidfd)
    return os.waitpid(one.pid, 0)[1]


def _kill_below(pid: int) -> None:
    """Kill all descendants, also those that one of them forks just before it dies. Whoever changes
    its parent while /proc is read is missed, so two looks in a row must find nothing."""
    deadline, empty_looks = time.monotonic() + 10.0, 0
    while empty_looks < 2 and time.monotonic() < deadline:
        below = [found for found in descendants(pid) if lives(found)]
        empty_looks = 0 if below else empty_looks + 1
        for found in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found, signal.SIGKILL)
        time.sleep(0.01)
