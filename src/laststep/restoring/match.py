"""Match a stored item to the live state: the target of every stored tensor, and every mismatch.

Stored and live trees are compared by their keys. No tensor data is read or written: a match records
the memory that each stored tensor is read into, and the copies to make from there afterwards.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from laststep.codecs.objects import Tagged, TensorRef
from laststep.errors import UsageError
from laststep.state import tensors
from laststep.state.optimizers import torch_form
from laststep.state.provider import ABSENT, State, StateProvider, lies_above, lies_under
from laststep.state.tree import (
    OWNED,
    Path,
    StoredItem,
    TensorSpec,
    name_of,
    owned,
    owners,
    path_of,
    rebuild,
    show_path,
    tensor_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed.tensor import DTensor

    from laststep.state.layouts import Layout
    from laststep.state.tree import Collected


def newer_entries(stored: object, live: object, path: Path) -> list[Path]:
    """Return the paths of dict entries in the live tree that the stored tree lacks."""
    stored, live = _state(stored), _state(live)
    theirs, newer = _entries(stored), []
    for key, inner in _entries(live).items():
        if key not in theirs:
            if isinstance(live, dict) and isinstance(stored, dict):
                newer.append((*path, key))
        elif isinstance(inner, _CONTAINERS):
            newer += newer_entries(theirs[key], inner, (*path, key))
    return newer


_CONTAINERS: Final = (dict, list, tuple, deque, Tagged)


def _entries(node: object) -> dict[object, object]:
    """Return the children of a container by the keys that paths use; empty for anything else."""
    node = _state(node)
    if isinstance(node, dict):
        return node
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return dict(zip(node._fields, node, strict=True))
    return dict(enumerate(node)) if isinstance(node, list | tuple | deque) else {}


def _state(node: object) -> object:
    """Return a node without the class tag of its owner, which is not part of any path."""
    return owned(node).state if isinstance(node, Tagged) and node.tag == OWNED else node


def part_at(tree: object, path: Path) -> object:
    """Return the node of a tree at that path, or ABSENT."""
    for key in path:
        tree = _entries(tree).get(key, ABSENT)
    return tree


def _pruned(node: object, gone: tuple[Path, ...], path: Path = (), *, plain: bool) -> object:
    """Return the tree with ABSENT at paths in `gone`. Unless `plain`, every plain value becomes
    ABSENT too, so that a partial restore changes none; an empty container counts as one."""
    if path in gone:
        return ABSENT
    if isinstance(node, TensorRef):
        return node
    if isinstance(node, Tagged) and node.tag == OWNED:
        inner = owned(node)
        return Tagged(OWNED, [inner.owner, _pruned(inner.state, gone, path, plain=plain)])
    if plain and type(node) is not dict:
        return node
    if isinstance(node, Tagged):
        return node if tensor_names(node.value) else ABSENT
    entries = {
        key: _pruned(inner, gone, (*path, key), plain=plain)
        for key, inner in _entries(node).items()
    }
    if type(node) in (dict, OrderedDict):
        return entries if entries or plain else ABSENT
    if not entries:
        return ABSENT
    if isinstance(node, deque):
        return deque(entries.values(), node.maxlen)
    parts = list(entries.values())
    return node._make(parts) if hasattr(node, "_make") else type(node)(parts)  # type: ignore[call-arg]


PLAIN_KINDS: Final = frozenset({"value", "group"})
"""Kinds of items whose live dicts are restored in place."""


@dataclass(slots=True)
class Match:
    """The restore of one stored item into the live state."""

    item: StoredItem
    whole: bool
    fresh: tuple[Path, ...] = ()
    """Paths that are restored as a whole or not at all."""
    foreign: tuple[Path, ...] = ()
    """Paths left alone, because the stored object has another class or the provider refuses it."""
    newer: tuple[Path, ...] = ()
    """Paths of live dict entries that are not stored."""
    newer_names: list[str] = field(default_factory=list)
    """Names of those that hold no tensors, which are `missing`; empty in a partial restore."""
    exact: bool = False
    """True if `newer` entries are removed; else they stay."""
    reads: dict[str, torch.Tensor] = field(default_factory=dict)
    """Stored tensor → contiguous memory that its bytes are read into."""
    layouts: dict[str, Layout | None] = field(default_factory=dict)
    """Layouts of the tensors in `reads`; if not None, the memory is that of this rank's part."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(target, source) pairs to copy after all reads."""
    apart: set[str] = field(default_factory=set)
    """Names that must not share memory, although some have the same stored bytes."""
    aliases: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of stored tensors that are one live tensor. The second is restored; the first is read
    too, to check that both are equal."""
    values: dict[str, object] = field(default_factory=dict)
    """Every name in the tree → its tensor, or ABSENT."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    def refuse(self, path: Path, why: str) -> None:
        """Leave the state at a path alone and record why it does not fit."""
        self.foreign += (path,)
        self.mismatched.append(f"{show_path(path)} {why}" if path else why)

    def tree(self, *, allow_pickle: bool, as_torch: bool = False) -> object:
        """Return the loaded state; call it after the reads and copies. With `as_torch`, optimizers
        are in the form that torch loads, else in that of their provider."""

        def revive(tagged: Tagged) -> object:
            made = tensors.revive(tagged, where=self.item.name, allow_pickle=allow_pickle)
            return torch_form(made) if as_torch and tagged.tag == OWNED else made

        tree, gone = self.item.tree, self.foreign
        if not self.whole:
            tree = _pruned(tree, (*gone, *self.fresh), plain=False)
        elif gone:
            tree = _pruned(tree, gone, plain=True)
        value = rebuild(tree, leaf=self.values.__getitem__, revive=revive)
        if not self.exact:
            for *above, last in self.newer:  # dict entries of the live state that stay
                within = part_at(value, tuple(above))
                if isinstance(within, dict):
                    within[last] = ABSENT
        return value

    def differing(self) -> list[str]:
        """Describe the aliases whose bytes differ; call it after the reads."""
        return [
            f"{name}: is the same tensor as {first} here, but was stored separately and differs"
            for name, first in self.aliases
            if not tensors.same_bytes(self.read(name), self.read(first))
        ]

    def read(self, name: str) -> torch.Tensor:
        """Return the memory that a stored tensor is read into."""
        buffers, view = self.reads[self.item.source_of(name)], self.item.view_of(name)
        return buffers if view is None else tensors.open_view(buffers, view)


