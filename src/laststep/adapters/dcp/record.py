"""What a checkpoint says of the DCP state that it holds, beyond items: the value `~dcp`.

It lies in the index of the coordinator, as typed JSON: of every entry its name in DCP's flat state,
where it lies among the items, and whether it is a tensor, a value, a value that is only described
(`typed`), bytes that were kept as they are, or the part of a tensor that one rank has saved for
itself, with where it begins and the shape of the whole; what the planner wanted to be kept; and
DCP's id of the save. Sizes, dtypes and chunks are not in it: indexes have them.
Knows nothing of stores.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from laststep.codecs import objects
from laststep.codecs.objects import Tagged
from laststep.errors import CorruptError, UsageError
from laststep.state.tensors import revive
from laststep.terms import with_article

if TYPE_CHECKING:
    from laststep.adapters.nesting import Path

OBJECT_NAME = "~dcp"
_VERSION = 2
"""1 where there is nothing that an earlier laststep does not know."""
_LATER = ("part", "typed")

Kind = Literal["tensor", "value", "raw", "part", "typed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEntry:
    """A name of the flat state, and where it lies: its item, then its path in that."""

    fqn: str
    location: Path
    kind: Kind
    start: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpRecord:
    """All entries, in order, the planner's own data, and the id of the save."""

    entries: tuple[RecordEntry, ...]
    planner_data: object
    save_id: str | None = None


def encode(record: DcpRecord, *, allow_pickle: bool) -> bytes:
    """The bytes of the object; `UsageError` for a planner's data that would have to be pickled."""
    entries: list[list[object]] = [
        [entry.fqn, list(entry.location), entry.kind, *_extent(entry)] for entry in record.entries
    ]
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


def _extent(entry: RecordEntry) -> tuple[list[int], ...]:
    return (list(entry.start), list(entry.shape)) if entry.kind == "part" else ()


def _encoded(entries: list[list[object]], planner: object, save_id: str | None) -> bytes:
    version = _VERSION if any(entry[2] in _LATER for entry in entries) else 1
    return objects.encode(
        {"version": version, "planner_data": planner, "save_id": save_id, "entries": entries}
    )


def decode(data: bytes, *, where: str, allow_pickle: bool) -> DcpRecord:
    """The record again; `CorruptError` for nonsense, `UsageError` for one of a later version."""
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
    return CorruptError(
        "cannot read what a checkpoint says of its DCP state", where=where, found=found
    )
