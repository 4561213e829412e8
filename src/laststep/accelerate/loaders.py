"""Position in an Accelerate loader: the next batch, in the same order as before.

Accelerate's own checkpoints store the position of torchdata's loaders only, and for no loader the
random numbers that the order of an epoch was drawn from. A `PlacedLoader` replaces the loader that
Accelerate's loader iterates over, counts batches, and keeps the generators' states from the start
of the epoch. Accelerate reads the state of that inner loader before it prefetches a batch, as it
does for loaders with a state. So the position is that of training, not of prefetching.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import random
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from accelerate.data_loader import DataLoaderAdapter, SeedableRandomSampler
from torch.utils.data import DataLoader, IterableDataset

from laststep.state.provider import State, StateProvider, handing_over

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

log = logging.getLogger(__name__)

RandomState = dict[str, Any]

_OURS: Final = "laststep"
"""The key of our part in the state that Accelerate reads; the rest belongs to the inner loader."""
_DRAWN: Final = {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
_TAKEN_OVER: Final = inspect.signature(DataLoader).parameters.keys() - _DRAWN
"""Parameters that a loader for the rest of an epoch takes over from the original loader."""


class LoaderProgress(StateProvider):
    """The epoch, position and generators of a loader that `Accelerator.prepare` returned."""

    kind = "loader"
    per_rank = True

    def __init__(self, loader: Any, place: PlacedLoader) -> None:
        self._loader, self._place = loader, place
        self.when_ranks_change = "refuse" if place.inner_state else lambda states, *_: states[0]

    def describe(self) -> State:
        value = {
            "epoch": self._loader.iteration + self._place.has_ended,
            "generators": _own_states(self._place),
            "seeds": {name: each.initial_seed for name, each in _seeded(self._place).items()},
            "workers": self._place.has_workers,
            "samples": self._place.samples,
            "ways": self._place.ways,
            "place": self._place.now(),
        }
        return State(value=value, fresh=((),))

    def restore(self, value: Any) -> None:
        with handing_over("the loader"):
            self._loader.iteration = value["epoch"]
            _set_own_states(self._place, value["generators"])
            for name, sampler in _seeded(self._place).items():
                sampler.initial_seed = value["seeds"].get(name, sampler.initial_seed)
            self._place.go_on_at(self._place_here(value), has_workers=value["workers"])

    def _place_here(self, value: Any) -> Any:
        """Convert a position to the present number of ranks and batch size. Round down, so that
        samples may be repeated but none are skipped."""
        place, here = value["place"], self._place
        same = (value["ways"], value["samples"]) == (here.ways, here.samples)
        if place is None or place["inner"]:
            return place
        read = place["batches"] * value["ways"] * value["samples"]
        each = here.ways * here.samples * here.at_once
        if read % each:
            log.warning(
                "%d samples of this epoch are repeated, since the number of ranks or the batch "
                "size has changed",
                read % each,
            )
        batches = read // each * here.at_once
        if same and batches == place["batches"]:
            return place
        return {**place, "batches": batches, "fetch": None}


class PlacedLoader:
    """Replaces the loader inside an Accelerate loader, and forwards everything else to it."""

    def __init__(self, outer: Any) -> None:
        self._outer, self._base = weakref.ref(outer), outer.base_dataloader
        self.inner_state: Any = None
        """Returns the inner loader's state; None unless its dataset or sampler needs one."""
        if hasattr(self._base, "state_dict"):
            if _has_state(self._base):
                self.inner_state = self._base.state_dict
            # It started an epoch when Accelerate asked for its first state, with earlier random
            # numbers that were not recorded. Reset it.
            self._base.load_state_dict({})
        self._batches = 0
        self._epoch = -1
        self._start: RandomState | None = None
        self._fetch: RandomState | None = None
        self._state: dict[str, Any] = {}
        self._to_come: dict[str, Any] | None = None
        self._running: weakref.ref[Generator[Any, None, None]] | None = None
        self.ways, self.at_once = _dealing(outer, self._base)
        self.samples: int = getattr(self._base.batch_sampler, "batch_size", None) or 1
        """Samples per batch; 1 if a sampler does not say how many it makes."""
        self.has_workers = False
        """True if persistent workers were started: their seed is drawn only at that time."""
        self._had_workers = False

    # -- interface for Accelerate -----------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)

    @property  # type: ignore[misc]  # as Accelerate's own loaders do
    def __class__(self) -> Any:
        return type(self._base)

    def __len__(self) -> int:
        return len(self._base)

    def __iter__(self) -> Iterator[Any]:
        place, self._to_come = self._to_come, None
        self._epoch = self._outer().iteration  # type: ignore[union-attr]  # the caller holds it
        self._start = (place and place["start"]) or _random_state(self)
        self._batches = place["batches"] if place else 0
        self._had_workers = place["workers"] if place else self.has_workers
        self.has_workers = self._base.num_workers > 0 and self._base.persistent_workers
        if place is None:
            batches = self._counted(self._begun(self._base))
        else:
            # Resuming an epoch must not advance the generators.
            with _drawing_from(self, self._start):
                iterator = self._from(place)
                begun = _random_state(self)
            batches = self._counted(self._brought(iterator, begun))
        self._state = {_OURS: self._ours()}
        self._running = weakref.ref(batches)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state; called before each prefetched batch, and Accelerate may modify it."""
        inner = {} if self.inner_state is None else self.inner_state()
        self._state = {**inner, _OURS: self._ours()}
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._base.load_state_dict(_without_ours(state))

    # -- saving and restoring ---------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True if training has received the last batch of the epoch and not asked for more."""
        outer = self._outer()
        return outer is not None and outer.end_of_dataloader and outer.iteration == self._epoch

    def now(self) -> dict[str, Any] | None:
        """Return the position in the epoch; None between epochs and once training has left it."""
        outer = self._outer()
        if self._to_come is not None:
            return self._to_come
        # The generator is freed when training leaves the loop. It may have fetched all batches
        # while training has not received them yet.
        is_left = self._running is None or self._running() is None
        if is_left or outer is None or outer.end_of_dataloader:
            return None
        ours = self._state[_OURS]
        inner = None if self.inner_state is None else _without_ours(self._state)
        return {**ours, "inner": inner, "workers": self._had_workers}

    def go_on_at(self, place: dict[str, Any] | None, *, has_workers: bool) -> None:
        self._to_come, self._running, self._epoch = place, None, -1
        self.has_workers = has_workers

    def skip(self, batches: int) -> None:
        """Start the next epoch after this number of batches, in a restored order if any."""
        place = self._to_come
        if batches and place is None:
            place = {"batches": 0, "start": None, "workers": self.has_workers}
        if place is not None and place["batches"] != batches:
            self._to_come = {**place, "batches": batches, "inner": None, "fetch": None}

    def _ours(self) -> dict[str, Any]:
        if self._batches % self.at_once == 0:  # else in the middle of one round
            # Workers draw from their own generators.
            self._fetch = None if self._base.num_workers else _random_state(self)
        return {
            "batches": self._batches - self._batches % self.at_once,
            "start": self._start,
            "fetch": self._fetch,
        }

    def _begun(self, loader: Any) -> Iterator[Any]:
        """Return an iterator; draw no seed for persistent workers that a resumed run had."""
        is_there = loader._iterator is not None  # noqa: SLF001 (there is no public name)
        if is_there or not self._had_workers:
            return iter(loader)
        generator, loader.generator = loader.generator, torch.Generator()
        try:
            return iter(loader)
        finally:
            loader.generator = generator

    def _counted(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        for batch in batches:
            self._batches += 1
            yield batch

    def _from(self, place: dict[str, Any]) -> Iterator[Any]:
        """Return the batches from `place` on. Nothing is fetched yet; workers may do that."""
        skips, fetch = place["batches"], place["fetch"]
        if self.inner_state is None and _has_indices(self._base):
            rest = _Rest(self._base.batch_sampler, skips, lambda: self._put(fetch))
            taken_over = {name: getattr(self._base, name) for name in _TAKEN_OVER}
            return self._begun(DataLoader(self._base.dataset, batch_sampler=rest, **taken_over))
        if place["inner"]:
            self._base.load_state_dict(place["inner"])
            skips = 0
        if _has_indices(self._base):  # the sampler has not drawn yet
            fetch = None
        return _after(self._begun(self._base), skips, lambda: self._put(fetch))

    def _put(self, fetch: Any) -> None:
        if fetch is not None:
            _set_random_state(self, fetch)

    def _brought(self, batches: Iterator[Any], begun: RandomState) -> Iterator[Any]:
        """Yield all batches; fetch those of the save with the random numbers of that time."""
        with _drawing_from(self, begun):
            first = list(itertools.islice(batches, self.at_once))
        yield from first
        yield from batches


class _Rest:
    def __init__(self, batches: Any, skips: int, begin: Callable[[], None]) -> None:
        self._batches, self._skips, self._begin = batches, skips, begin

    def __len__(self) -> int:
        return len(self._batches) - self._skips

    def __iter__(self) -> Iterator[Any]:
        return _after(iter(self._batches), self._skips, self._begin)


def _after(batches: Iterator[Any], skips: int, begin: Callable[[], None]) -> Iterator[Any]:
    """Yield the batches after the first `skips`; call `begin` before."""
    for _ in itertools.islice(batches, skips):
        pass
    begin()
    yield from batches


def _without_ours(state: dict[str, Any]) -> dict[str, Any]:
    return {name: of for name, of in state.items() if name != _OURS}


def place_in(loader: Any) -> PlacedLoader | None:
    """Return, or insert, a loader's `PlacedLoader`; None if Accelerate has not prepared it."""
    if not isinstance(loader, DataLoaderAdapter):
        return None
    outer: Any = loader
    if type(outer.base_dataloader) is not PlacedLoader:
        outer.base_dataloader = PlacedLoader(outer)
    place: PlacedLoader = outer.base_dataloader
    return place


def item_of(loader: Any) -> Any:
    """Return the item for a loader; the loader itself if Accelerate has not prepared it."""
    return loader if (place := place_in(loader)) is None else LoaderProgress(loader, place)


def skip_in_place(otherwise: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
    """Skip batches of a tracked loader in place, unless a restore has done so already."""
    place = getattr(dataloader, "base_dataloader", None)
    if type(place) is not PlacedLoader:
        return otherwise(dataloader, num_batches)
    place.skip(num_batches)
    return dataloader


def _dealing(outer: Any, base: Any) -> tuple[int, int]:
    """Return how many ranks receive batches in turn, and how many one rank fetches at once."""
    if hasattr(outer, "slice_fn"):  # rank 0 fetches for all
        alone = outer.split_batches or outer.submesh_tp is not None
        return 1, 1 if alone else outer.state.num_processes
    for holder in (base.batch_sampler, base.sampler, base.dataset):
        if hasattr(holder, "num_processes") and hasattr(holder, "split_batches"):
            return (1 if holder.split_batches else holder.num_processes), 1
    return 1, 1


def _has_indices(base: Any) -> bool:
    """Return True if batches of indices are drawn, which can be skipped without reading data."""
    return not isinstance(base.dataset, IterableDataset) and base.batch_sampler is not None


def _has_state(base: Any) -> bool:
    """Return True if the number of batches does not describe the position in the data."""
    parts = (base.dataset, base.sampler, base.batch_sampler)
    return not _has_indices(base) or any(hasattr(part, "state_dict") for part in parts)


# Generators: those of Python, NumPy and torch on the CPU, and those that a loader, its samplers and
# its dataset hold themselves. Generators of devices are not covered: reading them would synchronise
# with the device at each batch.

_HOLDERS: Final = ("batch_sampler", "sampler", "dataset")
"""Attributes of loaders, samplers and datasets that hold what these iterate over."""


def _own_states(loader: Any) -> RandomState:
    return {name: bytes(held.get_state().numpy()) for name, held in _held(loader).items()}


def _random_state(loader: Any) -> RandomState:
    """Return the states of the loader's generators and of the process's global ones, as plain
    values: arrays would need a new layout of a save's files."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 (other code draws from the global one)
    kind, keys, *rest = numpy
    return {
        "python": random.getstate(),
        "numpy": (str(kind), keys.tobytes(), *rest),
        "torch": bytes(torch.get_rng_state().numpy()),
        "own": _own_states(loader),
    }


def _set_own_states(loader: Any, drawn: RandomState) -> None:
    for name, held in _held(loader).items():
        if name in drawn:
            held.set_state(_tensor(drawn[name]))


def _set_random_state(loader: Any, drawn: RandomState) -> None:
    kind, keys, *rest = drawn["numpy"]
    random.setstate(drawn["python"])
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(_tensor(drawn["torch"]))
    _set_own_states(loader, drawn["own"])


@contextlib.contextmanager
def _drawing_from(loader: Any, drawn: RandomState) -> Iterator[None]:
    """Set the generators to `drawn` within this block."""
    now = _random_state(loader)
    _set_random_state(loader, drawn)
    try:
        yield
    finally:
        _set_random_state(loader, now)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _seeded(loader: Any) -> dict[str, Any]:
    """Return Accelerate's samplers that seed their generators at each epoch, by holder."""
    holders = _holders(loader)
    return {name: holder for name, holder in holders if isinstance(holder, SeedableRandomSampler)}


def _held(loader: Any) -> dict[str, torch.Generator]:
    found: dict[str, torch.Generator] = {}
    for name, holder in _holders(loader):
        held = getattr(holder, "generator", None)
        if isinstance(held, torch.Generator) and all(held is not old for old in found.values()):
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
