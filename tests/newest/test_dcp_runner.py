"""The runner of PyTorch's tests tells which pass on laststep's storage, with tests made here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

RUNNER = Path(__file__).with_name("dcp.py")
TESTS = """
import multiprocessing
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter


def tell(queue):
    queue.put(FileSystemWriter.__module__)


class TestStorage(unittest.TestCase):
    def test_round(self):
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(folder))
            state = {"w": torch.zeros(3)}
            dcp.load(state, storage_reader=FileSystemReader(folder))
            self.assertEqual(state["w"].tolist(), [1, 1, 1])
            dcp.load(state, checkpoint_id=folder)

    def test_ranks(self):
        spawn = multiprocessing.get_context("spawn")
        queue = spawn.Queue()
        rank = spawn.Process(target=tell, args=(queue,))
        rank.start()
        self.assertEqual(queue.get(), FileSystemWriter.__module__)
        rank.join()

    def test_extensions(self):
        FileSystemWriter("anywhere", _extensions=[object()])

    def test_torchs_own(self):
        self.assertTrue(FileSystemWriter.__module__.startswith("torch."))

    def test_broken(self):
        self.fail()
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUNNER), str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_runner_counts_what_passes_on_both_storages(tmp_path: Path) -> None:
    (tmp_path / "test_storage.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    result = run(tmp_path)
    lines = result.stdout.splitlines()
    assert lines[-4:] == [
        "torch's storage: 4 passed, 1 failed, 0 skipped",
        "laststep: 2 of the 4 that pass on torch's storage",
        "  test_storage.py::TestStorage::test_extensions: refused, stream extensions",
        "  test_storage.py::TestStorage::test_torchs_own: failed",
    ], result
    assert result.returncode == 1
    assert run(tmp_path, "-k", "not torchs_own").returncode == 0


def test_a_folder_without_tests_is_an_error(tmp_path: Path) -> None:
    assert run(tmp_path).returncode == 2
