"""The command line as a shell starts it: its speed of start, its pipes, its long commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = [
    ROOT / "examples" / f"{n}.py" for n in ("minimal", "custom_provider", "finetune_best_k")
]
"""Those of frameworks are run in tests/frameworks."""


def start(
    *arguments: object, cwd: Path | None = None, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


def test_looking_and_pruning_never_import_torch(maker) -> None:
    for step in range(4):
        maker.save(step)
    commands = [
        ["ls", str(maker.path)],
        ["show", str(maker.path)],
        ["verify", str(maker.path)],
        ["pin", str(maker.path), "1"],
        ["unpin", str(maker.path), "1"],
        ["prune", str(maker.path), "--last", "1", "--yes"],
    ]
    script = f"""
import sys
from laststep import cli
for command in {commands!r}:
    sys.argv = ["laststep", *command]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
    assert "torch" not in sys.modules, command
"""
    done = start("-c", script)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_is_no_traceback(maker) -> None:
    maker.save(1)
    with subprocess.Popen(
        [sys.executable, "-m", "laststep", "show", str(maker.path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_help_names_every_command_and_version_the_version(laststep) -> None:
    done = laststep("--help")
    assert done.status == 0
    for command in ("ls", "show", "verify", "prune", "pin", "unpin", "import"):
        assert command in done.out
    assert "<bool>" not in laststep("ls", "--help").out
    assert start("-m", "laststep", "--version").stdout.startswith("laststep 0.")


@pytest.mark.slow
@pytest.mark.long
def test_the_demo_ends_with_identical_losses(tmp_path: Path) -> None:
    done = start(ROOT / "examples" / "demo.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The flusher of a dead trainer finishes what was captured; that of a dead machine cannot.
    assert re.findall(r"save of step (\d+): resumed from step (\d+)", done.stdout) == [
        ("20", "20"),
        ("40", "30"),
    ]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if row[1:4] == ["-", "-", "killed"]] == ["20", "40"]
    assert len([row for row in rows if row[-2:] == ["same", "bits"]]) == 13
    listed = start("-m", "laststep", "ls", "demo-run", "--json", cwd=tmp_path)
    assert json.loads(listed.stdout)["checkpoints"][-1]["step"] == 59
    assert json.loads(listed.stdout)["attempts"] == []


def test_the_demo_deletes_nothing_but_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "demo-run"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    assert start(ROOT / "examples" / "demo.py", cwd=tmp_path).returncode == 1
    assert (folder / "thesis.tex").exists()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_runs_and_resumes(example: Path, run_folder: Path) -> None:
    first, second = (start(example, run_folder, python=os.environ["WARM_PYTHON"]) for _ in "12")
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    if example.name == "minimal.py":
        assert "starting at step 0" in first.stdout
        assert "starting at step 500" in second.stdout
    if example.name == "custom_provider.py":
        assert "starting at step 50 with 50 observations" in second.stdout
    if example.name == "finetune_best_k.py":
        assert "kept: [8, 9, 11]; best: 9" in first.stdout
        assert first.stdout.splitlines()[-2:] == second.stdout.splitlines()[-2:]
