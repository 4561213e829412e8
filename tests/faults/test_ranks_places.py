"""What the ranks of a job share goes bad: the disk is full, the network between them is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from rank_jobs import check, wait_for_end

from expect import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rank_jobs import Job


def test_a_disk_that_is_full_for_all_ranks_is_an_error_on_all_and_room_makes_it_work_again(
    open_job: Callable[..., Job], run_folder: Path, mount: Callable[..., None]
) -> None:
    place = run_folder.parent
    mount(place, "-t", "tmpfs", "-o", "size=32m", "laststep-test")
    job = open_job(2)
    job.save(1)
    ballast = place / "ballast"
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free)
    for error in job.fails(2):
        assert "No space left on device" in error
    check(run_folder, [1])
    ballast.unlink()
    job.save(2)
    job.close()
    check(run_folder, [1, 2])


class Wire:
    """Two network namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = [f"laststep-{os.getpid()}-{end}" for end in "ab"]
        self.interfaces = ("ls-a", "ls-b")
        self.address = "10.213.77.1"

    def lay(self) -> None:
        for name in self.names:
            self._do("netns", "add", name)
        first, second = self.names
        ends = self.interfaces
        self._do(
            "-n", first, "link", "add", ends[0], "type", "veth", "peer", ends[1], "netns", second
        )
        for number, name in enumerate(self.names):
            at = f"10.213.77.{number + 1}/24"
            self._do("-n", name, "address", "add", at, "dev", ends[number])
            self._do("-n", name, "link", "set", "lo", "up")
            self._do("-n", name, "link", "set", ends[number], "up")

    def cut(self) -> None:
        self._do("-n", self.names[0], "link", "set", self.interfaces[0], "down")

    def mend(self) -> None:
        self._do("-n", self.names[0], "link", "set", self.interfaces[0], "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(f"/run/netns/{name}" for name in self.names)

    def _do(self, *words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def wire() -> Iterator[Wire]:
    if shutil.which("ip") is None:
        pytest.skip("needs the program `ip`")
    one = Wire()
    try:
        one.lay()
    except OSError as error:
        one.remove()
        pytest.skip(f"needs the right to make network namespaces: {error}")
    yield one
    one.remove()


@pytest.mark.long
def test_a_network_that_is_cut_in_mid_save_is_an_error_on_both_sides_and_nobody_hangs(
    wire: Wire, start_job: Callable[..., Job], run_folder: Path
) -> None:
    job = start_job(2, networks=wire.paths, address=wire.address, interfaces=wire.interfaces)
    job.open(run_folder, deadline_s=3.0)  # by the system's clock, as the network is waited for
    job.stand_at("receipt", 101, number=1)
    wire.cut()
    job.ranks[1].do("go receipt")
    error = job.ranks[0].failed()
    assert names(error, "rank 1", "step 101", "step 101", "3 s")
    assert "3 s" in job.ranks[1].failed()
    check(run_folder, [])
    wire.mend()
    step = 102
    job.tell(f"try {step}")
    while [rank.next_words()[0] for rank in job.ranks] != ["committed", "committed"]:
        step += 1  # the system waits longer and longer before it tries again to send
        job.tell(f"try {step}")
    wire.cut()
    job.tell(f"save {step + 1}")
    for rank in job.ranks:
        rank.hear("done", "save")
        rank.hang_up()  # without close(), too
    for rank in job.ranks:
        rank.hear("ends")
        assert rank.end() == 0
        for pid in rank.flushers:
            wait_for_end(pid)
    check(run_folder, [step])
