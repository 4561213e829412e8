"""The place in a loader of Accelerate's: which batch comes next, in the order in which they came.

Accelerate's own checkpoints have the place of torchdata's loaders alone, and of no loader the
random numbers that the order of an epoch was drawn from. `PlacedLoader` stands where Accelerate's
holds the one that it goes through, counts batches, and keeps the generators as they were when the
epoch began. Accelerate asks what stands there for its state before it fetches ahead, as it knows
loaders that have one: so the place is that of the training, not of the fetching.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset

from laststep.adapters.accelerate import generators
from laststep.state.provider import State, StateProvider, handing_over

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

log = logging.getLogger(__name__)

_OURS: Final = "laststep"
"""What is ours in the state that Accelerate takes; the rest is that of the loader inside."""
_TAKEN_OVER: Final = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "generator",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
"""What a loader of the rest of an epoch has from the loader of all of it."""


class LoaderProgress(StateProvider):
    """The epoch, the place in it and the generators of a loader that `Accelerator.prepare` made."""

    kind = "loader"
    per_rank = True

    def __init__(self, loader: Any) -> None:
        self._loader, self._place = loader, place_in(loader)
        self.when_ranks_change = (
            "refuse" if self._place.inner_state is not None else self._for_other_ranks
        )

    def describe(self) -> State:
        value = {
            "epoch": self._loader.iteration + self._place.has_ended,
            "generators": generators.own_of(self._place),
            "seeds": generators.seeds_of(self._place),
            "workers": self._place.has_workers,
            "samples": self._place.samples,
            "ways": self._place.ways,
            "place": self._place.now(),
        }
        return State(value=value, fresh=((),))

    def restore(self, value: Any) -> None:
        with handing_over("the loader"):
            self._loader.iteration = value["epoch"]
            generators.put_own(self._place, value["generators"])
            generators.put_seeds(self._place, value.get("seeds", {}))
            place = self._in_batches_of_now(value["place"], value.get("samples"))
            self._place.go_on_at(place, has_workers=value.get("workers", False))

    def _in_batches_of_now(self, place: Any, samples: int | None) -> Any:
        """The same place, if batches had another size; rather samples twice than some left out."""
        now = self._place.samples
        if place is None or place["inner"] or not samples or not now or samples == now:
            return place
        log.warning("the epoch goes on in batches of %d samples, after those of %d", now, samples)
        batches = place["batches"] * samples // now
        return {**place, "batches": batches - batches % self._place.at_once, "fetch": None}

    def _for_other_ranks(self, states: list[Any], _rank: int, _ranks: int) -> Any:
        """As far as all ranks together had come; rather a batch twice than one left out."""
        state, place = states[0], states[0]["place"]
        if place is None:
            return state
        all_batches = place["batches"] * state["ways"]
        each = self._place.ways * self._place.at_once
        if all_batches % each:
            log.warning(
                "%d batches of this epoch come again: it goes on with another number of ranks",
                all_batches % each,
            )
        batches = all_batches // each * self._place.at_once
        return {**state, "place": {**place, "batches": batches}}


class PlacedLoader:
    """Stands for the loader inside of an Accelerate loader, which is asked everything else."""

    def __init__(self, outer: Any) -> None:
        self._outer, self._base = weakref.ref(outer), outer.base_dataloader
        self.inner_state: Any = None
        """What gives the state of a loader that its dataset or sampler asks for."""
        if hasattr(self._base, "state_dict"):
            if _has_state(self._base):
                self.inner_state = self._base.state_dict
            # It has begun an epoch when Accelerate asked for its first state: with random numbers
            # of before, which nobody has kept.
            self._base.load_state_dict({})
        self._batches = 0
        self._epoch = -1
        self._start: generators.Drawn | None = None
        self._fetch: generators.Drawn | None = None
        self._state: dict[str, Any] = {}
        self._to_come: dict[str, Any] | None = None
        self._running: weakref.ref[Generator[Any, None, None]] | None = None
        self.ways, self.at_once = _dealing(outer, self._base)
        self.samples: int | None = getattr(self._base.batch_sampler, "batch_size", None)
        """Of a batch, where a sampler makes batches of one size."""
        self.has_workers = False
        """Whether workers that stay were started: only then is a seed drawn for them."""
        self._had_workers = False
        """The same, when this epoch began."""
        self._again = self.at_once if self._fills_up(outer) else 0
        """How many batches of the beginning are read again where an epoch goes on."""

    # -- as Accelerate sees it --------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)

    @property  # type: ignore[misc]  # as Accelerate's own loaders do
    def __class__(self) -> Any:
        return type(self._base)

    def __len__(self) -> int:
        return len(self._base)

    def __iter__(self) -> Iterator[Any]:
        place, self._to_come = self._to_come, None
        self._epoch = self._outer().iteration  # type: ignore[union-attr]  # it is what iterates
        start = place and place["start"] and generators.unpacked(place["start"])
        self._start = start or generators.all_of(self)
        self._batches = place["batches"] if place else 0
        self._had_workers = place.get("workers", False) if place else self.has_workers
        self.has_workers = self._base.num_workers > 0 and self._base.persistent_workers
        again = self._again if place else 0
        if self._again:
            self._outer().skip_batches = int(again > 0)  # type: ignore[union-attr]
        if place is None:
            batches = self._counted(self._begun(self._base), 0)
        else:
            # In an epoch that goes on nothing is drawn to begin it.
            with generators.at(self, self._start):
                iterator = self._from(place)
                begun = generators.all_of(self)
            batches = self._counted(self._brought(iterator, begun), again)
        self._state = {_OURS: self._ours()}
        self._running = weakref.ref(batches)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Accelerate asks before each batch that it fetches ahead, and may correct the answer."""
        inner = {} if self.inner_state is None else self.inner_state()
        self._state = {**inner, _OURS: self._ours()}
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accelerate's own, for a checkpoint of its own."""
        self._base.load_state_dict(_without_ours(state))

    # -- as it is saved ---------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether training has the last batch of the epoch, and has not asked for one more."""
        outer = self._outer()
        return outer is not None and outer.end_of_dataloader and outer.iteration == self._epoch

    def now(self) -> dict[str, Any] | None:
        """Where training is in the epoch; None between two, or where it has left the loop."""
        outer = self._outer()
        if self._to_come is not None:
            return self._to_come
        # What iterates goes with the loop; it may have fetched all when training has not.
        is_left = self._running is None or self._running() is None
        if is_left or outer is None or outer.end_of_dataloader:
            return None
        ours = self._state[_OURS]
        inner = None if self.inner_state is None else _without_ours(self._state)
        packed = {name: ours[name] and generators.packed(ours[name]) for name in _KEPT}
        return {"batches": ours["batches"], "inner": inner, "workers": self._had_workers, **packed}

    def go_on_at(self, place: dict[str, Any] | None, *, has_workers: bool) -> None:
        """Begin the next epoch there."""
        self._to_come, self._running, self._epoch = place, None, -1
        self.has_workers = has_workers

    def skip(self, batches: int) -> None:
        """Begin the next epoch after so many batches; in the order that a restore has brought."""
        place = self._to_come
        if batches and place is None:
            place = {
                "batches": 0,
                "inner": None,
                "start": None,
                "fetch": None,
                "workers": self.has_workers,
            }
        if place is not None and place["batches"] != batches:
            self._to_come = {**place, "batches": batches, "inner": None, "fetch": None}

    # -- inside -----------------------------------------------------------------------------------

    def _ours(self) -> dict[str, Any]:
        if self._batches % self.at_once == 0:  # else it fetches the batches of one round
            # Workers draw from generators of their own.
            self._fetch = None if self._base.num_workers else generators.all_of(self)
        return {
            "batches": self._batches - self._batches % self.at_once,
            "start": self._start,
            "fetch": self._fetch,
        }

    def _fills_up(self, outer: Any) -> bool:
        """Whether Accelerate fills up the last batch of an epoch with samples of the first: it
        keeps those of the first that it sees, which has to be that of the epoch."""
        return (
            hasattr(outer, "slice_fn")
            and outer.state.num_processes > 1
            and not outer._drop_last  # noqa: SLF001 (there is no public name)
            and self.inner_state is None
        )

    def _begun(self, loader: Any) -> Iterator[Any]:
        """Iterates. For workers that were there in the run that is continued no seed is drawn."""
        is_there = loader._iterator is not None  # noqa: SLF001 (there is no public name)
        if is_there or not self._had_workers:
            return iter(loader)
        generator, loader.generator = loader.generator, torch.Generator()
        try:
            return iter(loader)
        finally:
            loader.generator = generator

    def _counted(self, batches: Iterator[Any], again: int) -> Generator[Any, None, None]:
        for number, batch in enumerate(batches):
            self._batches += number >= again
            yield batch

    def _from(self, place: dict[str, Any]) -> Iterator[Any]:
        """The batches from that place on; nothing is fetched yet, which may be left to others."""
        skips, fetch = place["batches"], place["fetch"]
        if self.inner_state is None and _has_indices(self._base):
            rest = _Rest(self._base.batch_sampler, skips, self._again, lambda: self._put(fetch))
            taken_over = {name: getattr(self._base, name) for name in _TAKEN_OVER}
            return self._begun(DataLoader(self._base.dataset, batch_sampler=rest, **taken_over))
        if place["inner"]:
            self._base.load_state_dict(place["inner"])
            skips = 0
        if _has_indices(self._base):  # the sampler has yet to draw
            fetch = None
        return _after(self._begun(self._base), skips, self._again, lambda: self._put(fetch))

    def _put(self, fetch: Any) -> None:
        if fetch is not None:
            generators.put_all(self, generators.unpacked(fetch))

    def _brought(self, batches: Iterator[Any], begun: generators.Drawn) -> Iterator[Any]:
        """What was fetched when it was saved is fetched with the numbers of then."""
        with generators.at(self, begun):
            first = list(itertools.islice(batches, self._again + self.at_once))
        yield from first
        yield from batches


