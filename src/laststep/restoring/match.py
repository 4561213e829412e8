"""Fit a stored item to the live state: where every stored tensor goes, and all that does not fit.

Decides and allocates, but reads and writes no tensor data: the result says which stored tensor is
read into which memory and what is copied from there afterwards.

Stored and live trees are compared by their keys.
"""

from __future__ import annotations

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
    laid_of,
    like,
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
    from laststep.state.provider import Collected


def newer_entries(stored: object, live: object, path: Path) -> list[Path]:
    """The entries of dicts in the live tree that the stored one does not have."""
    stored, live = _state(stored), _state(live)
    theirs, newer = _entries(stored), []
    for key, inner in _entries(live).items():
        if key in theirs:
            newer += newer_entries(theirs[key], inner, (*path, key))
        elif isinstance(live, dict) and isinstance(stored, dict):
            newer.append((*path, key))
    return newer


def _entries(node: object) -> dict[object, object]:
    """The parts of a container by their keys, as paths have them; of anything else, none."""
    node = _state(node)
    if isinstance(node, dict):
        return node
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return dict(zip(node._fields, node, strict=True))
    return dict(enumerate(node)) if isinstance(node, list | tuple | deque) else {}


def _state(node: object) -> object:
    """A part without the class of the object that gave it, which is in no path."""
    return owned(node).state if isinstance(node, Tagged) and node.tag == OWNED else node


def part_at(tree: object, path: Path) -> object:
    """What stands there in a tree, or ABSENT."""
    for key in path:
        tree = _entries(tree).get(key, ABSENT)
    return tree


def mark_absent(tree: object, path: Path) -> None:
    """Note in a loaded tree that an entry of a dict was not restored."""
    for key in path[:-1]:
        tree = _entries(tree).get(key)
    if isinstance(tree, dict):
        tree[path[-1]] = ABSENT


def without(node: object, gone: tuple[Path, ...], path: Path = ()) -> object:
    """The tree with ABSENT at these paths."""
    if path in gone:
        return ABSENT
    if gone and type(node) is dict:
        return {key: without(inner, gone, (*path, key)) for key, inner in node.items()}
    if gone and isinstance(node, Tagged) and node.tag == OWNED:
        inside = owned(node)
        return Tagged(OWNED, [inside.owner, without(inside.state, gone, path)])
    return node


def without_plain(node: object, whole: tuple[Path, ...], path: Path = ()) -> object:
    """The tree with every plain value ABSENT, so that a partial restore changes none: an empty
    container is one too. What can only be taken `whole` is ABSENT altogether."""
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
"""Kinds of items that are restored into the live dicts themselves."""


@dataclass(slots=True)
class Match:
    """How a stored item goes into the live state."""

    item: StoredItem
    whole: bool
    fresh: tuple[Path, ...] = ()
    """What is handed over whole or not at all."""
    foreign: tuple[Path, ...] = ()
    """What an object of another class gave, or the provider refuses: it is left alone."""
    newer: tuple[Path, ...] = ()
    """Live entries of dicts that are not stored."""
    exact: bool = False
    """Whether these go, so that the dicts become what was stored; else they stay."""
    reads: dict[str, torch.Tensor] = field(default_factory=dict)
    """Stored tensor → contiguous memory that its bytes are read into."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """How those lie of which this rank takes a part; the memory in `reads` is of that part."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(to, from), after all reads."""
    apart: frozenset[str] = frozenset()
    """Names that are not to share memory, though the bytes of some are those of others."""
    twins: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of stored tensors that are one here. The second is restored; the first is read as well,
    to see that they are the same."""
    values: dict[str, object] = field(default_factory=dict)
    """Every name of the tree → the tensor that stands for it, or ABSENT."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    def refuse(self, path: Path, why: str) -> None:
        """Leave a part alone that does not fit."""
        self.foreign += (path,)
        self.mismatched.append(f"{show_path(path)} {why}" if path else why)

    def tree(self, *, allow_pickle: bool) -> object:
        """The loaded state; after the reads and copies."""
        tree = without(self.item.tree, self.foreign)
        if not self.whole:
            tree = without_plain(tree, self.fresh)
        value = rebuild(
            tree,
            leaf=lambda ref: self.values[ref.name],
            revive=lambda tagged: revive(tagged, where=self.item.name, allow_pickle=allow_pickle),
        )
        if not self.exact:
            for path in self.newer:
                mark_absent(value, path)
        return value

    def differing(self) -> list[str]:
        """Which twins are not the same, in words; after the reads."""
        return [
            f"{name}: is one with {first} here, but was stored apart and differs"
            for name, first in self.twins
            if not same_bytes(self.read(name), self.read(first))
        ]

    def read(self, name: str) -> torch.Tensor:
        """The memory that a stored tensor is read into."""
        landing, view = self.reads[self.item.source_of(name)], self.item.view_of(name)
        return landing if view is None else open_view(landing, view)

    @property
    def takes_something(self) -> bool:
        """Whether any of it is restored, as far as tensors tell."""
        return bool(self.reads) or not self.item.names()

    def newer_values(self) -> list[str]:
        """The names of live entries that are not stored and hold no tensors; those that do are
        `missing`."""
        names = [_name(path) for path in self.newer]
        return [
            name
            for name in names
            if not any(other == name or other.startswith(f"{name}/") for other in self.missing)
        ]


