"""Write the golden runs: what each process of a job does. Used by `make.py` only."""

from __future__ import annotations

from pathlib import Path

import contents
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import laststep
from laststep.catalog import terms
from laststep.commit import thread as teaming
from laststep.dcp import Writer
from laststep.dcp import writer as adapter
from laststep.flush import base as reusing
from laststep.flush import client as starting
from laststep.plan.receipts import Groups


def namelessly() -> None:
    """The record of a term names the machine of its writer; these are of no machine."""
    nobody = terms.Trainer(host="golden", pid=1, boot="golden", process_started="1")
    for module in (terms, starting, adapter):
        module.this_writer = lambda: nobody


def one_rank(run: str) -> None:
    """Two starts: steps 1 to 3, back to 2, then another 3. Step 2 is pinned."""
    namelessly()
    items = contents.training(1)
    for first, steps in ((True, (1, 2, 3)), (False, (3,))):
        with laststep.Checkpointer(
            run, **items, values=contents.values(), rng=laststep.RNG()
        ) as ckpt:
            if first:
                ckpt.restore()
            else:
                ckpt.restore(2)
            for step in steps:
                torch.manual_seed(step)
                salt = step if first else step + 10
                contents.fill(items["model"], items["optimizer"], salt)
                ckpt.save(step, metrics={"loss": step / 4}, metadata={"note": ("golden", step)})
    (Path(run) / "step-00000002.1-2" / "pinned").touch()


def fsdp2(run: str) -> None:
    """Shards of every rank; three ranks cut seven rows unevenly."""
    namelessly()
    model = contents.training(5)["model"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.125)
    for number, parameter in enumerate(model.parameters()):
        state = contents.state_of(tuple(parameter.shape), 105 + number)
        optimizer.state[parameter] = {
            key: tensor
            if key == "step"
            else distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
            for key, tensor in state.items()
        }
    with laststep.Checkpointer(run, model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        ckpt.save(5, metrics={"loss": 0.5}).wait()


def groups(run: str) -> None:
    """The same by four ranks that report in groups of two, as those of large jobs do."""
    teaming.cut = lambda ranks: Groups(ranks, 2)
    fsdp2(run)


def per_rank(run: str) -> None:
    """State that each rank has for itself."""
    namelessly()
    rank = dist.get_rank()
    torch.manual_seed(rank)
    mine = laststep.PerRank(contents.of_rank(rank))
    shared = {"w": contents.pattern((4,), 3)}
    with laststep.Checkpointer(run, mine=mine, shared_state=shared, rng=laststep.RNG()) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait()


def through_dcp(run: str) -> None:
    """As somebody writes who uses torch's distributed checkpoints with our storage."""
    namelessly()
    items = contents.training(9)
    state = {"model": items["model"].state_dict(), "step": 9, "tensor": contents.pattern((6,), 9)}
    dcp.save(state, storage_writer=Writer(run, step=9))


def borrowed(run: str) -> None:
    """A data file, the same one as a hard link, and one that is written again."""
    namelessly()
    reusing.LEAST_BYTES = 0
    model, position = contents.borrowed(0)
    with laststep.Checkpointer(
        run, model=model, position=position, options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt.restore()
        for step in range(3):
            position["seen"] = contents.borrowed(step)[1]["seen"]
            model["w"].copy_(contents.borrowed(step)[0]["w"])
            ckpt.save(step).wait()


def partial(run: str) -> None:
    """The model of what three ranks have saved."""
    laststep.copy(Path(__file__).parent / "version-1" / "fsdp2", run, items=("model",))


def coded(run: str) -> None:
    """Three saves by the first start, one more that encodes nothing by the second."""
    namelessly()
    reusing.LEAST_BYTES = 0
    for compression, steps in (("max", range(3)), ("none", range(3, 4))):
        items = contents.coded(max(steps[0] - 1, 0))
        with laststep.Checkpointer(
            run, items=items, compression=compression, options=laststep.Options(flush="thread")
        ) as ckpt:
            ckpt.restore()
            for step in steps:
                for name, item in contents.coded(step).items():
                    live = items[name]
                    if isinstance(item, torch.nn.Module):
                        live.load_state_dict(item.state_dict())
                    else:
                        live.update(item)
                ckpt.save(step).wait()