_KEPT: Final = ("start", "fetch")


class _Rest:
    """The batches of indices after so many."""

    def __init__(self, batches: Any, skips: int, again: int, begin: Callable[[], None]) -> None:
        self._batches, self._skips, self._again, self._begin = batches, skips, again, begin

    def __len__(self) -> int:
        return len(self._batches) - self._skips + self._again

    def __iter__(self) -> Iterator[Any]:
        return _after(iter(self._batches), self._skips, self._again, self._begin)


def _after(
    batches: Iterator[Any], skips: int, again: int, begin: Callable[[], None]
) -> Iterator[Any]:
    """What comes after so many, behind the first ones `again`; `begin` is called in between."""
    first = list(itertools.islice(batches, again))
    yield from first
    rest = itertools.chain(first, batches)
    for _ in zip(range(skips), rest, strict=False):
        pass
    begin()
    yield from rest


def _without_ours(state: dict[str, Any]) -> dict[str, Any]:
    return {name: of for name, of in state.items() if name != _OURS}


def place_in(loader: Any) -> PlacedLoader:
    """The place in a loader, which is kept from the first call on."""
    if type(loader.base_dataloader) is not PlacedLoader:
        loader.base_dataloader = PlacedLoader(loader)
    place: PlacedLoader = loader.base_dataloader
    return place


def _dealing(outer: Any, base: Any) -> tuple[int, int]:
    """To how many ranks the batches are dealt in turn, and how many of them one rank fetches for
    all at once."""
    if hasattr(outer, "slice_fn"):  # the first rank fetches for all
        alone = outer.split_batches or outer.submesh_tp is not None
        return 1, 1 if alone else outer.state.num_processes
    for holder in (base.batch_sampler, base.sampler, base.dataset):
        if hasattr(holder, "num_processes") and hasattr(holder, "split_batches"):
            return (1 if holder.split_batches else holder.num_processes), 1
    return 1, 1


def _has_indices(base: Any) -> bool:
    """Whether batches of indices are drawn, which can be skipped without reading data."""
    return not isinstance(base.dataset, IterableDataset) and base.batch_sampler is not None


def _has_state(base: Any) -> bool:
    """Whether something that it goes through has a state of its own; else the place is enough."""
    parts = (base.dataset, base.sampler, base.batch_sampler)
    return not _has_indices(base) or any(hasattr(part, "state_dict") for part in parts)
