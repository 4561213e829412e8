"""The generators of random numbers that a loader may draw from, as they were at some moment.

Those of Python, NumPy and torch on the CPU, and those that the loader, its samplers and its dataset
hold themselves. Not those of devices: to ask them would wait for the device at each batch.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

Drawn = dict[str, Any]
"""What generators were at: their states, by name."""

_HOLDERS: Final = ("batch_sampler", "sampler", "dataset")
"""Where a loader, a sampler or a dataset has what it goes through."""


def own_of(loader: Any) -> Drawn:
    """The states of the generators that a loader holds, by what holds them: `loader`, `sampler`,
    `dataset`. A sampler of several ranks stands around that of one, which has the generator."""
    return {name: bytes(held.get_state().numpy()) for name, held in _held(loader).items()}


def all_of(loader: Any) -> Drawn:
    """Those, and the process's own."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (the global one is what others draw from)
        "torch": torch.get_rng_state(),
        "own": own_of(loader),
    }


def put_own(loader: Any, drawn: Drawn) -> None:
    """Those that were there then, and are there now."""
    for name, held in _held(loader).items():
        if name in drawn:
            held.set_state(_tensor(drawn[name]))


def put_all(loader: Any, drawn: Drawn) -> None:
    random.setstate(drawn["python"])
    np.random.set_state(drawn["numpy"])  # noqa: NPY002
    torch.set_rng_state(drawn["torch"])
    put_own(loader, drawn["own"])


@contextlib.contextmanager
def at(loader: Any, drawn: Drawn) -> Iterator[None]:
    """In this block the generators are where they were then; after it, where they are now."""
    now = all_of(loader)
    put_all(loader, drawn)
    try:
        yield
    finally:
        put_all(loader, now)


def packed(drawn: Drawn) -> Drawn:
    """As plain values, which cost a save nothing: arrays would be laid out in its files anew."""
    kind, keys, *rest = drawn["numpy"]
    return {
        **drawn,
        "numpy": (str(kind), keys.tobytes(), *rest),
        "torch": bytes(drawn["torch"].numpy()),
    }


def unpacked(drawn: Drawn) -> Drawn:
    kind, keys, *rest = drawn["numpy"]
    numpy = (kind, np.frombuffer(keys, np.uint32), *rest)
    return {**drawn, "numpy": numpy, "torch": _tensor(drawn["torch"])}


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def seeds_of(loader: Any) -> dict[str, int]:
    """What samplers of Accelerate's seed their generators with, each epoch anew."""
    return {name: one.initial_seed for name, one in _holders(loader) if _is_seeded(one)}


def put_seeds(loader: Any, seeds: dict[str, int]) -> None:
    for name, holder in _holders(loader):
        if _is_seeded(holder) and name in seeds:
            holder.initial_seed = seeds[name]


def _is_seeded(holder: object) -> bool:
    return isinstance(holder, SeedableRandomSampler)


def _held(loader: Any) -> dict[str, torch.Generator]:
    found: dict[str, torch.Generator] = {}
    for name, holder in _holders(loader):
        held = getattr(holder, "generator", None)
        if isinstance(held, torch.Generator) and all(held is not one for one in found.values()):
            found.setdefault(name, held)
    return found


def _holders(loader: Any) -> list[tuple[str, Any]]:
    """The loader and all that it goes through, by what each is."""
    around, seen = [("loader", loader)], {id(loader)}
    for _, holder in around:
        for inside in _HOLDERS:
            inner = getattr(holder, inside, None)
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                around.append((inside.rpartition("_")[2], inner))
    return around