def match_item(
    renamed: Renamed,
    provider: StateProvider,
    state: State,
    live: Collected,
    selected: Callable[[str], bool] | None,
) -> Match:
    """Fit one item. `selected` picks tensors by name for a partial restore; None takes all."""
    item = renamed.item
    stored = item.names()
    match = Match(item=item, whole=selected is None, fresh=state.fresh, apart=renamed.apart)
    match.twins = [pair for pair in renamed.twins if selected is None or selected(pair[0])]
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
    if selected is not None:
        _refuse_parts_of(state.fresh, names, item)
    fresh = _pair(match, names, state, live)
    _allocate_fresh(match, fresh, provider, live)
    _place_twins(match)
    not_paired = (*state.fresh, *state.loose, *match.foreign)
    if selected is None:
        _find_missing(match, not_paired, live)
    if () not in not_paired:
        _find_newer(match, not_paired, state.things, live)
    return match


def _leave_alone(
    match: Match, provider: StateProvider, outline: object, selected: Callable[[str], bool] | None
) -> None:
    """Note what the provider refuses, or has no use for."""
    for path, why in provider.refuses(outline).items():
        if path in match.foreign:
            continue  # which has been said
        below = (name for name in match.values if lies_under(path_of(name), (path,)))
        if selected is None or any(map(selected, below)):
            match.foreign += (path,)
            match.mismatched.append(why)
    for path in provider.lacks(outline):
        match.foreign += (path,)
        if selected is None:
            match.unexpected.append(_name(path))


def _refuse_parts_of(fresh: tuple[Path, ...], names: list[str], item: StoredItem) -> None:
    """`UsageError` for a tensor that was picked out of what is handed over whole or not at all."""
    for name in names:
        if lies_under(path_of(name), fresh):
            raise UsageError(
                f"{item.name}/{name} can only be restored with the rest of its state",
                remedy=f"name the item itself: only=[{item.name!r}]",
            )


def load_item(item: StoredItem, device: str) -> Match:
    """Take an item as it is, into new memory."""
    match = Match(item=item, whole=True)
    match.values = dict.fromkeys(item.names(), ABSENT)
    _place_fresh(match, dict.fromkeys(item.names(), device))
    return match


def _pair(match: Match, names: list[str], state: State, live: Collected) -> list[str]:
    """Find the live counterpart of each name; those that get fresh memory are returned."""
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
        elif _differs(match, name, target, live):
            continue
        else:
            in_place.setdefault(match.item.source_of(name), []).append((name, target))
    _take_shared_once(match, in_place, live)
    for source, targets in in_place.items():
        _place_live(match, source, targets, live)
    return fresh


