"""Match a stored item to the live state: the target of every stored tensor, and every mismatch.

Stored and live trees are compared by their keys. This allocates, but reads and writes no tensor
data: a match records the memory that each stored tensor is read into, and the copies to make from
there afterwards.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from laststep.codecs.objects import Tagged, TensorRef
from laststep.errors import UsageError
from laststep.state.provider import ABSENT, State, StateProvider, lies_above, lies_under
from laststep.state.tensors import (
    DTYPE_NAMES,
    allocate,
    is_dtensor,
    like,
    local_shard_of,
    open_view,
    repeats_itself,
    revive,
    same_bytes,
    same_memory,
)
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

    from laststep.restoring.renaming import Renamed
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


def without(node: object, gone: tuple[Path, ...], path: Path = ()) -> object:
    """Return the tree with ABSENT at these paths."""
    if path in gone:
        return ABSENT
    if gone and type(node) is dict:
        return {key: without(inner, gone, (*path, key)) for key, inner in node.items()}
    if gone and isinstance(node, Tagged) and node.tag == OWNED:
        inside = owned(node)
        return Tagged(OWNED, [inside.owner, without(inside.state, gone, path)])
    return node


def without_plain(node: object, whole: tuple[Path, ...], path: Path = ()) -> object:
    """Return the tree with every plain value ABSENT, so that a partial restore changes none; an
    empty container counts as a plain value. Paths in `whole`, which can only be restored as a
    whole, are ABSENT too."""
    if path in whole:
        return ABSENT

    def down(key: object, inner: object) -> object:
        return without_plain(inner, whole, (*path, key))

    if isinstance(node, TensorRef):
        return node
    if isinstance(node, Tagged) and node.tag == OWNED:
        inner = owned(node)
        return Tagged(OWNED, [inner.owner, without_plain(inner.state, whole, path)])
    if isinstance(node, Tagged):
        return node if tensor_names(node.value) else ABSENT
    if not _entries(node):
        return ABSENT
    if type(node) in (dict, OrderedDict):
        return {key: down(key, inner) for key, inner in node.items()}  # type: ignore[attr-defined]
    if isinstance(node, deque):
        return deque((down(i, inner) for i, inner in enumerate(node)), node.maxlen)
    parts = [down(key, inner) for key, inner in _entries(node).items()]
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
    exact: bool = False
    """True if `newer` entries are removed, so that the dicts equal the stored ones; else they
    stay."""
    reads: dict[str, torch.Tensor] = field(default_factory=dict)
    """Stored tensor → contiguous memory that its bytes are read into."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Layouts of those tensors in `reads` that this rank holds only in part; their memory is that
    part's."""
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

    def tree(self, *, allow_pickle: bool) -> object:
        """Return the loaded state; call it after the reads and copies."""
        tree = without(self.item.tree, self.foreign) if self.foreign else self.item.tree
        if not self.whole:
            tree = without_plain(tree, self.fresh)
        value = rebuild(
            tree,
            leaf=lambda ref: self.values[ref.name],
            revive=lambda tagged: revive(tagged, where=self.item.name, allow_pickle=allow_pickle),
        )
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
            if not same_bytes(self.read(name), self.read(first))
        ]

    def read(self, name: str) -> torch.Tensor:
        """Return the memory that a stored tensor is read into."""
        buffers, view = self.reads[self.item.source_of(name)], self.item.view_of(name)
        return buffers if view is None else open_view(buffers, view)

    def newer_values(self) -> list[str]:
        """Return the names of live entries that are not stored and hold no tensors; those with
        tensors are in `missing`."""
        return [
            name
            for name in map(_name, self.newer)
            if not any(f"{other}/".startswith(f"{name}/") for other in self.missing)
        ]


def match_item(
    renamed: Renamed,
    provider: StateProvider,
    state: State,
    live: Collected,
    selected: Callable[[str], bool] | None,
) -> Match:
    """Match one item. `selected` picks tensors by name for a partial restore; None takes all."""
    item = renamed.item
    stored = item.names()
    match = Match(item=item, whole=selected is None, fresh=state.fresh, apart=renamed.apart)
    match.aliases = renamed.aliases
    if selected is not None:
        match.aliases = [pair for pair in renamed.aliases if selected(pair[0])]
    match.values = dict.fromkeys(stored, ABSENT)
    outline = _outline(item)
    if selected is None:
        _refuse_foreign(match, provider, state, live)
        if () in match.foreign:
            return match
        match.mismatched += [*provider.check(outline), *renamed.differing]
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
    if fresh:
        _allocate_fresh(match, fresh, provider, live)
    if match.aliases:
        _place_aliases(match)
    not_paired = (*state.fresh, *state.loose, *match.foreign)
    if selected is None:
        known = _replaced(live.tree).union(match.values)
        for name in itertools.filterfalse(known.__contains__, live.tensors):
            if not lies_under(path_of(name), not_paired):
                match.missing.append(name)
    if () not in not_paired:
        _find_newer(match, not_paired, state.things, live)
    return match


def _leave_alone(
    match: Match, provider: StateProvider, outline: object, selected: Callable[[str], bool] | None
) -> None:
    """Record the paths that the provider skips: without a reason as unexpected, else as
    mismatched."""
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
    match.values = dict.fromkeys(item.names(), ABSENT)
    _place_fresh(match, dict.fromkeys(item.names(), device))
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
    """Refuse stored state whose owner differs in class from the live object's: it may look the same
    and mean something else. Refuse an object's state for a live plain value, and the reverse."""
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
        there, here = part_at(match.item.tree, path), part_at(live.tree, path)
        if lies_under(path, state.fresh) and not _may_be_state(there, here):
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
    stored, here = match.item.spec_of(name), TensorSpec(DTYPE_NAMES[target.dtype], shape)
    if stored != here:
        match.mismatched.append(f"{name}: stored {stored}, live {here}")
    elif repeats_itself(target):
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
    """Keep one of the tensors that share memory now but were stored separately: the one with the
    first live name, which is also the optimizer's name for it. Others that are exactly the same
    tensor become its aliases; those that only overlap with it are mismatched."""
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
            match.reads[source] = allocate(spec.dtype, shape, str(buffers.device))
            if layout is not None:
                match.layouts[source] = layout
        if match.layouts.get(source) == layout:
            match.aliases.append((name, first))
        else:
            match.mismatched.append(f"{name}: is sharded differently than {first}")


