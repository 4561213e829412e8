"""`laststep demo`: train, kill in the middle of a save, resume, and compare every loss bit by bit.

Starts `demo_train` as child processes and only reads what they log; torch is never imported here.
With --json: `identical`, `steps`, `reference_s`, `compared` (`step`, `reference`, `resumed` as the
exact hexadecimal floats), `saves` (what each cost), `kills` and `resumes`. Ends with status 1 where
any loss differs.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from laststep.cli import output, status
from laststep.errors import LaststepError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

STEPS = 60
EVERY = 10
KILLS = ((20, "trainer"), (40, "machine"))
MARK = "demo.json"
_SHOWN_EVERY = 5
_SAVE_FIELDS = ("step", "size_bytes", "written_bytes", "lost_s", "durable_s", "committed_s")


class _LogLine(msgspec.Struct, frozen=True):
    """One line of a child's log; which fields are there depends on the event."""

    event: str
    step: int | None = None
    next_step: int = 0
    loss: str = ""
    skipped: tuple[str, ...] = ()
    whom: str = ""
    committed: bool = False
    size_bytes: int = 0
    written_bytes: int | None = None
    lost_s: float | None = None
    durable_s: float | None = None
    committed_s: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """All that happened."""

    reference: dict[int, str]
    resumed: list[tuple[int, str]]
    """Every loss of the interrupted run, in order; steps that were done again are there twice."""
    attempts: tuple[_LogLine, ...]
    """Saves that were committed, and those in which somebody was killed, in order."""
    resumes: tuple[_LogLine, ...]
    reference_s: float

    @property
    def saves(self) -> list[_LogLine]:
        """The saves whose costs are known."""
        return [line for line in self.attempts if line.event == "save"]

    @property
    def kills(self) -> list[_LogLine]:
        """The deaths, each in the middle of a save."""
        return [line for line in self.attempts if line.event == "kill"]

    @property
    def differing(self) -> list[int]:
        """The steps whose loss is not the reference's, or which never ran."""
        wrong = {step for step, loss in self.resumed if self.reference.get(step) != loss}
        return sorted(wrong | (self.reference.keys() - {step for step, _ in self.resumed}))


def demo(
    *,
    folder: Annotated[Path, typer.Option(help="Where the run is left.")] = Path("demo-run"),
    as_json: output.AsJson = False,
) -> None:
    """Train a small GPT, kill and resume it.

    It is killed twice in the middle of a save, and every loss compared with a run that was not.
    """
    _clear(folder)
    console = output.console(stderr=as_json)
    result = _train(folder, console)
    if as_json:
        output.print_json(_document(result))
    else:
        _print(console, result, folder)
    if result.differing:
        raise typer.Exit(status.FAILED)


def _clear(folder: Path) -> None:
    """Remove what an earlier demo left; nothing else is ever deleted."""
    if folder.exists():
        if not (folder / MARK).is_file():
            raise UsageError(
                "refused to use a folder that is not of a demo",
                where=str(folder),
                remedy="name another one with --folder",
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).write_text('{"made by": "laststep demo"}\n', encoding="utf-8")


def _train(folder: Path, console: Console) -> _Result:
    with tempfile.TemporaryDirectory(prefix="laststep-demo-") as logs:
        plain, saved = Path(logs) / "reference", Path(logs) / "saved"
        console.print(f"1. {STEPS} steps without interruption, as the reference …")
        _child(plain, [])
        reference = _lines(plain)
        run = ["--run", str(folder), "--every", str(EVERY)]
        for number, (step, whom) in enumerate(KILLS):
            start = "the same from the start" if number == 0 else "resumed in a new process"
            victim = "the trainer" if whom == "trainer" else "the trainer and its flusher"
            console.print(
                f"{number + 2}. {start}, saving every {EVERY} steps; kill -9 of {victim} "
                f"during the save of step {step} …"
            )
            _child(saved, [*run, "--kill-at", str(step), "--kill", whom], killed=True)
        console.print(f"{len(KILLS) + 2}. resumed in a new process, to the end …")
        _child(saved, run)
        lines = _lines(saved)
    return _Result(
        reference={_step(line): line.loss for line in reference if line.event == "loss"},
        resumed=[(_step(line), line.loss) for line in lines if line.event == "loss"],
        attempts=tuple(line for line in lines if line.event in ("save", "kill")),
        resumes=tuple(line for line in lines if line.event == "restored")[1:],
        reference_s=sum(line.seconds for line in reference if line.event == "end"),
    )