def _refuse_foreign(match: Match, provider: StateProvider, state: State, live: Collected) -> None:
    """State of another class than the live object's may look alike and mean something else; and
    that of an object is no plain value, nor is one the state of an object."""
    ours, theirs = owners(live.tree), owners(match.item.tree)
    for path, stored in theirs.items():
        if path in ours:
            if ours[path] != stored:
                match.refuse(path, f"is of class {ours[path]}, the stored one of class {stored}")
        elif part_at(live.tree, path) in (ABSENT, None):
            match.foreign += (path,)
            match.unexpected.append(_name(path))
        elif provider.kind in PLAIN_KINDS and not lies_under(path, state.things):
            match.refuse(path, f"is a plain value, the stored one of class {stored}")
    for path in ours.keys() - theirs:
        there, here = part_at(match.item.tree, path), part_at(live.tree, path)
        if lies_under(path, state.fresh) and not _may_be_state(there, here):
            match.refuse(path, f"is of class {ours[path]}, the stored one is a plain value")


def _may_be_state(stored: object, live: object) -> bool:
    """Whether a plain value has the keys of a live object's state: what was loaded, or imported,
    and is saved again has no class any more."""
    state = owned(live).state  # type: ignore[arg-type]
    if stored is ABSENT or not isinstance(state, dict):
        return True
    return isinstance(stored, dict) and state.keys() <= stored.keys()


def _differs(match: Match, name: str, target: torch.Tensor, live: Collected) -> bool:
    spec = match.item.spec_of(name)
    layout = live.layouts.get(name)
    shape = tuple(target.shape) if layout is None else layout.shape
    here = TensorSpec(DTYPE_NAMES[target.dtype], shape)
    if spec != here:
        match.mismatched.append(f"{name}: stored {spec}, live {here}")
        return True
    if repeats_itself(target):
        match.mismatched.append(
            f"{name}: the live tensor is expanded, so several elements are one place in memory, "
            "which cannot be written; make it contiguous"
        )
        return True
    return False


def _take_shared_once(
    match: Match, in_place: dict[str, list[tuple[str, torch.Tensor]]], live: Collected
) -> None:
    """Of tensors that share memory now but were stored apart only one can be restored: the one that
    has the first of the live names, by which an optimizer knows it too. Others that are the very
    same tensor are its twins; those that merely overlap with it do not fit."""
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
                match.twins.append((name, same))
                match.values[name] = live.owners.get(name, target)
            elif source != item.source_of(other):
                match.mismatched.append(f"{name}: shares memory with {other}, but was stored apart")
            else:
                continue
            targets[:] = [pair for pair in targets if pair[0] != name]
    for source in [source for source, targets in in_place.items() if not targets]:
        del in_place[source]


def _place_twins(match: Match) -> None:
    """Memory for the twins of what is restored, which lies as that does."""
    twins, match.twins = match.twins, []
    for name, first in twins:
        source, other = match.item.source_of(name), match.item.source_of(first)
        view = match.item.view_of(name)
        if other not in match.reads or match.item.window_of(name) == match.item.window_of(first):
            continue
        landing, layout = match.reads[other], match.layouts.get(other)
        if source not in match.reads and (layout is None or view is None):
            spec = match.item.tensors[source]
            shape = spec.shape if layout is None else tuple(landing.shape)
            match.reads[source] = allocate(spec.dtype, shape, str(landing.device))
            if layout is not None:
                match.layouts[source] = layout
        if match.layouts.get(source) == layout:
            match.twins.append((name, first))
        else:
            match.mismatched.append(f"{name}: lies otherwise over the ranks than {first}")


def _place_live(
    match: Match, source: str, targets: list[tuple[str, torch.Tensor]], live: Collected
) -> None:
    """Read straight into one live tensor where it has the stored form, and copy on from there."""
    if any(name in live.layouts for name, _ in targets):
        _place_parts(match, source, targets, live)
        return
    spec = match.item.tensors[source]
    plain = [t for name, t in targets if match.item.view_of(name) is None and t.is_contiguous()]
    landing = plain[0] if plain else allocate(spec.dtype, spec.shape, str(targets[0][1].device))
    match.reads[source] = landing
    for name, target in targets:
        match.values[name] = target
        view = match.item.view_of(name)
        origin = landing if view is None else open_view(landing, view)
        if origin is not target and not same_memory(origin, target):
            match.copies.append((target, origin))


