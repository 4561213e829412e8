"""System calls that fail, are short or slow, and a clock that jumps, in real processes.

A small library in C (shim.c), built with the machine's compiler when it is wanted, stands between a
process and libc. It sleeps until a `Control` arms it, which is a file in shared memory: a trainer,
which is forked, and its flusher, which is started anew, obey the same one.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")

OPS = {
    "write": 1,
    "fsync": 2,
    "link": 4,
    "rename": 8,
    "open": 16,
    "mkdir": 32,
    "read": 64,
    "unlink": 128,
}
WHOSE = {"any": 0, "trainer": 1, "flusher": 2}
_MODES = {"fail": 1, "short": 2, "slow": 3}
_PLACE = "LASTSTEP_SHIM_FOLDER"
_CONTROL = "LASTSTEP_SHIM_CONTROL"


def is_loaded() -> bool:
    """Whether this process runs with it."""
    return hasattr(ctypes.CDLL(None), "laststep_shim_use")


def start_again_with_it() -> None:
    """This very program again, with the shim; returns only where it cannot be built."""
    folder = tempfile.mkdtemp(prefix="laststep-shim-")
    library = build(Path(folder))
    if library is None:
        shutil.rmtree(folder)
        return
    environment = {**os.environ, "LD_PRELOAD": str(library), _PLACE: folder}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606


def build(folder: Path) -> Path | None:
    """The library, or None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "shim.so"
    subprocess.run(
        [
            compiler,
            "-O1",
            "-Wall",
            "-Wno-nonnull-compare",
            "-shared",
            "-fPIC",
            "-o",
            str(library),
            str(SOURCE),
            "-ldl",
        ],
        check=True,
    )
    return library


if _PLACE in os.environ and is_loaded():
    # Children that are forked end by os._exit and do not come here; those that are started anew
    # do not import this.
    atexit.register(shutil.rmtree, os.environ.pop(_PLACE), ignore_errors=True)


class _Fields(ctypes.Structure):
    """As in shim.c."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "armed",
                "ops",
                "whose",
                "trainer",
                "start",
                "count",
                "error",
                "mode",
                "delay_us",
                "calls",
                "fired",
                "pad",
            )
        ),
        ("clock_offset_s", ctypes.c_int64),
        ("prefix", ctypes.c_char * 4096),
    )


class Control:
    """Says what goes wrong, in this process and all that it forks or starts from now on."""

    def __init__(self, folder: Path) -> None:
        path = folder / "shim.control"
        path.write_bytes(bytes(ctypes.sizeof(_Fields)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._fields = _Fields.from_buffer(self._memory)
        if ctypes.CDLL(None).laststep_shim_use(os.fsencode(path)) != 0:
            raise OSError(f"the shim cannot use {path}")
        os.environ[_CONTROL] = str(path)

    def arm(
        self,
        below: Path,
        *,
        ops: tuple[str, ...],
        whose: str = "any",
        trainer: int = 0,
        start: int = 1,
        count: int = 1,
        mode: str = "fail",
        error: int = 0,
        delay_us: int = 0,
    ) -> None:
        """`count` calls (-1: all), from the `start`-th on, of these kinds below that folder."""
        fields = self._fields
        fields.armed = fields.calls = fields.fired = 0
        fields.prefix = os.fsencode(below)
        fields.ops = sum(OPS[op] for op in ops)
        fields.whose, fields.trainer = WHOSE[whose], trainer
        fields.start, fields.count = start, count
        fields.mode, fields.error, fields.delay_us = _MODES[mode], error, delay_us
        fields.armed = 1

    def jump(self, seconds: int) -> None:
        """The clock is so much later than it is; 0: right again."""
        self._fields.clock_offset_s = seconds

    def disarm(self) -> int:
        """No more; how many calls went wrong."""
        self._fields.armed = 0
        self.jump(0)
        return self._fields.fired
