"""Take the state of all items at one moment, ready to be planned and captured.

Runs on the training thread in `save()`. Containers and plain values are copied there and then; the
tensors are only referred to, for the capture to copy. What can wait (turning trees into bytes) is
left to the capture thread.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laststep.checks import plain, shown
from laststep.codecs import objects
from laststep.errors import Mismatch, Usage
from laststep.format.manifest import ItemRecord
from laststep.plan.files import TABLE_NAME, ItemSpec
from laststep.state.modules import one_moment
from laststep.state.stored_items import encode_item
from laststep.state.tensors import CollectCache, collect, hold_scalar, plain_scalar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from laststep.flush.saves import SealedParts, SealParts
    from laststep.saving.prepare import Prepared
    from laststep.state.layouts import Layout
    from laststep.state.pieces import Collected
    from laststep.state.provider import StateProvider

    Described = tuple[tuple[ItemSpec, dict[str, Layout]], ...]
    """Each item as the planner sees it, and how those of its tensors lie that are in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenState:
    """The state of all items at the moment of `save()`."""

    specs: tuple[ItemSpec, ...]
    sources: tuple[torch.Tensor, ...]
    collected: dict[str, Collected]
    metrics: dict[str, object]
    metadata: object

    @property
    def described(self) -> Described:
        """How it is built, whatever its numbers are."""
        return tuple((spec, self.collected[spec.name].layouts) for spec in self.specs)

    def sealing(
        self, prepared: Prepared, note: Callable[[dict[str, bytes]], bytes] | None = None
    ) -> SealParts:
        """What the capture thread calls to serialise the rest, once all tensors are under way;
        `note` is told the plain values of each item, and gives this rank's receipt."""
        plan, kept = prepared.plan, prepared.trees
        table = b"" if prepared.portion is None else prepared.portion.encoded

        def seal() -> SealedParts:
            encoded = {
                name: _encoded(name, part, kept.setdefault(name, objects.EncodedDicts()))
                for name, part in self.collected.items()
            }
            receipt = b"" if note is None else note(encoded)
            known = {**encoded, TABLE_NAME: table}
            values = {name: known[name] for name in plan.values}
            items = tuple(
                ItemRecord(
                    name=item.name,
                    kind=item.kind,
                    tensors=len(item.pieces),
                    size_bytes=item.size_bytes,
                    per_rank=item.per_rank,
                )
                for item in plan.items
            )
            metrics = {name: plain_scalar(value) for name, value in self.metrics.items()}
            return values, items, objects.encode(metrics), objects.encode(self.metadata), receipt

        return seal


def take_state(
    providers: Mapping[str, StateProvider],
    caches: dict[str, CollectCache],
    metrics: Mapping[str, object] | None,
    metadata: object,
    *,
    allow_pickle: bool,
) -> TakenState:
    """Describe every item now; `caches` from one save to the next spare what stays as it was."""
    specs: list[ItemSpec] = []
    sources: list[torch.Tensor] = []
    collected: dict[str, Collected] = {}
    only_ours = all(provider.passive for provider in providers.values())
    with one_moment() if only_ours else contextlib.nullcontext():
        for name, provider in providers.items():
            cache = caches.setdefault(name, CollectCache())
            with naming(name):
                state = provider.describe()
                part = collect(
                    state.value, volatile=state.volatile, allow_pickle=allow_pickle, cache=cache
                )
            collected[name] = part
            sources += part.sources
            specs.append(
                ItemSpec(name=name, kind=provider.kind, standalone=state.standalone,
                         pieces=part.pieces, per_rank=provider.per_rank,
                         mixed=getattr(provider, "mixed", False))
            )  # fmt: skip
    held = dict(_metric(name, value) for name, value in (metrics or {}).items())
    return TakenState(
        specs=tuple(specs), sources=tuple(sources), collected=collected, metrics=held,
        metadata=_plain_metadata(metadata),
    )  # fmt: skip


@contextlib.contextmanager
def naming(item: str, did: str = "looked at") -> Iterator[None]:
    """Have errors inside say whose state they are about, and what laststep did with it."""
    try:
        yield
    except (Usage, Mismatch) as error:
        raise _about(error, f"item {item!r}") from error.__cause__
    except Exception as error:  # out of a state_dict or a provider of the user's own
        error.add_note(f"while laststep {did} item {item!r}")
        raise


def _about(error: Usage | Mismatch, whose: str, *, remedy: str | None = None) -> Usage | Mismatch:
    """The same error, which also says whose value it is about."""
    named = type(error)(
        error.what, where=whose if error.where is None else f"{error.where} of {whose}",
        expected=error.expected, found=error.found, remedy=remedy or error.remedy,
    )  # fmt: skip
    if isinstance(error, Mismatch) and isinstance(named, Mismatch):
        named.problems = error.problems
    return named


def _encoded(name: str, collected: Collected, kept: objects.EncodedDicts) -> bytes:
    try:
        return encode_item(collected, kept)
    except Usage as error:
        # What can be pickled was, if that was allowed: this is a member of a set, or a key.
        remedy = "use plain values as keys and in sets, or leave it out"
        raise _about(error, f"item {name!r}", remedy=remedy) from error


def _plain_metadata(metadata: object) -> object:
    """A copy of the metadata, which is stored as plain values whatever allow_pickle says."""
    try:
        return objects.decode(objects.encode(metadata), where="metadata")
    except Usage as error:
        remedy = "make it plain, e.g. with str() or float(), or save it as an item"
        raise _about(error, "the metadata", remedy=remedy) from error


def _metric(name: str, value: object) -> tuple[str, object]:
    if not isinstance(name, str):
        raise Usage(
            "a metric's name is a string", found=shown(name), remedy="pass metrics={'loss': loss}"
        )
    return str(plain(name)), hold_scalar(name, value)