def _place_live(
    match: Match, source: str, targets: list[tuple[str, torch.Tensor]], live: Collected
) -> None:
    """Read straight into a contiguous live tensor of the stored form if there is one, else into new
    memory, and copy from there to the other targets."""
    if live.layouts and any(name in live.layouts for name, _ in targets):
        _place_parts(match, source, targets, live)
        return
    for name, target in targets:
        if match.item.view_of(name) is None and target.is_contiguous():
            buffers = target
            break
    else:
        spec = match.item.tensors[source]
        buffers = allocate(spec.dtype, spec.shape, str(targets[0][1].device))
    match.reads[source] = buffers
    for name, target in targets:
        match.values[name] = target
        view = match.item.view_of(name)
        origin = buffers if view is None else open_view(buffers, view)
        if origin is not target and not same_memory(origin, target):
            match.copies.append((target, origin))


def _place_parts(
    match: Match, source: str, targets: list[tuple[str, torch.Tensor]], live: Collected
) -> None:
    """Read the part that this rank holds; all names of the tensor must have the same layout."""
    first, target = targets[0]
    layout = live.layouts.get(first)
    buffers = target
    if not target.is_contiguous():
        buffers = allocate(DTYPE_NAMES[target.dtype], tuple(target.shape), str(target.device))
    for name, other in targets:
        alike = live.layouts.get(name) == layout and match.item.view_of(name) is None
        if layout is None or not alike:
            match.mismatched.append(f"{name}: is sharded differently than {first}")
            return
        match.values[name] = live.owners.get(name, other)
        if other is not buffers and not same_memory(other, buffers):
            match.copies.append((other, buffers))
    match.reads[source] = buffers
    if layout is not None:
        match.layouts[source] = layout


def _allocate_fresh(
    match: Match, names: list[str], provider: StateProvider, live: Collected
) -> None:
    destinations = provider.destinations(list(map(path_of, names)))
    replaced = _replaced(live.tree)
    devices: dict[str, str] = {}
    for name, to in zip(names, destinations, strict=True):
        if is_dtensor(to) and match.item.view_of(name) is None:
            _place_like(match, name, to)  # type: ignore[arg-type]
        elif name in replaced:
            devices[name] = str(live.tensors[name].device)
        else:
            devices[name] = to if isinstance(to, str) else str(to.device)  # type: ignore[attr-defined]
    _place_fresh(match, devices)


def _place_like(match: Match, name: str, model: DTensor) -> None:
    """Allocate a tensor with the layout of `model`; a full tensor if their shapes differ."""
    source = match.item.source_of(name)
    spec = match.item.tensors[source]
    if spec.shape != tuple(model.shape):
        _place_fresh(match, {name: str(model.device)})
        return
    shard, buffers = local_shard_of(model, name), match.reads.get(source)
    if buffers is None or name in match.apart:
        own = allocate(spec.dtype, tuple(shard.local.shape), str(shard.local.device))
        if buffers is None:
            match.reads[source], match.layouts[source] = own, shard.layout
        elif not _copy_read(match, name, own, shard.layout):
            return
        buffers = own
    match.values[name] = like(model, buffers)


def _copy_read(match: Match, name: str, to: torch.Tensor, layout: Layout | None) -> bool:
    """Schedule a copy from the memory read for another name. Return False, and record a mismatch,
    if the layouts differ."""
    source = match.item.source_of(name)
    if match.layouts.get(source) != layout:
        match.mismatched.append(f"{name}: is sharded differently than {source}")
        return False
    match.copies.append((to, match.read(name)))
    return True


def _replaced(tree: object) -> set[str]:
    """Return the tensors of values that are replaced rather than overwritten, because their size
    may change: long bytes and sparse tensors."""
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


def _place_fresh(match: Match, devices: dict[str, str]) -> None:
    for name, device in devices.items():
        source = match.item.source_of(name)
        if source not in match.reads:
            spec = match.item.tensors[source]
            match.reads[source] = allocate(spec.dtype, spec.shape, device)
        elif name in match.apart:
            spec = match.item.spec_of(name)
            own = allocate(spec.dtype, spec.shape, device)
            if _copy_read(match, name, own, None):
                match.values[name] = own
            continue
        match.values[name] = match.read(name)


def _find_newer(
    match: Match, not_paired: tuple[Path, ...], things: tuple[Path, ...], live: Collected
) -> None:
    """Find live entries that are not stored. Those that are, or contain, an object with a state of
    its own are missing from the checkpoint and stay; the rest are newer than the checkpoint, and
    `exact` removes them."""
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


def _name(path: Path) -> str:
    try:
        return name_of(path)
    except UsageError:  # a key that cannot be part of a tensor's name
        return show_path(path)


def _outline(item: StoredItem) -> object:
    """Return the tree with specs in place of tensors, for a provider to check."""

    def see(tagged: Tagged) -> object:
        return owned(tagged).state if tagged.tag == OWNED else tagged.tag

    return rebuild(item.tree, leaf=lambda ref: item.spec_of(ref.name), revive=see)
