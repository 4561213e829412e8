"""What all tests share: the skip of GPU tests, folders on a disk, mounts, hypothesis profiles, and
`$WARM_PYTHON`, an interpreter that has imported torch already."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
WARM = ROOT / "tests" / "warm"
FIRST = (
    "test_docs.py",
    "faults/test_kills.py",
    "checkpointer/test_objects.py",
    "tiers/test_memory.py",
    "faults/test_preemption.py",
    "ranks/test_matrix.py",
    "crash/test_crash_model.py",
    "faults/test_ranks_on_nodes.py",
    "flush/test_writer.py",
    "faults/test_ranks_in_memory.py",
    "faults/test_preempted_tiers.py",
    "storage/test_objects_proxied.py",
    "checkpointer/test_interrupts.py",
    "faults/test_ranks_failing.py",
    "checkpointer/test_saving.py",
    "torture/test_short_torture.py",
)
"""The files that take longest, in that order: at the end no worker sits alone with one of them."""
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})

# As in the Makefile: some virtual CPUs announce AMX and then kill the process that uses it. Read by
# torch when it is imported, here and in every process that a test starts.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

# Threads of OpenMP sleep when they have nothing to do: spinning took half of the CPU of some files.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# As in the Makefile: each of hundreds of interpreters would compile laststep anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No deadline: a timing is a benchmark, never a test. Function-scoped fixtures are allowed because
# every example makes its own folder below the fixture's.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("torture", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Set `$WARM_PYTHON`, which tests start like `sys.executable`: an import of torch and the first
    step of an optimizer take three seconds of CPU. All workers share one."""
    ask_no_name_server()
    # A shell without job control starts background jobs with SIGINT ignored, nohup with SIGHUP:
    # tests send both to programs that would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.TemporaryDirectory(prefix="laststep-warm-")
    python = Path(folder.name) / "python"
    python.write_text(f"#!{sys.executable} -IS\n" + (WARM / "client.py").read_text())
    python.chmod(0o755)
    os.environ["WARM_PYTHON"] = str(python)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(python.with_name("socket")))
        listener.listen(100)
        server = subprocess.Popen(
            [sys.executable, WARM / "server.py", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "src"),
                "OMP_NUM_THREADS": "1",
                # To ask whether there is a GPU would otherwise leave none to what is forked.
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            },
        )

    def end() -> None:
        server.communicate()
        folder.cleanup()

    config.add_cleanup(end)


def ask_no_name_server() -> None:
    """Look names up in /etc/hosts alone. torch asks for the name of every peer of a TCPStore, and a
    name server that does not answer costs five seconds each time."""
    with contextlib.suppress(AttributeError):  # another C library than that of GNU
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of `FIRST` come first. Tests marked `gpu` are skipped, with the reason, where CUDA is
    absent."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(FIRST)}
    if gone := [str(path) for path in places if not path.exists()]:
        raise pytest.UsageError(f"FIRST names files that are not there: {', '.join(gone)}")
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # torch takes seconds to import; most runs of a single file do not need it
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} sees none")
    for item in marked:
        item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What is there now stays: no collection of garbage has to look at all of torch again."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Say where the run folders lie, so that a suite that only saw memory shows it."""
    disk = disk_folder()
    return f"run folders: {disk} ({filesystem_of(disk)})"


def filesystem_of(path: Path) -> str:
    """The type of the filesystem that holds a path: that of the mount point nearest above it."""
    mounts: dict[Path, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount_point, kind, *_ = line.split()
        # The kernel writes a blank as \040. A later mount hides an earlier one.
        mounts[Path(mount_point.replace("\\040", " "))] = kind
    path = path.resolve()
    return next((mounts[at] for at in (path, *path.parents) if at in mounts), "unknown")


def disk_folder() -> Path:
    """The first of the usual places for temporary files that is not memory.

    /tmp is memory on many machines, where fsync is free and O_DIRECT behaves otherwise. Where
    everything is memory the first place is taken, and the header of the report shows it.
    """
    places = [Path(tempfile.gettempdir()), Path("/var/tmp"), ROOT / "build"]
    ROOT.joinpath("build").mkdir(exist_ok=True)
    usable = [place for place in places if place.is_dir() and os.access(place, os.W_OK)]
    on_disk = [place for place in usable if filesystem_of(place) not in MEMORY_FILESYSTEMS]
    return (on_disk or usable)[0]


@pytest.fixture(autouse=True)
def pages_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that saves pass through is made by whoever writes into it, not ahead of time: 60 ms of
    CPU for each Checkpointer. tests/memory has it as it is, and so has every new interpreter."""
    if (shared := sys.modules.get("laststep.memory.segments")) is not None:
        for name in ("allocate", "populate"):
            monkeypatch.setattr(shared.Mapping, name, lambda *_: None)


@pytest.fixture
def run_folder() -> Iterator[Path]:
    """A folder for one run, not yet made, on a real disk; removed with all it holds afterwards."""
    with tempfile.TemporaryDirectory(prefix="laststep-test-", dir=disk_folder()) as folder:
        yield Path(folder) / "run"


@pytest.fixture
def flusher() -> Callable[[], int]:
    """`flusher()`: the id of the process that is this test's flusher."""

    def running() -> set[int]:
        mine, found = f"\nPPid:\t{os.getpid()}\n", set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = (folder / "cmdline").read_bytes()
                if b"laststep.flush" in command and mine in (folder / "status").read_text():
                    found.add(int(folder.name))
        return found

    earlier = running()  # a test before may have left one that is still busy

    def find() -> int:
        wait_until(lambda: not running() <= earlier)  # a new one has no command line at first
        return max(running() - earlier)

    return find


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """`mount(place, *options)`: a mount there until the test is over; skips where nobody may."""
    mounted: dict[Path, None] = {}

    def act(place: Path, *options: str) -> None:
        try:
            done = subprocess.run(["mount", *options, str(place)], capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("needs the program `mount`")
        if done.returncode != 0:
            pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()}")
        mounted[place] = None

    yield act
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)
