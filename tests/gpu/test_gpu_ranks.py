"""Two ranks on one GPU restore over NCCL: whatever is passed on stays on the device."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

RANK = Path(__file__).parent / "nccl_rank.py"
SOURCE = Path(__file__).parents[2] / "src"
PATIENCE_S = 60.0


def both(task: str, run: Path) -> list[tuple[Any, str]]:
    """What each rank found, None for one that ended without a word, and what it logged."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(SOURCE), *filter(None, sys.path))),
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "VERSION",
    }
    with contextlib.ExitStack() as started:
        ranks = []
        for rank in range(2):
            process = subprocess.Popen(
                [sys.executable, str(RANK), task, str(rank), str(port), str(run)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**environment, "NCCL_HOSTID": f"host{rank}"},
            )
            ranks.append(started.enter_context(process))
            started.callback(process.kill)
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    return [(_result(out), errors) for out, errors in said]


def _result(out: str) -> Any:
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("rows") / "run"
    assert [found for found, _ in both("save_rows", run)] == [{}, {}]
    return run


def test_rows_become_columns_from_device_to_device(rows: Path) -> None:
    for found, errors in both("load_columns", rows):
        assert found == {"right": True, "on_device": True, "alive": 2}, errors


def test_what_both_want_is_told_from_device_to_device(tmp_path: Path) -> None:
    both("save_whole", tmp_path / "run")
    for found, errors in both("load_whole", tmp_path / "run"):
        assert found == {"right": True, "on_device": True, "alive": 2}, errors


def test_a_little_goes_over_the_host(rows: Path) -> None:
    for found, errors in both("load_columns_little", rows):
        assert found == {"right": True, "on_device": False, "alive": 2}, errors


def test_all_go_over_the_host_where_nccl_fails_on_one(rows: Path) -> None:
    first, second = both("load_where_nccl_fails", rows)
    for found, errors in (first, second):
        assert found == {"right": True, "on_device": False, "alive": 2}, errors
        assert "NCCL" in errors


def test_a_rank_that_is_lost_meanwhile_is_an_error_and_the_others_live_on(rows: Path) -> None:
    (found, errors), (lost, _) = both("load_and_lose_a_rank", rows)
    assert lost is None
    assert found is not None, errors
    assert found["error"]
    assert found["alive"] == 2