def match_item(
    match: Match,
    provider: StateProvider,
    state: State,
    live: Collected,
    selected: Callable[[str], bool] | None,
) -> None:
    """Match an item; `selected` picks tensors of a partial restore, None takes all."""
    item = match.item
    stored = item.names
    match.fresh = state.fresh
    match.values = dict.fromkeys(stored, ABSENT)
    if selected is not None:
        match.mismatched.clear()
        match.aliases = [pair for pair in match.aliases if selected(pair[0])]
    # The tree with specs in place of tensors, for the provider to check.
    outline = rebuild(item.tree, leaf=item.spec_of, revive=_outlined)
    if selected is None:
        _refuse_foreign(match, provider, state, live)
        if () in match.foreign:
            return
        match.mismatched += provider.check(outline)
    _leave_alone(match, provider, outline, selected)
    names = stored if selected is None else list(filter(selected, stored))
    if match.foreign:
        names = [name for name in names if not lies_under(path_of(name), match.foreign)]
    for name in names if selected is not None else ():
        if lies_under(path_of(name), state.fresh):
            raise UsageError(
                f"{item.name}/{name} can only be restored with the rest of its state",
                remedy=f"name the item itself: only=[{item.name!r}]",
            )
    fresh = _pair(match, names, state, live)
    replaced = _replaced(live.tree)
    destinations = provider.destinations(list(map(path_of, fresh))) if fresh else []
    for name, to in zip(fresh, destinations, strict=True):
        _place_fresh(match, name, str(live.tensors[name].device) if name in replaced else to)
    if match.aliases:
        _place_aliases(match)
    not_paired = (*state.fresh, *state.loose, *match.foreign)
    if selected is None:
        known = replaced.union(match.values)
        for name in itertools.filterfalse(known.__contains__, live.tensors):
            if not lies_under(path_of(name), not_paired):
                match.missing.append(name)
    if () not in not_paired:
        _find_newer(match, not_paired, state.things, live)


def _leave_alone(
    match: Match, provider: StateProvider, outline: object, selected: Callable[[str], bool] | None
) -> None:
    """Record the paths that the provider skips, as mismatched if it gives a reason."""
    for path, reason in provider.skips(outline).items():
        if reason is None:
            match.foreign += (path,)
            if selected is None:
                match.unexpected.append(_name(path))
        elif path not in match.foreign:  # else already reported
            below = (name for name in match.values if lies_under(path_of(name), (path,)))
            if selected is None or any(map(selected, below)):
                match.foreign += (path,)
                match.mismatched.append(reason)


