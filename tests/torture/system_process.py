"""Faults that a process meets: limits, too little memory, signals, stopped flushers.

See `scene` for what each of these functions can rely on and what is judged after it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from processes import children_of, wait_until_dead
from scene import PATIENCE_S, Impossible, pause
from system_faults import fault

import laststep
import state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from processes import Child
    from scene import Scene, Trainer

# Limits


@contextlib.contextmanager
def limited(kind: int, soft: int, pids: tuple[int, ...] = (0,)) -> Iterator[None]:
    """A soft limit on processes (0: this one), taken back at the end."""
    hard = resource.prlimit(0, kind)[1]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, (soft, hard))
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, kind, (hard, hard))


def with_helpers() -> tuple[int, ...]:
    """This process and its flusher."""
    return (0, *children_of(os.getpid()))


@fault("files limited from the start (RLIMIT_FSIZE)")
def fsize_from_start(scene: Scene) -> None:
    size = scene.chance.choice((0, 100, 5000, 100_000, 1 << 20))

    def body(trainer: Trainer) -> None:
        with limited(resource.RLIMIT_FSIZE, size):
            trainer.save(2)
            helpers = with_helpers()
        with limited(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY, helpers):
            trainer.save()

    scene.work(body)


@fault("files limited under way (RLIMIT_FSIZE)")
def fsize_under_way(scene: Scene) -> None:
    size = scene.chance.choice((0, 100, 5000, 100_000, 1 << 20))

    def body(trainer: Trainer) -> None:
        trainer.save()
        with limited(resource.RLIMIT_FSIZE, size, with_helpers()):
            trainer.save(3)
        trainer.save()

    scene.work(body)


@fault("memory limited (RLIMIT_AS)")
def address_space(scene: Scene) -> None:
    # Room for some stacks: where a thread finds no memory for its first object, Python's own
    # Thread.start() waits for it for ever.
    more = scene.chance.choice((40 << 20, 80 << 20, 160 << 20))
    before_start = scene.chance.random() < 0.5

    def body(trainer: Trainer) -> None:
        if not before_start:
            trainer.save()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        with limited(resource.RLIMIT_AS, pages * resource.getpagesize() + more):
            trainer.save(2)
        trainer.save()

    scene.work(body)


@fault("memory of the flusher limited (RLIMIT_AS)")
def flusher_address_space(scene: Scene) -> None:
    more = scene.chance.choice((0, 1 << 20, 4 << 20))

    def body(trainer: Trainer) -> None:
        trainer.save()
        helpers = tuple(children_of(os.getpid()))
        sizes = [
            int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[0])
            for pid in helpers
        ]
        size = max(sizes, default=1 << 20) * resource.getpagesize()
        with limited(resource.RLIMIT_AS, size + more, helpers):
            trainer.save(3)
        trainer.save()

    scene.work(body, flush="process")


@fault("out of descriptors (RLIMIT_NOFILE)")
def descriptors(scene: Scene) -> None:
    free = scene.chance.randrange(14)
    before_start = scene.chance.random() < 0.5

    def body(trainer: Trainer) -> None:
        if not before_start:
            trainer.save()
        top = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
        holes = top - len(list(Path("/proc/self/fd").iterdir()))
        plugs = [os.open("/dev/null", os.O_RDONLY) for _ in range(max(0, holes))]
        with limited(resource.RLIMIT_NOFILE, top + 1 + free):
            trainer.save(2)
        for plug in plugs:
            os.close(plug)
        trainer.save()

    scene.work(body)


@fault("out of descriptors, in the flusher (RLIMIT_NOFILE)")
def flusher_descriptors(scene: Scene) -> None:
    count = scene.chance.randrange(4, 24)

    def body(trainer: Trainer) -> None:
        trainer.save()
        with limited(resource.RLIMIT_NOFILE, count, tuple(children_of(os.getpid()))):
            trainer.save(3)
        trainer.save()

    scene.work(body, flush="process")


@fault("no more processes (RLIMIT_NPROC)")
def processes(scene: Scene) -> None:
    if os.geteuid() != 0:
        raise Impossible("others of this user would suffer; only root can become nobody")
    nobody = 65534
    for path in (scene.folder, *scene.run.rglob("*"), scene.run):
        os.chown(path, nobody, nobody)
    for parent in scene.folder.parents:
        if parent.stat().st_mode & 0o1 == 0:
            parent.chmod(parent.stat().st_mode | 0o111)
    allowed = scene.chance.randrange(3)

    def body(trainer: Trainer) -> None:
        os.setresgid(nobody, nobody, 0)
        os.setresuid(nobody, nobody, 0)
        with limited(resource.RLIMIT_NPROC, allowed):
            trainer.save(2)
        trainer.save()

    scene.work(body, flush="process")


@fault("out of memory (cgroup)")
def out_of_memory(scene: Scene) -> None:
    group = _cgroup(scene)
    try:
        with scene.trainer(lambda trainer: trainer.save(30, wait=False)) as child:
            child.wait(PATIENCE_S, until=lambda: len(child.said("saving")) > 2)
            for pid in (child.pid, *children_of(child.pid)):
                with contextlib.suppress(OSError):
                    (group / "cgroup.procs").write_text(f"{pid}", encoding="ascii")
            child.was_killed = True
            with contextlib.suppress(OSError):
                limit = scene.chance.choice((4 << 20, 32 << 20))
                (group / "memory.limit_in_bytes").write_text(f"{limit}", encoding="ascii")
            if not child.wait(PATIENCE_S / 3):
                child.kill()  # it lives with what it has
                child.wait(PATIENCE_S)
    finally:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def _cgroup(scene: Scene) -> Path:
    """A control group of our own, below the one that we are in."""
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = [line.split(":", 2)[2] for line in lines if line.split(":", 2)[1] == "memory"]
    if not own:
        raise Impossible("there is no control group for memory (version 1)")
    place = Path(f"/sys/fs/cgroup/memory{own[0]}") / f"laststep-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        raise Impossible(f"no control group can be made: {error}") from error
    return place


# Signals


@fault("a storm of signals whose handlers raise (SIGINT, SIGTERM)")
def raising_signals(scene: Scene) -> None:
    def body(trainer: Trainer) -> None:
        saving = False  # no event: its lock is not for handlers

        def stop(number: int, frame: object) -> None:
            nonlocal saving
            if saving:  # what interrupts the test itself shows nothing
                saving = False
                raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        trainer.say("storm")
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            step, trainer.step = trainer.step, trainer.step + 1
            state.advance(trainer.live, step)
            trainer.say("saving", step)
            try:
                try:
                    saving = True
                    handle = trainer.checkpointer.save(step)
                finally:
                    saving = False  # also where it failed: nothing may be raised while that is told
                trainer.handles.append(handle)
            except KeyboardInterrupt:
                pass  # absent or whole, nobody can say which
            except laststep.LaststepError as error:
                trainer.say("told", repr(error))
        trainer.say("calm")
        trainer.settle()
        with trainer.told("wait", -1):
            trainer.checkpointer.wait(PATIENCE_S)
        trainer.save()

    with scene.trainer(body) as child:
        child.wait(PATIENCE_S, until=lambda: bool(child.said("storm")))
        while not child.has_ended and not child.said("calm"):
            child.kill(scene.chance.choice((signal.SIGINT, signal.SIGTERM)))
            child.listen(scene.chance.uniform(0.001, 0.03))


@fault("a storm of signals with handlers (SIGALRM, SIGCHLD)")
def quiet_signals(scene: Scene) -> None:
    every_s = scene.chance.choice((0.0005, 0.002, 0.01))

    def body(trainer: Trainer) -> None:
        def reap(number: int, frame: object) -> None:
            time.sleep(0)

        signal.signal(signal.SIGALRM, reap)
        signal.signal(signal.SIGCHLD, reap)
        signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
        for _ in range(4):
            trainer.save(wait=False)
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        trainer.settle()
        signal.setitimer(signal.ITIMER_REAL, 0)
        trainer.save()

    scene.work(body)


@fault("the flusher stopped and continued (SIGSTOP)")
def stopped(scene: Scene) -> None:
    def body(trainer: Trainer) -> None:
        trainer.save()
        trainer.say("ready")
        trainer.save(6, wait=False)
        trainer.settle()

    with scene.trainer(body, flush="process") as child:
        child.wait(PATIENCE_S, until=lambda: bool(child.said("ready")))
        helpers = children_of(child.pid)
        for _ in range(3):
            pause(scene.chance, 0.05)
            send(helpers, signal.SIGSTOP)
            pause(scene.chance, 0.3)
            send(helpers, signal.SIGCONT)


@fault("the trainer killed while its flusher is stopped")
def killed_while_stopped(scene: Scene) -> None:
    early = scene.chance.random() < 0.5
    with scene.trainer(lambda trainer: trainer.save(12, wait=False), flush="process") as child:
        child.wait(PATIENCE_S, until=lambda: bool(children_of(child.pid)))
        if not early:
            child.wait(PATIENCE_S, until=lambda: bool(child.said("saving")))
        pause(scene.chance, 0.2)
        helpers = children_of(child.pid)
        send(helpers, signal.SIGSTOP)
        _murder(child)
        pause(scene.chance, 0.2)
        send(helpers, signal.SIGCONT)
        wait_until_dead(helpers, PATIENCE_S)


def _murder(child: Child) -> None:
    child.was_killed = True
    child.kill()
    child.wait(PATIENCE_S)


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
