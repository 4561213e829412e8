"""Restores in which one rank reads, sees or asks for something else than the others."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from tasks import Heard, fill, filled_with, kinds, opened, sharded_model
from torch import nn

import laststep
from laststep.errors import NotFoundError
from laststep.restoring import choose as choosing
from laststep.restoring import plan as planning
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import FileReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ERRORS: dict[str, Callable[[], BaseException]] = {
    "EIO": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "ESTALE": lambda: OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    "memory": MemoryError,
}
FOR_EVER = 10**9


@contextlib.contextmanager
def failing_reads(folder: str, how: str) -> Iterator[None]:
    """Reads of tensors of that checkpoint fail as the system would have them fail."""
    inner, preadv, on_this_thread = FileReader.read_into, os.preadv, threading.local()

    def read_into(self: FileReader, offset: int, into: memoryview) -> int:
        fails = folder in self._path and "model-r" in self._path and offset >= 4096
        if fails and how == "memory":
            raise MemoryError
        on_this_thread.fails = fails  # several threads read
        return inner(self, offset, into)

    def read_or_fail(*arguments: Any) -> int:
        if getattr(on_this_thread, "fails", False):
            error = ERRORS[how]()
            raise error
        return preadv(*arguments)

    with (
        mock.patch.object(FileReader, "read_into", read_into),
        mock.patch.object(os, "preadv", read_or_fail),
    ):
        yield


def newest(run: str) -> str:
    return max(path.name for path in Path(run).glob("step-*"))


def load_with_read_error(run: str, who: int, how: str) -> dict[str, Any]:
    """What a rank says whose neighbour cannot read, and what it restores once that one can."""
    model = sharded_model()
    fill(model, -1)
    with opened(run, model=model) as c:
        bad = failing_reads(newest(run), how)
        with bad if dist.get_rank() == who else contextlib.nullcontext():
            error = kinds(c.restore)
        mixed = kinds(lambda: c.save(9))
        dist.barrier()
        restored = c.restore()
    return {
        "error": error,
        "mixed": mixed[0],
        "step": restored.step,
        "skipped": restored.skipped,
        "found": filled_with(model),
    }


@contextlib.contextmanager
def blind_to(folder: str, times: int) -> Iterator[None]:
    """The store of this rank shows nothing of that checkpoint, so many times it is asked: a view of
    a network's filesystem that is old."""
    left = [times]
    inner_list, inner_open, inner_read = (
        DirectoryStore.list,
        DirectoryStore.open_reader,
        DirectoryStore.read,
    )

    def hidden() -> bool:
        left[0] -= 1
        return left[0] >= 0

    def listed(self: DirectoryStore, name: str) -> list[Any]:
        if name.startswith(folder):
            return [] if hidden() else inner_list(self, name)
        entries = inner_list(self, name)
        return [e for e in entries if e.name != folder] if left[0] > 0 else entries

    def opened_reader(self: DirectoryStore, name: str, **more: Any) -> Any:
        if name.startswith(folder) and hidden():
            raise NotFoundError("there is no such file", where=name)
        return inner_open(self, name, **more)

    def read(self: DirectoryStore, name: str, **more: Any) -> bytes:
        if name.startswith(folder) and hidden():
            raise NotFoundError("there is no such file", where=name)
        return inner_read(self, name, **more)

    with (
        mock.patch.object(DirectoryStore, "list", listed),
        mock.patch.object(DirectoryStore, "open_reader", opened_reader),
        mock.patch.object(DirectoryStore, "read", read),
    ):
        yield


def load_blindly(run: str, who: int, times: int) -> dict[str, Any]:
    """One rank does not see the newest checkpoint at first, or (`FOR_EVER`) at all."""
    model = sharded_model()
    fill(model, -1)
    blind = blind_to(newest(run), times) if dist.get_rank() == who else contextlib.nullcontext()
    found: dict[str, Any] = {"step": None, "skipped": None}

    def restore() -> None:
        restored = c.restore()
        found.update(step=restored.step, skipped=restored.skipped)

    with (
        opened(run, model=model) as c,
        mock.patch.object(choosing, "PATIENCE_S", 0.5 if times == FOR_EVER else 60.0),
        mock.patch.object(choosing, "PAUSE_S", 0.05),
        Heard() as warnings,
    ):
        with blind:
            found["error"] = kinds(restore)
        found["state"] = filled_with(model)
    return found | {"warnings": warnings}


def load_without_a_run(run: str, who: int) -> tuple[str, str]:
    """The first rank sees no run where another does: it may not be mounted there."""
    mine = run if dist.get_rank() == who else f"{run}-elsewhere"
    Path(mine).mkdir(exist_ok=True)
    with opened(run, model=sharded_model()) as c:
        c._resuming._store = DirectoryStore(mine)
        return kinds(c.restore)


