"""Map the entries of a DCP state to the items of a checkpoint, and encode this as the value `~dcp`.

DCP describes a state as a flat dict, and the default planner reports the path in the nested state
that each name came from. If the values of a state are themselves states, each key becomes an item;
any other state becomes the item `model`. If the planner reports no paths, or contradictory ones,
the names themselves are the keys.

The value `~dcp` is typed JSON in the coordinator's index. The kind of an entry is a tensor, a
value, unchanged bytes (`raw`), or the `part` of a tensor that one rank saved separately. Sizes,
dtypes and chunks are in the indexes instead. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from laststep.adapters.nesting import Path, nest
from laststep.codecs import objects
from laststep.constants import is_item_name
from laststep.errors import CorruptError, UsageError
from laststep.process.threads import ready
from laststep.state.tree import MAX_DEPTH, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from torch.distributed.checkpoint.planner import SavePlan

WHOLE = "model"
"""The item of a state that does not consist of several states."""


def paths_of(plans: Sequence[SavePlan]) -> tuple[dict[str, Path], set[str]]:
    """Return the path of each entry of all ranks in the nested state, and the sharded tensors."""
    told: dict[str, Path] = {}
    for plan in plans:
        told.update(paths_told(plan.planner_data))
    paths: dict[str, Path] = {}
    sharded: set[str] = set()
    for item in chain.from_iterable(plan.items for plan in plans):
        fqn, data = item.index.fqn, item.tensor_data
        paths[fqn] = told.get(fqn, (fqn,))
        if data is not None and data.chunk.sizes != data.size:
            sharded.add(fqn)
    return paths, sharded


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


def locate(paths: Mapping[str, Path], sharded: AbstractSet[str]) -> dict[str, Path]:
    """Return the location of each entry: the name of its item, then its path in the item."""
    # An entry that is a whole item has an empty name in it; a sharded tensor needs one that is not.
    may_be_apart = all(
        is_item_name(path[0]) and (len(path) > 1 or fqn not in sharded)
        for fqn, path in paths.items()
    )
    if may_be_apart and any(len(path) > 1 for path in paths.values()):
        locations = dict(paths)
    else:
        locations = {fqn: (WHOLE, *path) for fqn, path in paths.items()}
    try:
        nest(((path, None) for path in locations.values()), where="")
    except CorruptError:  # the states of the ranks contradict each other
        locations = {fqn: (WHOLE, fqn) for fqn in paths}
    return locations


def tensor_name(location: Path) -> str:
    """Return the name that the tensor at this location has in its item."""
    return name_of(location[1:])


OBJECT_NAME = "~dcp"
_VERSION: Literal[1] = 1

_Count = Annotated[int, msgspec.Meta(ge=0)]


class RecordEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A name of the flat state and its location: its item, then its path in the item. A `part` also
    has its start in the whole tensor, and the shape of that."""

    fqn: str
    location: Annotated[tuple[str | _Count, ...], msgspec.Meta(min_length=1)]
    kind: Literal["tensor", "value", "raw", "part"]
    start: tuple[_Count, ...] = ()
    shape: tuple[_Count, ...] = ()


class DcpRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All entries, in order, the planner's own data and the id of the save."""

    entries: tuple[RecordEntry, ...]
    planner_data: Any
    save_id: str | None = None
    version: Literal[1] = _VERSION


def encode(record: DcpRecord) -> bytes:
    """Return the record as bytes. Raise `UsageError` if the planner's data are not plain."""
    entries: list[list[object]] = []
    for entry in record.entries:
        extent = [list(entry.start), list(entry.shape)] if entry.kind == "part" else []
        entries.append([entry.fqn, list(entry.location), entry.kind, *extent])
    document = {
        "version": record.version,
        "planner_data": record.planner_data,
        "save_id": record.save_id,
        "entries": entries,
    }
    try:
        return objects.encode(document)
    except UsageError as error:
        raise UsageError(
            "cannot save the data of the planner, which are not plain", found=error.found
        ) from error


def decode(data: bytes, *, where: str) -> DcpRecord:
    """Decode a record. Raise `UsageError` if it has a later version."""
    document = objects.decode(data, where=where)
    match document:
        case {"version": int(version)} if version > _VERSION:
            raise UsageError(
                "cannot read a checkpoint of a later version of the adapter",
                where=where,
                expected=f"version {_VERSION}",
                found=f"version {version}",
                remedy="upgrade laststep",
            )
    try:
        record = msgspec.convert(document, ready(DcpRecord))
    except msgspec.ValidationError as error:
        raise _corrupt(where, str(error)) from None
    for entry in record.entries:
        is_sound = entry.kind == "part" or not entry.shape
        if not is_sound or len(entry.start) != len(entry.shape) or type(entry.location[0]) is int:
            raise _corrupt(where, repr(entry)[:200])
    return record


def _corrupt(where: str, found: str) -> CorruptError:
    return CorruptError("cannot read the DCP record of a checkpoint", where=where, found=found)
