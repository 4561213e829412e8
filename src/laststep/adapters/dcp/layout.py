"""Decide where the entries of a DCP state lie among the items of a checkpoint.

Pure. DCP knows a state as a flat dict, and the default planner tells which path in the nested state
each of its names came from. A state whose values are themselves states gets an item for each of its
keys; any other is the item `model`. Where no paths are told, or where they contradict each other,
the names themselves are the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laststep.adapters.nesting import Path, nest
from laststep.errors import CorruptError
from laststep.state.tree import MAX_DEPTH, name_of
from laststep.terms import is_item_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.planner import SavePlan

WHOLE = "model"
"""The item of a state that is not one of several states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatEntry:
    """A name of the flat state: where it came from, and whether it is a tensor in parts."""

    fqn: str
    path: Path
    in_parts: bool


def entries_of(plans: Sequence[SavePlan]) -> tuple[FlatEntry, ...]:
    """The entries of all ranks, each once."""
    paths: dict[str, Path] = {}
    for plan in plans:
        paths.update(paths_told(plan.planner_data))
    entries: dict[str, FlatEntry] = {}
    for plan in plans:
        for item in plan.items:
            fqn, data = item.index.fqn, item.tensor_data
            in_parts = data is not None and data.chunk.sizes != data.size
            in_parts = in_parts or (fqn in entries and entries[fqn].in_parts)
            entries[fqn] = FlatEntry(fqn=fqn, path=paths.get(fqn, (fqn,)), in_parts=in_parts)
    return tuple(entries.values())


def paths_told(planner_data: object) -> dict[str, Path]:
    """The paths that a planner tells; none where what it tells is something else."""
    if not isinstance(planner_data, Mapping):
        return {}
    return {fqn: path for fqn, path in planner_data.items() if type(fqn) is str and _is_path(path)}


def _is_path(path: object) -> bool:
    return (
        isinstance(path, tuple)
        and 0 < len(path) < MAX_DEPTH
        and type(path[0]) is str
        and all(type(part) is str or (type(part) is int and part >= 0) for part in path)
    )


def locate(entries: Iterable[FlatEntry]) -> dict[str, Path]:
    """Where each entry lies: the name of its item, then its path within that."""
    listed = list(entries)
    nested = {entry.fqn: entry.path for entry in listed}
    if any(len(path) > 1 for path in nested.values()) and all(map(_may_be_apart, listed)):
        locations = nested
    else:
        locations = {fqn: (WHOLE, *path) for fqn, path in nested.items()}
    try:
        nest(((path, None) for path in locations.values()), where="")
    except CorruptError:  # ranks whose states do not go together
        locations = {fqn: (WHOLE, fqn) for fqn in nested}
    return locations


def _may_be_apart(entry: FlatEntry) -> bool:
    """Whether the first key of its path can be an item. An entry that is a whole item has an empty
    name in it, and a tensor in parts needs a name that is not empty."""
    return is_item_name(entry.path[0]) and (len(entry.path) > 1 or not entry.in_parts)


def tensor_name(location: Path) -> str:
    """The name of the tensor at that place in its item."""
    return name_of(location[1:])
