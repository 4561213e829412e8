"""What ranks do in the tests of how a checkpoint of theirs looks from outside."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tasks import Heard, opened
from wraps import Fsdp2

import laststep


def place_of(rank: int) -> dict[str, object]:
    """What a rank has for itself; only some ranks have `extra`."""
    more = {"extra": torch.ones(2)} if rank % 2 else {}
    return {"position": 10 + rank, "seen": torch.arange(rank + 1), **more}


def save_all_kinds(run: str) -> None:
    """FSDP2, its optimizer, and what each rank has for itself; all that was whole is kept beside
    the run."""
    trainer = Fsdp2()
    trainer.step(0)
    place = laststep.PerRank(place_of(dist.get_rank()))
    with opened(run, **trainer.items(), place=place, rng=laststep.RNG()) as c:
        c.save(1).wait()
    whole = trainer.full()
    if dist.get_rank() == 0:
        torch.save(whole, f"{run}.pt")


def load_own(run: str, rank: int | None) -> tuple[object, object, list[str]]:
    """The position that a rank loads, into new memory and into its own, and what it hears."""
    with Heard() as heard:
        found = laststep.load(run, rank=rank)["place"]
        place = place_of(dist.get_rank() if rank is None else rank) | {"position": 0}
        laststep.load(
            run,
            {"place": laststep.PerRank(place, when_ranks_change="drop")},
            rank=rank,
            strict=False,
        )
    return found["position"], place["position"], heard