def load_pruned(run: str, aside: str, who: int) -> dict[str, Any]:
    """When all have opened the newest checkpoint, a newer one is committed, and retention takes the
    one that is being restored."""
    model = sharded_model()
    fill(model, -1)
    fit, folder, pruned = planning.plan_restore, newest(run), []

    def late(*arguments: Any, **more: Any) -> Any:
        found = fit(*arguments, **more)
        if not pruned:
            pruned.append(True)
            dist.barrier()
            if dist.get_rank() == who:
                for one in Path(aside).glob("step-*"):
                    one.rename(Path(run) / one.name)
                (Path(run) / folder / "manifest.json").unlink()
                shutil.rmtree(Path(run) / folder)
            dist.barrier()
        return found

    with opened(run, model=model) as c, mock.patch.object(planning, "plan_restore", late):
        restored = c.restore()
        saved = kinds(lambda: c.save(9).wait())
    return {
        "step": restored.step,
        "skipped": restored.skipped,
        "found": filled_with(model),
        "saved": saved,
    }


def ask_apart(run: str, what: str) -> tuple[str, str]:
    """Every rank asks for something of its own."""
    rank = dist.get_rank()
    asked: dict[str, Any] = {
        "step": {"step": 1 + rank},
        "newest": {"step": 1 if rank else None},
        "only": {"only": ["model/weight"] if rank else None},
        "strict": {"strict": bool(rank)},
    }[what]
    model = sharded_model()
    fill(model, -1)
    with opened(run, model=model) as c:
        error = kinds(lambda: c.restore(**asked))
        assert filled_with(model) == {-1.0}
        c.restore(2)
    assert filled_with(model) == {2.0}
    return error


def load_after_a_failure(run: str, who: int) -> dict[str, Any]:
    """A save has failed on all ranks, and one of them was not told before it restores."""
    state = {"n": 0}
    with opened(run, state=state) as c:
        c.save(0).wait()
        state["n"] = dist.get_rank()
        failed = c.save(1)
        if dist.get_rank() != who:
            kinds(failed.wait)
        error = kinds(c.restore)
        return {"error": error, "step": c.restore().step, "n": state["n"]}


def average_on_one(run: str, kind: str) -> object:
    """Save and restore a dict that holds an average of the weights on the first rank alone;
    returns what stands in its place."""
    first = dist.get_rank() == 0

    def state(number: float) -> dict[str, object]:
        average = nn.Linear(2, 2) if kind == "module" else {"w": torch.full((3,), number), "k": 1}
        made = {"average": average if first else None, "term": number}
        return made | {"schedule": _schedule()} if kind == "module" else made

    for number in (3.0, 0.0):
        live = state(number)
        with laststep.Checkpointer(
            run, x=live, options=laststep.Options(flush="thread", progress=False)
        ) as ckpt:
            step = ckpt.restore().next_step
            ckpt.save(step).wait()
    assert live["term"] == 3.0
    return None if first else live["average"]


def _schedule() -> object:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


def stages_as_items(run: str) -> list[float]:
    """Save and restore a stage of a pipeline under a name of its own, with its optimizer; returns
    the momenta."""
    rank = dist.get_rank()
    for gradient in (5.0, 0.0):
        stage = nn.ModuleDict({str(rank): nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
        for parameter in stage.parameters():
            parameter.grad = torch.full_like(parameter, gradient + rank)
        if gradient:
            optimizer.step()
        items = {f"stage{rank}": stage, "optimizer": optimizer}
        with laststep.Checkpointer(
            run, items=items, options=laststep.Options(flush="thread", progress=False)
        ) as ckpt:
            restored = ckpt.restore()
            found = [entry["momentum_buffer"].flatten()[0].item() for entry in _entries(optimizer)]
            ckpt.save(restored.next_step).wait()  # this rank lacks the items of other stages
    return found


def _entries(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return [entry for entry in optimizer.state.values() if "momentum_buffer" in entry]


def lacking(run: str) -> list[str]:
    """Save with one item more than the next start has on any rank; what that is told."""
    model, told = nn.Linear(2, 2), []
    options = laststep.Options(flush="thread", progress=False)
    for more in ({"more": {"n": 1}}, {}):
        with laststep.Checkpointer(run, model=model, **more, options=options) as ckpt:
            ckpt.restore(strict=False)
            try:
                ckpt.save(0 if more else 1).wait()
            except laststep.UsageError as error:
                told.append(str(error.expected))
            except laststep.AbortedError as error:
                told.append(str(error))
    return told
