"""Fit a stored item to the live state: where every stored tensor goes, and all that does not fit.

Decides and allocates, but reads and writes no tensor data: the result says which stored tensor is
read into which memory and what is copied from there afterwards.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laststep.codecs.objects import Tagged, TensorRef
from laststep.errors import Usage
from laststep.state.names import path_of
from laststep.state.pieces import Collected, View
from laststep.state.provider import ABSENT, State, StateProvider, lies_under
from laststep.state.stored import StoredItem, TensorSpec
from laststep.state.tensors import (
    DTYPE_NAMES,
    allocate,
    open_view,
    revive,
    same_memory,
)
from laststep.state.tree import rebuild

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Match:
    """How a stored item goes into the live state."""

    item: StoredItem
    whole: bool
    reads: dict[str, torch.Tensor] = field(default_factory=dict)
    """Stored tensor → contiguous memory that its bytes are read into."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(to, from), after all reads."""
    values: dict[str, object] = field(default_factory=dict)
    """Every name of the tree → the tensor that stands for it, or ABSENT."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    def tree(self, *, allow_pickle: bool) -> object:
        """The loaded state; after the reads and copies."""
        tree = self.item.tree if self.whole else _without_plain(self.item.tree)
        return rebuild(
            tree,
            leaf=lambda ref: self.values[ref.name],
            revive=lambda tagged: revive(tagged, where=self.item.name, allow_pickle=allow_pickle),
        )


def match_item(
    item: StoredItem,
    provider: StateProvider,
    state: State,
    live: Collected,
    selected: Callable[[str], bool] | None,
) -> Match:
    """Fit one item. `selected` picks tensors by name for a partial restore; None takes everything."""
    match = Match(item=item, whole=selected is None)
    if selected is None:
        match.mismatched += provider.check(_outline(item))
    names = [name for name in item.names() if selected is None or selected(name)]
    match.values = dict.fromkeys(item.names(), ABSENT)
    if selected is not None and names and any(lies_under((), (path,)) for path in state.fresh):
        raise Usage(
            f"{item.name} can only be restored whole",
            remedy=f"name the item itself: only=[{item.name!r}]",
        )
    fresh = _pair(match, names, state, live)
    _allocate_fresh(match, fresh, provider)
    if selected is None:
        _find_missing(match, state, live)
    return match


def load_item(item: StoredItem, device: str) -> Match:
    """Take an item as it is, into new memory."""
    match = Match(item=item, whole=True)
    match.values = dict.fromkeys(item.names(), ABSENT)
    _place_fresh(match, {name: device for name in item.names()})
    return match


def _pair(match: Match, names: list[str], state: State, live: Collected) -> list[str]:
    """Find the live counterpart of each name; those that get fresh memory are returned."""
    fresh: list[str] = []
    in_place: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name in names:
        path = path_of(name)
        target: torch.Tensor | None = live.tensors.get(name)  # type: ignore[assignment]
        if lies_under(path, state.fresh):
            fresh.append(name)
        elif target is None:
            if lies_under(path, state.loose):
                fresh.append(name)
            else:
                match.unexpected.append(name)
        elif _differs(match, name, target):
            continue
        else:
            in_place.setdefault(match.item.source_of(name), []).append((name, target))
    for source, targets in in_place.items():
        _place_live(match, source, targets)
    return fresh


def _differs(match: Match, name: str, target: torch.Tensor) -> bool:
    spec = match.item.spec_of(name)
    found = TensorSpec(DTYPE_NAMES[target.dtype], tuple(target.shape))
    if spec != found:
        match.mismatched.append(
            f"{name}: stored {spec.dtype}{list(spec.shape)}, live {found.dtype}{list(found.shape)}"
        )
        return True
    return False


def _place_live(match: Match, source: str, targets: list[tuple[str, torch.Tensor]]) -> None:
    """Read straight into one live tensor where it has the stored form, and copy on from there."""
    spec = match.item.tensors[source]
    plain = [t for name, t in targets if match.item.view_of(name) is None and t.is_contiguous()]
    landing = plain[0] if plain else allocate(spec.dtype, spec.shape, str(targets[0][1].device))
    match.reads[source] = landing
    for name, target in targets:
        match.values[name] = target
        view = match.item.view_of(name)
        origin = landing if view is None else _window(match, landing, view)
        if origin is not target and not same_memory(origin, target):
            match.copies.append((target, origin))


def _window(match: Match, base: torch.Tensor, view: View) -> torch.Tensor:
    if base.storage_offset() % base.element_size():
        raise Usage("a shared tensor is not aligned", where=match.item.name)
    return open_view(base, view)


def _allocate_fresh(match: Match, names: list[str], provider: StateProvider) -> None:
    devices = provider.devices([path_of(name) for name in names])
    _place_fresh(match, dict(zip(names, devices, strict=True)))


def _place_fresh(match: Match, devices: dict[str, str]) -> None:
    for name, device in devices.items():
        source = match.item.source_of(name)
        if source not in match.reads:
            spec = match.item.tensors[source]
            match.reads[source] = allocate(spec.dtype, spec.shape, device)
        view = match.item.view_of(name)
        landing = match.reads[source]
        match.values[name] = landing if view is None else _window(match, landing, view)


def _find_missing(match: Match, state: State, live: Collected) -> None:
    stored = set(match.values)
    match.missing = [
        name
        for name in live.tensors
        if name not in stored and not lies_under(path_of(name), (*state.fresh, *state.loose))
    ]


def _outline(item: StoredItem) -> object:
    """The tree with specs in place of tensors, for a provider to check."""
    return rebuild(
        item.tree, leaf=lambda ref: item.spec_of(ref.name), revive=lambda tagged: tagged.tag
    )


def _without_plain(node: object) -> object:
    """The tree with every plain value ABSENT, so that a partial restore changes none."""
    if isinstance(node, TensorRef):
        return node
    if isinstance(node, Tagged):
        return node if _refers(node) else ABSENT
    if type(node) in (dict, OrderedDict):
        return {key: _without_plain(inner) for key, inner in node.items()}  # type: ignore[attr-defined]
    if type(node) in (list, tuple):
        return type(node)(_without_plain(inner) for inner in node)  # type: ignore[attr-defined, call-arg]
    if isinstance(node, deque):
        return deque((_without_plain(inner) for inner in node), node.maxlen)
    return ABSENT


def _refers(tagged: Tagged) -> bool:
    found = False

    def see(_: TensorRef) -> object:
        nonlocal found
        found = True
        return None

    rebuild(tagged.value, leaf=see, revive=lambda inner: None)
    return found
