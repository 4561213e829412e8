"""Faults of what a run lies on: odd paths, filesystems, failing calls, clocks, folders that move.

See `scene` for what each of these functions can rely on and what is judged after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from scene import PATIENCE_S, Impossible, Scene, pause
from system_faults import fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from scene import Trainer
    from shim import Control

_CLONE_NEWNS = 0x00020000


# Paths

ODD = (
    "with spaces  ",
    "new\nline",
    "tab\tand\rreturn",
    "ünïcödé ☃ 検",
    "x" * 255,
    "run.",
    "run...",
    "-rf",
    "~",
    "%s {x} $HOME",
    "step-00000001.1-1",
    "'\"`;&|",
    "/".join(["d" * 200] * 12),
)


@fault("an odd path")
def odd_path(scene: Scene) -> None:
    name = scene.chance.choice(ODD)
    scene.tally.step(f"named {name[:60]!r}")
    _elsewhere(scene, scene.folder / name)
    scene.work(lambda trainer: trainer.save(2))


@fault("a path too long, or no text")
def impossible_path(scene: Scene) -> None:
    """It is refused; where the run was before, nothing changes."""
    name = scene.chance.choice(("x" * 256, "x" * 5000, os.fsdecode(b"\xff\xfe\x80")))
    with scene.trainer(lambda trainer: trainer.save(), run=scene.folder / name) as child:
        pass
    scene.committed -= {step for (step,) in child.said("committed")}
    scene.begun -= {step for (step,) in child.said("saving")}


@fault("a relative path, and another working folder meanwhile")
def relative(scene: Scene) -> None:
    def body(trainer: Trainer) -> None:
        trainer.save()
        os.chdir("/")
        trainer.save(2)

    before = Path.cwd()
    os.chdir(scene.folder)
    try:
        with scene.trainer(body, run="run"):
            pass
    finally:
        os.chdir(before)


@fault("a path through symbolic links")
def linked(scene: Scene) -> None:
    (scene.folder / "folder").symlink_to(scene.folder, target_is_directory=True)
    (scene.folder / "link").symlink_to("folder/run")
    with scene.trainer(lambda trainer: trainer.save(2), run=scene.folder / "link"):
        pass


# Filesystems


def _elsewhere(scene: Scene, run: Path) -> None:
    """From now on the run lies there, and is new."""
    run.parent.mkdir(parents=True, exist_ok=True)
    scene.run = run
    scene.committed, scene.begun, scene.failed = set(), set(), set()


@contextlib.contextmanager
def mounted(scene: Scene, *options: str) -> Iterator[Path]:
    """A filesystem of our own, which nobody else sees; the run on it is judged before it goes."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise Impossible(f"no mounts of our own: {os.strerror(ctypes.get_errno())}")
    _call("mount", "--make-rprivate", "/")
    place = scene.folder / "mounted"
    place.mkdir()
    _call("mount", *options, str(place))
    try:
        yield place
        scene.judge()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)
        _elsewhere(scene, scene.folder / "after")


