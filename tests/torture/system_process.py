"""Faults that a process meets or makes: limits, signals, forks, threads, stopped flushers, memory.

See `scene` for what each of these functions can rely on and what is judged after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from processes import wait_until_dead
from scene import PATIENCE_S, Impossible, pause

import laststep
import state
from laststep.cli.processes import children_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from processes import Child
    from scene import Scene, Trainer

FAULTS: dict[str, Callable[[Scene], None]] = {}


def fault(name: str) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Enter a function into the registry."""

    def enter(function: Callable[[Scene], None]) -> Callable[[Scene], None]:
        FAULTS[name] = function
        return function

    return enter


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
        sizes = [int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[0])
                 for pid in helpers]  # fmt: skip
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
        saving = threading.Event()

        def stop(number: int, frame: object) -> None:
            if saving.is_set():  # what interrupts the test itself shows nothing
                saving.clear()
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
                saving.set()
                handle = trainer.checkpointer.save(step)
                saving.clear()
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
            _send(helpers, signal.SIGSTOP)
            pause(scene.chance, 0.3)
            _send(helpers, signal.SIGCONT)


@fault("the trainer killed while its flusher is stopped")
def killed_while_stopped(scene: Scene) -> None:
    early = scene.chance.random() < 0.5
    with scene.trainer(lambda trainer: trainer.save(12, wait=False), flush="process") as child:
        child.wait(PATIENCE_S, until=lambda: bool(children_of(child.pid)))
        if not early:
            child.wait(PATIENCE_S, until=lambda: bool(child.said("saving")))
        pause(scene.chance, 0.2)
        helpers = children_of(child.pid)
        _send(helpers, signal.SIGSTOP)
        _murder(child)
        pause(scene.chance, 0.2)
        _send(helpers, signal.SIGCONT)
        wait_until_dead(helpers, PATIENCE_S)


def _murder(child: Child) -> None:
    child.was_killed = True
    child.kill()
    child.wait(PATIENCE_S)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# Forks


def _fork_and_wait(trainer: Trainer, work: Callable[[], None], what: str) -> None:
    """A child of the trainer does something of its own; it must come to an end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    if not wait_until_dead([pid], PATIENCE_S):
        os.kill(pid, signal.SIGKILL)
        trainer.say("hang", f"a forked child that does no more than {what} hangs")
    _, status = os.waitpid(pid, 0)
    if status != 0:
        trainer.say("flaw", f"a forked child that does no more than {what} ends with {status}")


def _save_elsewhere(run: Path) -> None:
    """In a forked child: a run of its own, twice."""
    live = state.new()
    with laststep.Checkpointer(str(run), progress=False, flush="thread", **live) as checkpointer:
        for step in range(3):
            state.advance(live, step)
            checkpointer.save(step).wait(PATIENCE_S)
        if checkpointer.restore().step != 2 or state.wrong(live, 2):
            raise ValueError("the child's own run is wrong")


def _refused(trainer: Trainer) -> None:
    """In a forked child: the parent's Checkpointer refuses to work there."""
    try:
        trainer.checkpointer.save(1)
    except laststep.Usage:
        return
    raise ValueError("a forked child could save with its parent's Checkpointer")


@fault("forks while saves are under way")
def forks(scene: Scene) -> None:
    elsewhere = scene.folder / "elsewhere"
    works = scene.chance.sample(range(4), 3)

    def body(trainer: Trainer) -> None:
        for work in works:
            trainer.save(2, wait=False)
            _fork_and_wait(trainer, *(
                (lambda: None, "end"),
                (lambda: _refused(trainer), "use its parent's Checkpointer"),
                (lambda: torch.ones(100_000).add_(1), "add"),
                (lambda: _save_elsewhere(elsewhere), "save elsewhere"),
            )[work])  # fmt: skip
        trainer.settle()
        trainer.save()

    scene.work(body)


@fault("a fork while the flusher starts, and then the flusher killed")
def fork_at_start(scene: Scene) -> None:
    delay_s = scene.chance.choice((0.0, 0.01, 0.1))

    def body(trainer: Trainer) -> None:
        starting = threading.Thread(target=trainer.save, kwargs={"wait": False})
        starting.start()
        while not children_of(os.getpid()):
            time.sleep(0)
        helpers = children_of(os.getpid())
        time.sleep(delay_s)
        lingering = os.fork()
        if lingering == 0:
            time.sleep(PATIENCE_S)
            os._exit(0)
        starting.join()
        _send(helpers, signal.SIGKILL)
        trainer.settle()
        trainer.save()
        os.kill(lingering, signal.SIGKILL)
        os.waitpid(lingering, 0)

    scene.work(body, flush="process")


@fault("a fork during a lazy capture, and a step of the child's optimizer")
def fork_while_lazy(scene: Scene) -> None:
    def body(trainer: Trainer) -> None:
        parameter = torch.nn.Parameter(torch.zeros(10))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        parameter.grad = torch.ones(10)
        for _ in range(3):
            optimizer.step()
            state.advance(trainer.live, trainer.step)
            trainer.say("saving", trainer.step)
            with trainer.told("save", trainer.step):
                trainer.handles.append(trainer.checkpointer.save(trainer.step))
            trainer.step += 1
            _fork_and_wait(trainer, optimizer.step, "step its optimizer")
            optimizer.step()
        trainer.settle()

    scene.work(body, capture="lazy")


# Threads


@fault("threads that hold the interpreter or allocate")
def busy_threads(scene: Scene) -> None:
    hold_us = scene.chance.choice((1000, 20_000, 100_000))

    def body(trainer: Trainer) -> None:
        over = threading.Event()

        def hold() -> None:
            while not over.is_set():
                ctypes.PyDLL(None).usleep(hold_us)  # a PyDLL keeps the interpreter's lock
                time.sleep(0.001)

        def allocate() -> None:
            while not over.is_set():
                torch.zeros(200_000)
                bytearray(1 << 20)

        threads = [threading.Thread(target=work) for work in (hold, allocate)]
        for thread in threads:
            thread.start()
        trainer.save(3)
        trainer.save(3, wait=False)
        trainer.settle()
        over.set()
        for thread in threads:
            thread.join()

    scene.work(body)


@fault("threads that save the same step")
def same_step(scene: Scene) -> None:
    def body(trainer: Trainer) -> None:
        for _ in range(4):
            step, trainer.step = trainer.step, trainer.step + 1
            state.advance(trainer.live, step)
            trainer.say("saving", step)
            done = _save_at_once(trainer.checkpointer, step, threads=3)
            with trainer.told("wait", -1):
                trainer.checkpointer.wait(PATIENCE_S)
            if done > 1:
                trainer.say("wrong", f"step {step} was committed {done} times without overwrite")
            if done:
                trainer.say("committed", step)

    scene.work(body)


def _save_at_once(checkpointer: laststep.Checkpointer, step: int, *, threads: int) -> int:
    """So many threads save the same step; how many of these were committed."""
    barrier = threading.Barrier(threads)
    handles: list[laststep.SaveHandle] = []

    def save() -> None:
        barrier.wait()
        with contextlib.suppress(laststep.LaststepError):
            handles.append(checkpointer.save(step))

    running = [threading.Thread(target=save) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    done = 0
    for handle in handles:
        with contextlib.suppress(laststep.LaststepError):
            done += handle.wait(PATIENCE_S)
    return done