def load_item(item: StoredItem, device: str) -> Match:
    """Match an item as stored, into new memory."""
    match = Match(item=item, whole=True)
    match.values = dict.fromkeys(item.names, ABSENT)
    for name in item.names:
        _place_fresh(match, name, device)
    return match


def _pair(match: Match, names: list[str], state: State, live: Collected) -> list[str]:
    """Pair each name with its live tensor; return the names that need new memory."""
    fresh: list[str] = []
    replaced = _replaced(match.item.tree)
    in_place: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name in names:
        path = path_of(name)
        target = live.tensors.get(name)
        if name in replaced or lies_under(path, state.fresh):
            fresh.append(name)
        elif target is None:
            if match.whole and lies_under(path, state.loose):
                fresh.append(name)
            else:
                match.unexpected.append(name)
        elif not _differs(match, name, target, live):
            in_place.setdefault(match.item.source_of(name), []).append((name, target))
    if live.ties or live.views:
        _take_shared_once(match, in_place, live)
    for source, targets in in_place.items():
        _place_live(match, source, targets, live)
    return fresh


def _refuse_foreign(match: Match, provider: StateProvider, state: State, live: Collected) -> None:
    """Refuse state of another class than the live object's: it may look the same and mean something
    else. Refuse an object's state for a live plain value, and the reverse."""
    ours, theirs = owners(live.tree), owners(match.item.tree)
    for path, stored in theirs.items():
        if path in ours:
            if ours[path] != stored:
                match.refuse(
                    path, f"is of class {ours[path]}, but the stored one is of class {stored}"
                )
        elif part_at(live.tree, path) in (ABSENT, None):
            match.foreign += (path,)
            match.unexpected.append(_name(path))
        elif provider.kind in PLAIN_KINDS and not lies_under(path, state.things):
            match.refuse(path, f"is a plain value, but the stored one is of class {stored}")
    for path in ours.keys() - theirs:
        stored_part, live_part = part_at(match.item.tree, path), part_at(live.tree, path)
        if lies_under(path, state.fresh) and not _may_be_state(stored_part, live_part):
            match.refuse(path, f"is of class {ours[path]}, but a plain value was stored")


def _may_be_state(stored: object, live: object) -> bool:
    """Return whether a stored plain value has the keys of a live object's state. State that was
    loaded or imported and then saved again has lost its class."""
    state = owned(live).state  # type: ignore[arg-type]
    if stored is ABSENT or not isinstance(state, dict):
        return True
    return isinstance(stored, dict) and state.keys() <= stored.keys()


def _differs(match: Match, name: str, target: torch.Tensor, live: Collected) -> bool:
    """Record why a live tensor cannot take a stored one; return False if it can."""
    layout = live.layouts.get(name)
    shape = tuple(target.shape) if layout is None else layout.shape
    stored, here = match.item.spec_of(name), TensorSpec(tensors.DTYPE_NAMES[target.dtype], shape)
    if stored != here:
        match.mismatched.append(f"{name}: stored {stored}, live {here}")
    elif tensors.repeats_itself(target):
        match.mismatched.append(
            f"{name}: the live tensor is expanded, so several elements are one place in memory, "
            "which cannot be written; make it contiguous"
        )
    else:
        return False
    return True


def _take_shared_once(
    match: Match, in_place: dict[str, list[tuple[str, torch.Tensor]]], live: Collected
) -> None:
    """Keep one of the tensors that share memory now but were stored separately, under the name that
    is also the optimizer's. The same tensor under other names becomes its alias; tensors that only
    overlap with it are mismatched."""
    item = match.item
    taken = {name: name for targets in in_place.values() for name, _ in targets}
    owner: dict[str, str] = {}
    for source, targets in in_place.items():
        for name, target in list(targets):
            first = live.ties.get(name, name)
            view = live.views.get(first)
            same = taken.setdefault(first, name)
            other = owner.setdefault(first if view is None else view.base, same)
            lies_alike = live.layouts.get(name) == live.layouts.get(same)
            if lies_alike and item.window_of(name) != item.window_of(same):
                match.aliases.append((name, same))
                match.values[name] = live.owners.get(name, target)
            elif source != item.source_of(other):
                match.mismatched.append(
                    f"{name}: shares memory with {other}, but was stored separately"
                )
            else:
                continue
            targets[:] = [pair for pair in targets if pair[0] != name]
    for source in [source for source, targets in in_place.items() if not targets]:
        del in_place[source]