def _child(log: Path, arguments: list[str], *, killed: bool = False) -> None:
    """One process of training; its end has to be the one that was asked for."""
    options = ["--log", str(log), "--steps", str(STEPS), *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "laststep.cli.demo_train", *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    if done.returncode != (-signal.SIGKILL if killed else 0):
        raise LaststepError(
            "the training of the demo failed",
            expected="a death by SIGKILL" if killed else "status 0",
            found=f"status {done.returncode}\n{done.stderr.strip()}",
        )


def _lines(log: Path) -> list[_LogLine]:
    text = log.read_text(encoding="utf-8")
    return [msgspec.json.decode(line, type=_LogLine) for line in text.splitlines()]


def _step(line: _LogLine) -> int:
    return -1 if line.step is None else line.step


def _document(result: _Result) -> dict[str, object]:
    resumed = dict(result.resumed)
    return {
        "identical": not result.differing,
        "steps": len(result.reference),
        "reference_s": result.reference_s,
        "compared": [
            {"step": step, "reference": loss, "resumed": resumed.get(step)}
            for step, loss in result.reference.items()
        ],
        "saves": [output.fields(line, *_SAVE_FIELDS) for line in result.saves],
        "kills": [output.fields(line, "step", "whom") for line in result.kills],
        "resumes": [output.fields(line, "step", "next_step", "skipped") for line in result.resumes],
    }


def _print(console: Console, result: _Result, folder: Path) -> None:
    _print_kills(console, result)
    _print_saves(console, result)
    _print_losses(console, result)
    differing = result.differing
    console.print()
    if differing:
        console.print(f"FAILED: the losses of steps {json.dumps(differing)} differ")
        return
    count = len(result.resumed)
    console.print(
        f"All {len(result.reference)} losses are identical to the last bit "
        f"({count} were computed: {count - len(result.reference)} steps were done again)."
    )
    console.print("\nThe run is there to look at:")
    for command in ("ls", "show", "verify"):
        console.print(f"  {_program()} {command} {folder}", soft_wrap=True)


def _program() -> str:
    """How this program is called from here: by its name only if that is found."""
    if shutil.which("laststep"):
        return "laststep"
    beside = Path(sys.executable).with_name("laststep")
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def _print_kills(console: Console, result: _Result) -> None:
    console.print()
    for kill, resume in zip(result.kills, result.resumes, strict=False):
        victim = "the trainer" if kill.whom == "trainer" else "the trainer and its flusher"
        found = "nothing" if resume.step is None else f"step {resume.step}"
        if resume.step == kill.step:
            why = "the flusher finished the save after the trainer was dead"
        else:
            why = f"step {kill.step} was never committed, so nobody ever saw it"
        console.print(f"killed {victim} during the save of step {kill.step}: found {found}; {why}")
        for text in resume.skipped:
            console.print(f"  passed over: {text}")


def _print_saves(console: Console, result: _Result) -> None:
    titles = (
        "save of step",
        "size",
        "written",
        "training lost",
        "durable after",
        "committed after",
    )
    table = output.table(*titles, right=titles)
    for line in result.attempts:
        if line.event == "kill":
            table.add_row(str(line.step), "-", "-", "killed", "-", "-")
            continue
        table.add_row(
            str(line.step),
            output.size_text(line.size_bytes),
            "-" if line.written_bytes is None else output.size_text(line.written_bytes),
            output.duration_text(line.lost_s),
            output.duration_text(line.durable_s),
            output.duration_text(line.committed_s),
        )
    console.print()
    console.print(table)
    if result.kills:
        console.print("killed: what that save cost was known to the trainer alone.")


def _print_losses(console: Console, result: _Result) -> None:
    titles = ("step", "loss, uninterrupted", "loss, killed and resumed", "compared")
    table = output.table(*titles, right=titles[:3])
    resumed = dict(result.resumed)
    differing = set(result.differing)
    for step, loss in result.reference.items():
        if step % _SHOWN_EVERY and step not in differing and step != STEPS - 1:
            continue
        other = resumed.get(step)
        table.add_row(
            str(step),
            f"{float.fromhex(loss):.9f}",
            "-" if other is None else f"{float.fromhex(other):.9f}",
            "DIFFERS" if step in differing else "same bits",
        )
    console.print()
    console.print(table)