def _call(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise Impossible(f"there is no `{words[0]}`") from error
    if done.returncode != 0:
        raise Impossible(f"{' '.join(words[:3])}: {done.stderr.strip()}")


def _ext4(scene: Scene, *options: str) -> Path:
    image = scene.folder / "image"
    with image.open("wb") as file:
        file.truncate(48 << 20)
    _call("mkfs.ext4", "-q", *options, str(image))
    return image


@fault("tmpfs")
def tmpfs(scene: Scene) -> None:
    with mounted(scene, "-t", "tmpfs", "-o", "size=64m", "laststep") as place:
        _elsewhere(scene, place / "run")
        scene.work(lambda trainer: trainer.save(3))


@fault("overlay")
def overlay(scene: Scene) -> None:
    names = [scene.folder / name for name in ("lower", "upper", "work")]
    for name in names:
        name.mkdir()
    shutil.move(scene.run, names[0] / "run")  # what is there already is in the lower layer
    options = "lowerdir={},upperdir={},workdir={}".format(*names)
    with mounted(scene, "-t", "overlay", "-o", options, "overlay") as place:
        scene.run = place / "run"
        scene.work(lambda trainer: trainer.save(3))


@fault("a full disk (ext4)")
def full(scene: Scene) -> None:
    image = _ext4(scene, "-m", "0")
    leave = scene.chance.randrange(0, 3 << 20)
    with mounted(scene, "-o", "loop", str(image)) as place:
        _elsewhere(scene, place / "run")
        scene.work(lambda trainer: trainer.save(2))

        def body(trainer: Trainer) -> None:
            trainer.save()
            ballast = place / "ballast"
            status = os.statvfs(place)
            with ballast.open("wb") as file, contextlib.suppress(OSError):
                os.posix_fallocate(
                    file.fileno(), 0, max(1, status.f_bavail * status.f_bsize - leave)
                )
            trainer.save(3)
            ballast.unlink()
            trainer.save()

        scene.work(body)


@fault("out of inodes (ext4)")
def inodes(scene: Scene) -> None:
    image = _ext4(scene, "-N", "96")
    leave = scene.chance.randrange(6)
    with mounted(scene, "-o", "loop", str(image)) as place:
        _elsewhere(scene, place / "run")
        scene.work(lambda trainer: trainer.save(2))

        def body(trainer: Trainer) -> None:
            trainer.save()
            crumbs = place / "crumbs"
            crumbs.mkdir()
            for number in range(max(0, os.statvfs(place).f_favail - leave)):
                (crumbs / f"{number}").touch()
            trainer.save(3)
            shutil.rmtree(crumbs)
            trainer.save()

        scene.work(body)


@fault("a disk remounted read-only (ext4)")
def read_only(scene: Scene) -> None:
    image = _ext4(scene)
    with mounted(scene, "-o", "loop", str(image)) as place:
        _elsewhere(scene, place / "run")
        scene.work(lambda trainer: trainer.save(2))
        _call("mount", "-o", "remount,ro", str(place))
        scene.work(lambda trainer: trainer.save(2))
        _call("mount", "-o", "remount,rw", str(place))


# Calls that fail


def _shim(scene: Scene) -> Control:
    if scene.control is None:
        raise Impossible("there is no C compiler, so no shim")
    return scene.control


ERRORS = (errno.EIO, errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EDQUOT, errno.EROFS, errno.EACCES)


def _saves_that_fail(scene: Scene, **how: object) -> None:
    """A trainer is at work, then calls go wrong, then no more."""
    control = _shim(scene)
    scene.tally.step(f"calls below the run go wrong: {how}")

    def body(trainer: Trainer) -> None:
        trainer.save()
        control.arm(scene.run, trainer=os.getpid(), **how)
        trainer.save(2)
        trainer.save(2, wait=False)
        trainer.settle()
        trainer.say("struck", control.disarm())
        trainer.save()

    child = scene.work(body)
    _count(scene, child.said("struck"))


def _count(scene: Scene, struck: list[list[object]]) -> None:
    calls = sum(number for (number,) in struck)
    scene.harmless = calls == 0
    scene.tally.note("system: calls that were made to go wrong", calls)


def _register_failing(op: str, most: int) -> None:
    """The first to go wrong is one of the first `most`."""

    @fault(f"a call that fails: {op}")
    def failing(scene: Scene) -> None:
        _saves_that_fail(
            scene,
            ops=(op,),
            error=scene.chance.choice(ERRORS),
            whose=scene.chance.choice(("any", "any", "flusher", "trainer")),
            start=scene.chance.randrange(1, most + 1),
            count=scene.chance.choice((1, 1, 2, -1)),
        )


for _op, _most in (
    ("write", 12),
    ("fsync", 12),
    ("link", 4),
    ("open", 16),
    ("mkdir", 4),
    ("unlink", 4),
    ("read", 6),
):
    _register_failing(_op, _most)


@fault("calls interrupted (EINTR)")
def interrupted(scene: Scene) -> None:
    _saves_that_fail(
        scene,
        ops=("write", "fsync", "open", "read"),
        error=errno.EINTR,
        start=scene.chance.randrange(1, 20),
        count=5,
    )


@fault("short writes and reads")
def short(scene: Scene) -> None:
    count = scene.chance.choice((1, 20, 200))
    start = scene.chance.randrange(1, 10)
    _saves_that_fail(scene, ops=("write", "read"), mode="short", start=start, count=count)


@fault("a slow disk")
def slow(scene: Scene) -> None:
    _saves_that_fail(
        scene,
        ops=("write", "fsync", "link", "open"),
        mode="slow",
        delay_us=scene.chance.choice((1000, 20_000, 200_000)),
        count=20,
    )


@fault("reads that fail during a restore")
def unreadable(scene: Scene) -> None:
    """It raises or restores the newest; that an older one comes back is what must not be."""
    control = _shim(scene)
    control.arm(
        scene.run,
        ops=(scene.chance.choice(("read", "open")),),
        error=scene.chance.choice((errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM)),
        start=scene.chance.randrange(1, 25),
        count=scene.chance.choice((1, 2, -1)),
    )

    def body(trainer: Trainer) -> None:
        trainer.say("struck", control.disarm())

    _count(scene, scene.work(body).said("struck"))


@fault("a clock that jumps")
def clock(scene: Scene) -> None:
    control = _shim(scene)
    jumps = [
        scene.chance.choice((-1, 1)) * scene.chance.choice((1, 4000, 86_400, 10**9))
        for _ in range(4)
    ]
    scene.tally.step(f"the clock jumps by {jumps}")

    def body(trainer: Trainer) -> None:
        for jump in jumps:
            trainer.save(wait=False)
            control.jump(jump)
            trainer.settle()
            trainer.save()
        control.jump(0)

    scene.work(body)


# Folders that move


def _while_saving(scene: Scene, harm: Callable[[], None], undo: Callable[[], None]) -> None:
    def body(trainer: Trainer) -> None:
        trainer.save()
        trainer.say("ready")
        deadline = time.monotonic() + 0.6
        while time.monotonic() < deadline:
            trainer.save(wait=trainer.step % 2 == 0)

    with scene.trainer(body) as child:
        child.wait(PATIENCE_S, until=lambda: bool(child.said("ready")) or child.has_ended)
        pause(scene.chance, 0.3)
        harm()
        pause(scene.chance, 0.3)
        child.wait(PATIENCE_S)
    undo()


@fault("the run renamed under way, and back later")
def renamed(scene: Scene) -> None:
    away = scene.folder / "away"

    def back() -> None:
        # What was made meanwhile at the old place is no part of the run.
        shutil.rmtree(scene.run, ignore_errors=True)
        away.rename(scene.run)

    def gone() -> None:
        scene.run.rename(away)

    _while_saving(scene, gone, lambda: None)
    made_anew = _steps(scene.run)
    scene.committed -= made_anew
    scene.begun |= made_anew
    back()


@fault("the run deleted under way")
def deleted(scene: Scene) -> None:
    def gone() -> None:
        while scene.run.exists():
            shutil.rmtree(scene.run, ignore_errors=True)

    _while_saving(scene, gone, lambda: None)
    # What was committed before is gone with it; what came later may be there.
    scene.committed &= _steps(scene.run)


@fault("the run replaced by an empty folder under way")
def replaced(scene: Scene) -> None:
    away = scene.folder / "away"

    def swap() -> None:
        scene.run.rename(away)
        scene.run.mkdir()

    _while_saving(scene, swap, lambda: None)
    here, there = _steps(scene.run), _steps(away)
    if lost := scene.committed - here - there:
        scene.tally.flaw("wrong", f"steps {sorted(lost)} were committed, and are nowhere")
    scene.committed &= here


def _steps(run: Path) -> set[int]:
    """The steps that are committed there, as the names of folders say."""
    return {int(path.parent.name[5:13]) for path in run.glob("step-*/manifest.json")}
