"""A real disk that becomes full in the midst of a save.

The disk is a small tmpfs, mounted in a mount namespace of a process of its own: nobody else ever
sees it, and it is gone with that process, however it ends. That process is this file, run as a
program with the name of a case and the disk's folder. `test_places` has the disk that is full
before a save begins.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.storage.files import Disk
from waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).resolve().parent.parent
MIB = 1 << 20
DISK_MIB = 48
MOUNT = f'mount -t tmpfs -o size={DISK_MIB}m laststep-test "$0" && exec "$@"'


# What runs on the small disk


def fill(place: Path, *, leave_bytes: int) -> Path:
    """Take all room but that much."""
    ballast = place / "ballast"
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - leave_bytes)
    assert os.statvfs(place).f_bavail * os.statvfs(place).f_frsize <= leave_bytes
    return ballast


def without_promise(disk: Disk, fd: int, size_bytes: int) -> None:
    """What a filesystem answers that cannot set room aside, such as NFS 3 or ext2."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def in_the_tensors(place: Path, flush: str) -> None:
    """The filesystem cannot promise room, and is full when half of the tensors are written."""
    Disk.allocate = without_promise  # type: ignore[method-assign]
    written = []
    write = Disk.write

    def counted(disk: Disk, fd: int, data: memoryview, offset: int) -> int:
        count = write(fd, data, offset)
        written.append(count)
        return count

    Disk.write = counted  # type: ignore[method-assign]

    def before_the_failure() -> None:
        written.clear()

    state = {"t": torch.zeros(16 * MIB, dtype=torch.uint8)}
    go(place, flush, state, leave_bytes=8 * MIB, before=before_the_failure)
    assert sum(written) >= MIB, "the disk was full before anything was written"


def in_the_objects(place: Path, flush: str) -> None:
    """Room for the tensors was promised; the values, which come behind them, do not fit."""
    state = {"t": torch.zeros(4 * MIB, dtype=torch.uint8), "text": "x" * (12 * MIB)}
    go(place, flush, state, leave_bytes=8 * MIB)


def at_the_commit(place: Path, flush: str) -> None:
    """All data files fit to the last page; the manifest does not."""
    state = {"t": torch.zeros(4 * MIB, dtype=torch.uint8)}
    with open_run(place / "measured", flush, state) as checkpointer:
        checkpointer.save(0).wait(PATIENCE_S)
    page = os.sysconf("SC_PAGE_SIZE")
    [folder] = (place / "measured").glob("step-*")
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    needed = sum(-(-size // page) * page for size in sizes)
    shutil.rmtree(place / "measured")
    go(place, flush, state, leave_bytes=needed)


def in_encoded_blocks(place: Path, flush: str) -> None:
    """What becomes shorter fits, and what does not fills the disk up."""
    noise = torch.randint(0, 256, (16 * MIB,), dtype=torch.uint8)
    state = {"t": torch.zeros(4 * MIB, dtype=torch.uint8), "noise": noise}

    def redraw() -> None:
        noise.copy_(torch.randint(0, 256, (16 * MIB,), dtype=torch.uint8))

    go(place, flush, state, leave_bytes=8 * MIB, before=redraw, compression="max")
    assert torch.equal(laststep.load(place / "run")["state"]["noise"], noise)


def open_run(
    run: Path, flush: str, state: dict[str, object], compression: str = "none"
) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        run,
        state=state,
        options=laststep.Options(flush=flush, progress=False),
        host_memory_bytes=64 * MIB,
        compression=compression,
    )


def go(
    place: Path,
    flush: str,
    state: dict[str, object],
    *,
    leave_bytes: int,
    before: Callable[[], None] = lambda: None,
    compression: str = "none",
) -> None:
    """Save, run out of room, lose nothing, make room, go on."""
    run = place / "run"
    tensor = state["t"]
    assert isinstance(tensor, torch.Tensor)
    checkpointer = open_run(run, flush, state, compression)
    checkpointer.restore()
    tensor.fill_(1)
    checkpointer.save(1).wait(PATIENCE_S)
    [first] = run.glob("step-*")
    bytes_before = {file.name: file.read_bytes() for file in first.iterdir()}

    ballast = fill(place, leave_bytes=leave_bytes)
    before()
    tensor.fill_(2)
    if "text" in state:  # or it is found to be stored already
        state["text"] = "y" + str(state["text"])
    handle = checkpointer.save(2)
    told: laststep.LaststepError | None = None
    try:
        checkpointer.wait(PATIENCE_S)
    except laststep.LaststepError as error:
        told = error
    assert type(told) is laststep.StorageError, repr(told)
    assert "ENOSPC" in told.found, told
    assert told.remedy, told
    assert not told.transient
    assert handle.error is not None
    assert not handle.committed.done()

    # The checkpoint that was there is, bit by bit, and of the failed one nothing is left.
    wait_until(lambda: [path.name for path in run.glob("step-*")] == [first.name])
    assert {file.name: file.read_bytes() for file in first.iterdir()} == bytes_before
    catalog = laststep.open(run)
    assert catalog.steps() == [1]
    assert catalog.latest().verify().damage == ()
    tensor.fill_(9)
    assert checkpointer.restore().step == 1
    assert bool((tensor == 1).all())

    ballast.unlink()
    tensor.fill_(3)
    checkpointer.save(3).wait(PATIENCE_S)
    checkpointer.close()
    assert laststep.open(run).steps() == [1, 3]
    assert laststep.open(run).latest().verify().damage == ()
    assert not list(run.rglob("*.tmp-*"))
    again = laststep.load(run)
    assert isinstance(again, dict)
    assert bool((again["state"]["t"] == 3).all())


CASES = {
    case.__name__: case
    for case in (in_the_tensors, in_the_objects, in_encoded_blocks, at_the_commit)
}


# The tests


def private_mounts() -> list[str]:
    """How to run something in a mount namespace of its own; skips where nobody may."""
    for options in (["-m"], ["-r", "-m"]):
        command = ["unshare", *options, "--propagation", "private"]
        with contextlib.suppress(FileNotFoundError):
            tried = [*command, "sh", "-c", MOUNT, "/tmp", "true"]  # seen only in there
            if subprocess.run(tried, capture_output=True, check=False).returncode == 0:
                return command
    pytest.skip("needs the right to mount a tmpfs in a mount namespace of its own (`unshare -m`)")


@pytest.mark.parametrize(
    ("case", "flush"),
    [
        ("in_the_tensors", "thread"),  # the helper process cannot be given another `Disk`
        pytest.param("in_the_objects", "thread", marks=pytest.mark.long),
        pytest.param("in_the_objects", "process", marks=pytest.mark.long),
        pytest.param("in_encoded_blocks", "process", marks=pytest.mark.long),
        ("at_the_commit", "process"),
    ],
)
def test_a_save_that_fills_the_disk_up_fails_whole_and_the_next_one_works(
    case: str, flush: str, tmp_path: Path
) -> None:
    place = tmp_path / "small"
    place.mkdir()
    program = [sys.executable, __file__, case, flush, str(place)]
    done = subprocess.run(
        [*private_mounts(), "sh", "-c", MOUNT, str(place), *program],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{case} held\n"
    assert list(place.iterdir()) == []  # the disk was seen by nobody else


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[3]), sys.argv[2])
    print(f"{sys.argv[1]} held")