def _place_aliases(match: Match) -> None:
    """Allocate memory for the aliases of restored tensors, with the same layout."""
    aliases, match.aliases = match.aliases, []
    for name, first in aliases:
        source, other = match.item.source_of(name), match.item.source_of(first)
        view = match.item.view_of(name)
        if other not in match.reads or match.item.window_of(name) == match.item.window_of(first):
            continue
        buffers, layout = match.reads[other], match.layouts.get(other)
        if source not in match.reads and (layout is None or view is None):
            spec = match.item.tensors[source]
            shape = spec.shape if layout is None else tuple(buffers.shape)
            match.reads[source] = tensors.allocate(spec.dtype, shape, str(buffers.device))
            match.layouts[source] = layout
        if match.layouts.get(source) == layout:
            match.aliases.append((name, first))
        else:
            match.mismatched.append(f"{name}: is sharded differently than {first}")


def _place_live(
    match: Match, source: str, targets: list[tuple[str, torch.Tensor]], live: Collected
) -> None:
    """Read straight into a contiguous live tensor of the stored form if there is one, else into new
    memory, and copy from there to the other targets. A rank that holds a part reads only that."""
    first, target = targets[0]
    layout = live.layouts.get(first)
    for name, _ in targets:
        is_view = match.item.view_of(name) is not None
        if live.layouts.get(name) != layout or (layout is not None and is_view):
            match.mismatched.append(f"{name}: is sharded differently than {first}")
            return
    for name, other in targets:
        if match.item.view_of(name) is None and other.is_contiguous():
            buffers = other
            break
    else:
        spec = match.item.tensors[source]
        shape = spec.shape if layout is None else tuple(target.shape)
        buffers = tensors.allocate(spec.dtype, shape, str(target.device))
    match.reads[source], match.layouts[source] = buffers, layout
    for name, other in targets:
        match.values[name] = live.owners.get(name, other)
        origin = match.read(name)
        if origin is not other and not tensors.same_memory(origin, other):
            match.copies.append((other, origin))


def _place_fresh(match: Match, name: str, to: object) -> None:
    """Allocate memory for a tensor: on a device, or like a tensor of its shape."""
    item, source = match.item, match.item.source_of(name)
    dtype, shape = item.tensors[source]
    device = to if isinstance(to, str) else str(to.device)  # type: ignore[attr-defined]
    model = cast("DTensor", to) if tensors.is_dtensor(to) and item.view_of(name) is None else None
    layout: Layout | None = None
    if model is not None and shape == tuple(model.shape):
        local, layout = tensors.local_shard_of(model, name)
        shape, device = tuple(local.shape), str(local.device)
    if source not in match.reads:
        match.reads[source], match.layouts[source] = tensors.allocate(dtype, shape, device), layout
        buffers = match.read(name)
    elif name not in match.apart:
        buffers = match.read(name)
    elif match.layouts.get(source) == layout:
        origin = match.read(name)
        buffers = tensors.allocate(item.spec_of(name).dtype, tuple(origin.shape), device)
        match.copies.append((buffers, origin))
    else:
        match.mismatched.append(f"{name}: is sharded differently than {source}")
        return
    match.values[name] = (
        buffers if model is None or layout is None else tensors.like(model, buffers)
    )


def _replaced(tree: object) -> set[str]:
    """Return the tensors of values that may change size, so are replaced: bytes, sparse tensors."""
    names: set[str] = set()
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Tagged):
            if node.tag in ("bytes", "sparse"):
                names.update(tensor_names(node.value))
            else:
                stack.append(node.value)
        elif isinstance(node, dict):
            stack += node.values()
        elif isinstance(node, list | tuple | deque):
            stack += node
    return names


def _find_newer(
    match: Match, not_paired: tuple[Path, ...], things: tuple[Path, ...], live: Collected
) -> None:
    """Find live entries that are not stored. Objects with a state of their own are missing from the
    checkpoint and stay; the rest are newer than the checkpoint, and `exact` removes them."""
    paths = newer_entries(match.item.tree, live.tree, ())
    if not paths:
        return
    gone = [path for path in things if lies_under(path, tuple(paths))]
    match.newer = tuple(
        path
        for path in paths
        if not lies_under(path, (*not_paired, *gone)) and not lies_above(path, gone)
    )
    if match.whole:
        told = tuple(map(path_of, match.missing))
        match.missing += [_name(path) for path in gone if not lies_above(path, told)]
        match.newer_names = [_name(path) for path in match.newer if not lies_above(path, told)]


def _name(path: Path) -> str:
    try:
        return name_of(path)
    except UsageError:  # a key that cannot be part of a tensor's name
        return show_path(path)


def _outlined(tagged: Tagged) -> object:
    return owned(tagged).state if tagged.tag == OWNED else tagged.tag
