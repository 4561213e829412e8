"""Data loaders with a position: torchdata's `StatefulDataLoader`.

torchdata restores the position in the data. Three kinds of random numbers would still differ after
a resumption, and are taken care of here: those that dataset and `collate_fn` draw in the loader's
worker processes, the loader's own generator, and those that a resumed loader draws because it
creates its iterator once more. Nothing here changes what an uninterrupted training sees.
"""

from __future__ import annotations

import functools
import logging
import random
from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)

from laststep.state.provider import State, StateDictProvider, handing_over
from laststep.state.tree import Owned

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_GENERATORS: Final = "laststep.generators"
"""The key of the generators of the loader in its state."""
_RANDOM: Final = "laststep.random"
"""The key of a worker's random numbers in the state of its dataset."""
_OWN: Final = "laststep.own"
"""The key of the dataset's own state there, if it has one."""
_METHODS: Final = ("state_dict", "load_state_dict")
_PLAIN: Final = (list, tuple, range)
"""Datasets that draw nothing."""


def is_torchdata(thing: object) -> bool:
    """Return True for a StatefulDataLoader, or a class that derives from it."""
    classes = ((kind.__module__, kind.__name__) for kind in type(thing).__mro__)
    return any(
        module.startswith("torchdata.") and name == "StatefulDataLoader" for module, name in classes
    )


class LoaderProvider(StateDictProvider):
    """A StatefulDataLoader, with the random numbers of its workers and of its generator."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._warn_of_sampler()
        if not loader.num_workers:
            return
        init = loader.worker_init_fn
        if isinstance(init, functools.partial) and init.func is _init_worker:
            return  # by another Checkpointer
        why = _why_not(loader)
        if why is None:
            loader.worker_init_fn = functools.partial(_init_worker, init)
        else:
            log.warning(
                "random numbers that the %d workers of a data loader draw are not restored, because"
                " %s: derive them from a seed, the epoch and the index of the sample",
                loader.num_workers,
                why,
            )

    def describe(self) -> State:
        described = super().describe()
        owned: Any = described.value
        states = [generator.get_state() for generator in _generators(self._loader)]
        value = Owned(owned.owner, {**owned.state, _GENERATORS: states})
        return State(value=value, fresh=described.fresh)

    def check(self, stored: object) -> list[str]:
        """Return a mismatch for another number of workers, with which torchdata cannot resume."""
        if not isinstance(stored, dict):
            return []
        match stored:
            case {"_snapshot": {"_main_snapshot": {"_num_workers": int(workers)}}}:
                pass
            case _:
                workers = 0
        if workers == self._loader.num_workers:
            return []
        return [f"was saved with num_workers={workers}, here it is {self._loader.num_workers}"]

    def restore(self, value: object) -> None:
        loader = self._loader
        with handing_over("load_state_dict of StatefulDataLoader"):
            state = dict(value) if isinstance(value, dict) else {}
            states = state.pop(_GENERATORS, ())
            loader.load_state_dict(state)
            for generator, stored in zip(_generators(loader), states, strict=False):
                generator.set_state(stored)
            loader._get_iterator = functools.partial(_iterator_of_resumed, loader)

    def _warn_of_sampler(self) -> None:
        """Warn if the order of the samples is drawn by something that torchdata cannot restore."""
        loader = self._loader
        if isinstance(loader.dataset, IterableDataset):
            return
        parts = (loader.batch_sampler, loader.sampler)
        drawn = [type(part).__name__ for part in parts if not _restores_order(part)]
        if drawn:
            log.warning(
                "the order of samples that %s draws is not restored: give it state_dict() and "
                "load_state_dict(), use shuffle=True, or draw the order from a seed and the epoch",
                drawn[0],
            )

    @property
    def _loader(self) -> Any:
        return self._owner


def _restores_order(sampler: Any) -> bool:
    """Return True for torchdata's samplers, for torch's that draw nothing or only by the epoch, and
    for those with a state."""
    if sampler is None or _has_state(sampler):
        return True
    kind = type(sampler)
    if kind.__module__.startswith("torchdata."):
        return not getattr(sampler, "replacement", False)
    return kind in (SequentialSampler, BatchSampler, DistributedSampler)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader and of torchdata's sampler, each once."""
    found = [loader.generator]
    if type(loader.sampler).__module__.startswith("torchdata."):
        found.append(getattr(loader.sampler, "generator", None))
    return list({id(one): one for one in found if one is not None}.values())


def _why_not(loader: Any) -> str | None:
    """Return the reason why random numbers of the workers cannot be kept; None if they can, or if
    torchdata replays the samples of this loader, which draws them again."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return "its iterable dataset has a state of its own" if _has_state(dataset) else None
    if not (hasattr(dataset, "__dict__") or isinstance(dataset, _PLAIN)):
        return f"its dataset is a {type(dataset).__name__}, which takes no attributes"
    if any(isinstance(getattr(type(dataset), name, None), property) for name in _METHODS):
        return "its dataset has a property instead of the method state_dict()"
    if getattr(loader, "_iterator", None) is not None:
        return "it was iterated before the Checkpointer was made"
    return None


def _has_state(dataset: object) -> bool:
    return all(hasattr(dataset, name) for name in _METHODS)


def _iterator_of_resumed(loader: Any) -> object:
    """Create the iterator of a loader for the first time after its state was restored. That draws
    random numbers that the uninterrupted training drew when the epoch began."""
    del loader._get_iterator  # of this object: from now on that of its class
    before, generators = _random_state(), _generators(loader)
    states = [generator.get_state() for generator in generators]
    try:
        return loader._get_iterator()
    finally:
        _set_random_state(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _init_worker(init: Callable[[int], object] | None, worker: int) -> None:
    """Run in a worker process before it fetches anything: let the state of its dataset, which
    torchdata saves and restores, include the random numbers of this process."""
    if init is not None:
        init(worker)
    info = get_worker_info()
    assert info is not None  # noqa: S101 (this runs in a worker)
    dataset: Any = info.dataset
    if isinstance(dataset, (IterableDataset, *_PLAIN)):
        return
    own = (dataset.state_dict, dataset.load_state_dict) if _has_state(dataset) else None

    def state_dict() -> dict[str, object]:
        return {_RANDOM: _random_state(), _OWN: None if own is None else own[0]()}

    def load_state_dict(state: dict[str, Any]) -> None:
        if _RANDOM not in state:  # saved without a Checkpointer
            if own is not None:
                own[1](state)
            return
        if own is not None:
            own[1](state[_OWN])
        _set_random_state(state[_RANDOM])

    for name, method in zip(_METHODS, (state_dict, load_state_dict), strict=True):
        object.__setattr__(dataset, name, method)  # also if the class is frozen


def _random_state() -> dict[str, Any]:
    """Return the random number generators of this process, in bytes: this runs for every batch, and
    tensors would be sent to the trainer by shared memory."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (as in RNG)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": [version, array("I", words).tobytes(), gauss],
        "numpy": [str(kind), np.asarray(keys).tobytes(), position, has_gauss, cached],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array("I", words)), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    keys = np.frombuffer(keys, np.uint32)
    np.random.set_state((kind, keys, position, has_gauss, cached))  # noqa: NPY002 (as in RNG)
