"""What the demo shows of its saves; that it works is shown by `test_processes`."""

from __future__ import annotations

import io

from rich.console import Console

from laststep.cli.demo import _LogLine, _print_saves, _Result


def save(step: int, lost_s: float, durable_s: float, committed_s: float) -> _LogLine:
    return _LogLine(
        event="save",
        step=step,
        size_bytes=28_200_000,
        written_bytes=1_500_000,
        lost_s=lost_s,
        durable_s=durable_s,
        committed_s=committed_s,
    )


def test_the_save_in_which_the_trainer_was_killed_has_a_row() -> None:
    result = _Result(
        reference={},
        resumed=[],
        resumes=(),
        reference_s=1.0,
        attempts=(
            save(10, 0.004, 0.05, 0.06),
            _LogLine(event="kill", step=20),
            _LogLine(event="kill", step=40),
            save(40, 0.005, 0.07, 0.08),
        ),
    )
    out = io.StringIO()
    _print_saves(Console(file=out, width=200), result)
    rows = [text.split() for text in out.getvalue().splitlines() if text.strip()]
    assert rows[1:5] == [
        ["10", "28.20", "MB", "1.50", "MB", "4", "ms", "50", "ms", "60", "ms"],
        ["20", "-", "-", "killed", "-", "-"],
        ["40", "-", "-", "killed", "-", "-"],
        ["40", "28.20", "MB", "1.50", "MB", "5", "ms", "70", "ms", "80", "ms"],
    ]
    assert "what that save cost was known to the trainer alone" in out.getvalue()