def _place_parts(
    match: Match, source: str, targets: list[tuple[str, torch.Tensor]], live: Collected
) -> None:
    """Read the part that this rank holds; all names of it must lie alike."""
    first, target = targets[0]
    layout = live.layouts.get(first)
    landing = target
    if not target.is_contiguous():
        landing = allocate(DTYPE_NAMES[target.dtype], tuple(target.shape), str(target.device))
    for name, other in targets:
        alike = live.layouts.get(name) == layout and match.item.view_of(name) is None
        if layout is None or not alike:
            match.mismatched.append(f"{name}: lies otherwise over the ranks than {first}")
            return
        match.values[name] = live.owners.get(name, other)
        if other is not landing and not same_memory(other, landing):
            match.copies.append((other, landing))
    match.reads[source] = landing
    if layout is not None:
        match.layouts[source] = layout


def _allocate_fresh(
    match: Match, names: list[str], provider: StateProvider, live: Collected
) -> None:
    devices = provider.devices([path_of(name) for name in names])
    chosen = dict(zip(names, devices, strict=True))
    for name in _replaced(live.tree).intersection(names):
        chosen[name] = str(live.tensors[name].device)
    models = provider.models([path_of(name) for name in names])
    for name, model in zip(names, models, strict=True):
        if is_dtensor(model) and match.item.view_of(name) is None:
            _place_like(match, name, model)  # type: ignore[arg-type]
            chosen.pop(name)
    _place_fresh(match, chosen)


def _place_like(match: Match, name: str, model: DTensor) -> None:
    """New memory for a tensor that is to lie over the ranks as another one does."""
    source = match.item.source_of(name)
    spec = match.item.tensors[source]
    if spec.shape != tuple(model.shape):
        _place_fresh(match, {name: str(model.device)})
        return
    laid, landing = laid_of(model, name), match.reads.get(source)
    if landing is None or name in match.apart:
        own = allocate(spec.dtype, tuple(laid.local.shape), str(laid.local.device))
        if landing is None:
            match.reads[source], match.layouts[source] = own, laid.layout
        elif not _copy_read(match, name, own, laid.layout):
            return
        landing = own
    match.values[name] = like(model, landing)


def _copy_read(match: Match, name: str, to: torch.Tensor, layout: Layout | None) -> bool:
    """Copy there what is read for another name, if both lie alike."""
    source = match.item.source_of(name)
    if match.layouts.get(source) != layout:
        match.mismatched.append(f"{name}: lies otherwise over the ranks than {source}")
        return False
    match.copies.append((to, match.read(name)))
    return True


def _replaced(tree: object) -> set[str]:
    """The tensors of values that are replaced rather than written into, since their size may be
    another: long bytes and sparse tensors."""
    names: set[str] = set()

    def see(tagged: Tagged) -> object:
        if tagged.tag in ("bytes", "sparse"):
            names.update(tensor_names(tagged.value))
        return tagged

    rebuild(tree, leaf=lambda ref: ref, revive=see)
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


def _find_missing(match: Match, not_paired: tuple[Path, ...], live: Collected) -> None:
    stored = _replaced(live.tree).union(match.values)
    match.missing = [
        name
        for name in live.tensors
        if name not in stored and not lies_under(path_of(name), not_paired)
    ]


def _find_newer(
    match: Match, not_paired: tuple[Path, ...], things: tuple[Path, ...], live: Collected
) -> None:
    """Tell live entries that go, as they came to be after the checkpoint, from things with a state
    of their own, which are missing there."""
    paths = newer_entries(match.item.tree, live.tree, ())
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
    except UsageError:  # a key that only a tensor's name would need to spell
        return show_path(path)


def _outline(item: StoredItem) -> object:
    """The tree with specs in place of tensors, for a provider to check."""

    def see(tagged: Tagged) -> object:
        return owned(tagged).state if tagged.tag == OWNED else tagged.tag

    return rebuild(item.tree, leaf=lambda ref: item.spec_of(ref.name), revive=see)
