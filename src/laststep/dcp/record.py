"""Map the entries of a DCP state to the items of a checkpoint, and encode this as the value `~dcp`.

DCP describes a state as a flat dict, and the default planner reports the path in the nested state
that each name came from. If the values of a state are themselves states, each key becomes an item;
any other state becomes the item `model`. If the planner reports no paths, or contradictory ones,
the names themselves are the keys.

The value `~dcp` is stored in the coordinator's index as typed JSON. For every entry it has the name
in DCP's flat state, the location among the items, and the kind: a tensor (`tensor`), a value
(`value`), a described value (`typed`), unchanged bytes (`raw`), or the part of a tensor that one
rank saved separately (`part`), with its start and the shape of the whole tensor. It also has the
planner's own data and DCP's id of the save. Sizes, dtypes and chunks are in the indexes instead.
This module knows nothing of stores.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from laststep.adapters.nesting import Path, nest
from laststep.codecs import objects
from laststep.codecs.objects import Tagged
from laststep.constants import is_item_name, with_article
from laststep.errors import CorruptError, UsageError
from laststep.state.tensors import revive
from laststep.state.tree import MAX_DEPTH, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.checkpoint.planner import SavePlan

WHOLE = "model"
"""The item of a state that does not consist of several states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatEntry:
    """A name of the flat state, its path in the nested state, and True if it is a sharded
    tensor."""

    fqn: str
    path: Path
    in_parts: bool


def entries_of(plans: Sequence[SavePlan]) -> tuple[FlatEntry, ...]:
    """Return the entries of all ranks, without duplicates."""
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
    """Return the paths in the planner's data; none if the data is something else."""
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
    """Return the location of each entry: the name of its item, then its path in the item."""
    listed = list(entries)
    nested = {entry.fqn: entry.path for entry in listed}
    # An entry that is a whole item has an empty name in it; a sharded tensor needs one that is not.
    may_be_apart = all(
        is_item_name(entry.path[0]) and (len(entry.path) > 1 or not entry.in_parts)
        for entry in listed
    )
    if may_be_apart and any(len(path) > 1 for path in nested.values()):
        locations = nested
    else:
        locations = {fqn: (WHOLE, *path) for fqn, path in nested.items()}
    try:
        nest(((path, None) for path in locations.values()), where="")
    except CorruptError:  # the states of the ranks contradict each other
        locations = {fqn: (WHOLE, fqn) for fqn in nested}
    return locations


def tensor_name(location: Path) -> str:
    """Return the name that the tensor at this location has in its item."""
    return name_of(location[1:])


OBJECT_NAME = "~dcp"
_VERSION = 2
"""The version with all kinds of entries. Version 1 is written if it suffices, for earlier
readers."""
_LATER = ("part", "typed")

Kind = Literal["tensor", "value", "raw", "part", "typed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEntry:
    """A name of the flat state and its location: its item, then its path in the item."""

    fqn: str
    location: Path
    kind: Kind
    start: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpRecord:
    """All entries, in order, the planner's own data and the id of the save."""

    entries: tuple[RecordEntry, ...]
    planner_data: object
    save_id: str | None = None


def encode(record: DcpRecord, *, allow_pickle: bool) -> bytes:
    """Return the record as bytes. Raise `UsageError` if the planner's data would have to be
    pickled, unless `allow_pickle` is set."""
    entries: list[list[object]] = []
    for entry in record.entries:
        extent = [list(entry.start), list(entry.shape)] if entry.kind == "part" else []
        entries.append([entry.fqn, list(entry.location), entry.kind, *extent])
    planner = record.planner_data
    try:
        return _encoded(entries, planner, record.save_id)
    except UsageError as error:
        if not allow_pickle:
            raise UsageError(
                "cannot save the data of the planner, which is not plain",
                found=error.found,
                remedy="pass allow_pickle=True to both Writer and Reader",
            ) from error
    pickled = Tagged("pickle", pickle.dumps(planner, protocol=4))
    return _encoded(entries, pickled, record.save_id)


def _encoded(entries: list[list[object]], planner: object, save_id: str | None) -> bytes:
    version = _VERSION if any(entry[2] in _LATER for entry in entries) else 1
    return objects.encode(
        {"version": version, "planner_data": planner, "save_id": save_id, "entries": entries}
    )


def decode(data: bytes, *, where: str, allow_pickle: bool) -> DcpRecord:
    """Decode a record. Raise `CorruptError` if it is damaged, `UsageError` if it has a later
    version."""
    plain = objects.decode(data, where=where)
    match plain:
        case {"version": int(version)} if version > _VERSION:
            raise UsageError(
                "cannot read a checkpoint of a later version of the adapter",
                where=where,
                expected=f"version {_VERSION}",
                found=f"version {version}",
                remedy="upgrade laststep",
            )
        case {"version": 1 | 2, "planner_data": planner, "entries": list(listed), **rest} if (
            rest.keys() <= {"save_id"}
        ):
            entries = tuple(_entry(raw, where) for raw in listed)
        case _:
            raise _corrupt(where, "no version, planner_data and entries")
    save_id = rest.get("save_id")
    if save_id is not None and type(save_id) is not str:
        raise _corrupt(where, f"a save_id that is {with_article(type(save_id))}")
    if type(planner) is Tagged:
        planner = revive(planner, where=where, allow_pickle=allow_pickle)
    return DcpRecord(entries=entries, planner_data=planner, save_id=save_id)


def _entry(raw: object, where: str) -> RecordEntry:
    match raw:
        case [str(fqn), [str(), *_] as location, str(kind), *extent] if kind in get_args(Kind):
            sound = all(type(part) is str or _is_count(part) for part in location)
            path = cast("Path", tuple(location))
            if sound and kind != "part" and not extent:
                return RecordEntry(fqn=fqn, location=path, kind=cast("Kind", kind))
            match extent:
                case [list(start), list(shape)] if sound and kind == "part":
                    if len(start) == len(shape) and all(map(_is_count, start + shape)):
                        return RecordEntry(
                            fqn=fqn,
                            location=path,
                            kind="part",
                            start=tuple(start),
                            shape=tuple(shape),
                        )
    raise _corrupt(where, repr(raw)[:200])


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _corrupt(where: str, found: str) -> CorruptError:
    return CorruptError("cannot read the DCP record of a checkpoint", where=where, found=found)
