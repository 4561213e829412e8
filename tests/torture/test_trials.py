"""What becomes of a trial is told, with its steps, whatever that is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Trials are forked, so they are run from a process that has no threads.
PROGRAM = """
import ctypes, json, os, sys, time
from pathlib import Path
import trials
from tally import Violation

def trial(folder, seed, tally):
    tally.step(f"step of {seed}")
    tally.fault("a fault", 2)
    tally.checkpoint()
    BODY

finish = trials._finish

def finish_late(part, one):
    if LIMIT == 0:  # its time is up once it hangs, on however slow a machine
        while not Path(f"{one.place}.hangs").exists():
            time.sleep(0.01)
        Path(f"{one.place}.hangs").unlink()
    return finish(part, one)

trials._finish = finish_late
tally = trials.run("part", trial, Path(sys.argv[1]), seed=7, trials=4, limit_s=LIMIT, at_once=2)
print(json.dumps(tally.to_plain()))
"""


def run(folder: Path, body: str, limit_s: float = 60.0) -> dict[str, object]:
    """Four trials that do that."""
    program = PROGRAM.replace("BODY", body).replace("LIMIT", str(limit_s))
    done = subprocess.run(
        [os.environ["WARM_PYTHON"], "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{HERE}:{HERE.parent.parent / 'src'}"},
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("raise Violation('wrong', 'as asked')", "wrong", "as asked"),
        ("raise KeyError(seed)", "foreign error", "KeyError"),
        ("ctypes.string_at(0)", "crash", "ended with status 11"),
        ("os._exit(3)", "crash", "ended with status 768"),
        ("tally.flaw('wrong', f'told {seed}'); tally.flaw('wrong', 'told 99')", "wrong", "told"),
    ],
)
def test_what_goes_wrong_is_a_finding_of_every_seed_with_its_steps(
    body: str, kind: str, text: str, tmp_path: Path
) -> None:
    told = run(tmp_path, body)
    findings = told["findings"]
    assert sorted(finding["seed"] for finding in findings) == [7, 8, 9, 10]
    for finding in findings:
        assert finding["kind"] == kind
        assert text in finding["what"]
        assert finding["steps"][0] == f"step of {finding['seed']}"
    assert told["faults"] == {"a fault": 8}
    assert told["compared"] == told["trials"] == 4
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_does_not_end_is_a_hang_with_its_steps_and_stacks(tmp_path: Path) -> None:
    told = run(tmp_path, "open(f'{folder}.hangs', 'w').close(); time.sleep(600)", limit_s=0.0)
    assert [finding["kind"] for finding in told["findings"]] == ["hang"] * 4
    assert all(finding["steps"][0].startswith("step of") for finding in told["findings"])
    assert all(any("in trial" in line for line in f["steps"]) for f in told["findings"])


def test_a_process_that_outlives_its_trial_is_found_and_ended(tmp_path: Path) -> None:
    body = (
        "trials.ENDS_WITHIN_S = 0.1\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(600)\n"
        "        os._exit(0)"
    )
    told = run(tmp_path, body)
    assert {finding["kind"] for finding in told["findings"]} == {"hang"}
    assert all("outlive" in finding["what"] for finding in told["findings"])


def test_trials_that_find_nothing_are_counted(tmp_path: Path) -> None:
    told = run(tmp_path, "tally.note('a note')")
    assert told["findings"] == []
    assert told["notes"] == {"a note": 4}
