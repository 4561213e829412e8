"""States of the random number generators that a loader may draw from.

Covers those of Python, NumPy and torch on the CPU, and those that the loader, its samplers and its
dataset hold themselves. Generators of devices are not covered: reading them would synchronise with
the device at each batch.
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
"""States of generators, by name."""

_HOLDERS: Final = ("batch_sampler", "sampler", "dataset")
"""Attributes under which a loader, a sampler or a dataset holds the object that it iterates
over."""


def own_of(loader: Any) -> Drawn:
    """Return the states of the generators that a loader holds, by holder: `loader`, `sampler`,
    `dataset`. A sampler for several ranks wraps the sampler for one rank, which has the
    generator."""
    return {name: bytes(held.get_state().numpy()) for name, held in _held(loader).items()}


def all_of(loader: Any) -> Drawn:
    """Return the states of the loader's generators and of the process's global ones."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (other code draws from the global one)
        "torch": torch.get_rng_state(),
        "own": own_of(loader),
    }


def put_own(loader: Any, drawn: Drawn) -> None:
    """Restore the states of generators that exist both in `drawn` and in the loader."""
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
    """Set the generators to `drawn` within this block, and back to their present states after
    it."""
    now = all_of(loader)
    put_all(loader, drawn)
    try:
        yield
    finally:
        put_all(loader, now)


def packed(drawn: Drawn) -> Drawn:
    """Convert to plain values, which cost a save nothing. Arrays would need a new layout of its
    files."""
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
    """Return the seeds with which Accelerate's samplers seed their generators at each epoch."""
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
    """Return the loader and everything that it iterates over, each with its kind."""
    around, seen = [("loader", loader)], {id(loader)}
    for _, holder in around:
        for inside in _HOLDERS:
            inner = getattr(holder, inside, None)
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                around.append((inside.rpartition("_")[2], inner))
    return around
