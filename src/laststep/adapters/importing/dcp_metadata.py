"""Decode the `.metadata` of torch.distributed.checkpoint (DCP): entries and their locations.

Pure; knows nothing of files or torch. `.metadata` is a pickle, but nothing in it is called: classes
are stand-ins that only keep what was pickled, and any class but DCP's own is refused by name. Every
part that is used is checked here: types, ranges, and that the chunks of a tensor cover it exactly
once. Damage is a `CorruptError`; metadata that is intact but not supported is a `UsageError`.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeVar

import msgspec

from laststep.constants import DTYPES, listed
from laststep.errors import CorruptError, LaststepError, UsageError
from laststep.process.threads import ready
from laststep.state.boxes import Box, covers_once, whole
from laststep.state.tree import MAX_DEPTH

if TYPE_CHECKING:
    from laststep.adapters.nesting import Path

_PATHS = "PosixPath PurePosixPath WindowsPath PureWindowsPath"
_ADMITTED_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata MetadataIndex ChunkStorageMetadata "
        "TensorProperties StorageMeta _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    # Up to torch 2.2.
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch": f"Size {' '.join(DTYPES)}",
    "torch.serialization": "_get_layout",
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "collections": "OrderedDict",
    "builtins": "getattr",  # members of enums in some versions of Python; never called
}
_ADMITTED = frozenset(
    (module, name) for module, names in _ADMITTED_NAMES.items() for name in names.split()
)
"""All classes and functions that may occur in the metadata, by module and name."""

REMEDY = (
    "load the folder yourself if you trust it, with "
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save, and save its parts"
)


class _Inert:
    """A stand-in for an object of a class of this name, with its arguments and attributes."""

    args: tuple[object, ...] = ()
    state: object = None

    def __new__(cls, *args: object) -> Self:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update(state)


class _InertUnpickler(pickle._Unpickler):  # noqa: SLF001
    """The unpickler in Python: for a wrong memo index, that in C allocates gigabytes."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ADMITTED:
            raise UsageError(
                "cannot import",
                found=f"{module[:100]}.{name[:100]}, which is code and not allowed",
                remedy=REMEDY,
            )
        plain = {"OrderedDict": dict, "Size": tuple}
        return plain.get(name) or type(name, (_Inert,), {})


def _unpickled(data: bytes, where: str) -> object:
    try:
        found: object = _InertUnpickler(io.BytesIO(data)).load()
    except LaststepError as error:
        error.where = where
        raise
    except Exception as error:  # invalid bytes raise anything
        raise CorruptError(
            "cannot read a pickle", where=where, found=f"damage: {str(error)[:200]}"
        ) from error
    return found


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Size = Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)]


# The attributes that are used of DCP's objects. `Any` is checked when it is used.


class Metadata(msgspec.Struct):
    state_dict_metadata: dict[Any, Any]
    storage_data: dict[Any, Any]
    planner_data: dict[Any, Any] | None = None


class ChunkStorageMetadata(msgspec.Struct):
    offsets: _Size
    sizes: _Size


class TensorStorageMetadata(msgspec.Struct):
    size: _Size
    properties: Any
    chunks: list[ChunkStorageMetadata]


class MetadataIndex(msgspec.Struct):
    fqn: str
    offset: _Size | None = None


class _StorageInfo(msgspec.Struct):
    relative_path: str
    offset: _Count
    length: _Count
    transform_descriptors: list[str] | None = None


_T = TypeVar("_T", bound=msgspec.Struct)


class StoredPart(NamedTuple):
    """Bytes of one file of the folder: a box of a tensor, or a value if `box` is None."""

    name: str
    file: str
    offset: int
    size_bytes: int
    box: Box | None

    def __str__(self) -> str:
        return repr(self.name[:100])


class MetadataEntry(NamedTuple):
    """One entry of the flat state: its name there, its path in the nested state, and its parts."""

    name: str
    path: Path
    parts: tuple[StoredPart, ...]
    """The non-empty boxes that a tensor was split into; for a value one part."""
    dtype: str | None = None
    """None for a value."""
    shape: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        if self.dtype is None:
            return self.parts[0].size_bytes
        return math.prod(self.shape) * DTYPES[self.dtype].size_bytes


def decode(data: bytes, *, where: str, in_parts: bool = False) -> tuple[MetadataEntry, ...]:
    """Return all entries in the order of the metadata. With `in_parts`, for a rank that saved
    separately, the chunks need not cover a whole tensor."""
    return _MetadataDecoder(where, in_parts=in_parts).entries(_unpickled(data, where))


@dataclass(frozen=True, slots=True)
class _MetadataDecoder:
    where: str
    in_parts: bool

    def entries(self, raw: object) -> tuple[MetadataEntry, ...]:
        metadata = self._record(raw, Metadata)
        places: dict[tuple[str, tuple[int, ...] | None], object] = {}
        for key, info in metadata.storage_data.items():
            index = self._record(key, MetadataIndex)
            places[index.fqn, index.offset] = info
        paths = metadata.planner_data or {}
        entries = []
        for name, content in metadata.state_dict_metadata.items():
            path = paths.get(name, (name,))
            self._check_path(name, path)
            if type(content).__name__ == "BytesStorageMetadata":
                part = self._part(name, None, places.get((name, None)))
                entries.append(MetadataEntry(name, path, (part,)))
                continue
            tensor = self._record(content, TensorStorageMetadata)
            boxes = [box for chunk in tensor.chunks if (box := self._box(name, chunk)).volume]
            self._check_boxes(name, tensor.size, boxes)
            parts = tuple(self._part(name, box, places.get((name, box.start))) for box in boxes)
            dtype = self._dtype(name, tensor.properties)
            entries.append(MetadataEntry(name, path, parts, dtype, tensor.size))
        return tuple(entries)

    def _check_path(self, name: object, path: object) -> None:
        match name, path:
            case str(), (str(), *parts) if (
                isinstance(path, tuple)
                and len(path) <= MAX_DEPTH
                and all(type(part) in (str, int) for part in parts)
            ):
                return
        raise self._corrupt(f"no path of text and numbers for {name!a:.100}: {path!a:.100}")

    def _box(self, name: str, chunk: ChunkStorageMetadata) -> Box:
        if len(chunk.offsets) != len(chunk.sizes):
            raise self._corrupt(f"a chunk of {name[:100]!r} with other offsets than sizes")
        return whole(chunk.sizes).moved(chunk.offsets)

    def _check_boxes(self, name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
        is_inside = all(
            len(box.start) == len(shape) and whole(shape).meet(box) == box for box in boxes
        )
        if not is_inside or not (self.in_parts or covers_once(shape, boxes)):
            shown = listed(f"[{box.text}]" for box in boxes)
            raise self._corrupt(
                f"{name[:100]!r} of shape {list(shape)} with chunks that do not cover it once: "
                f"{shown or 'none'}"
            )

    def _part(self, name: str, box: Box | None, raw: object) -> StoredPart:
        if raw is None:
            raise self._corrupt(f"nothing that says where {name[:100]!r} is stored")
        info = self._record(raw, _StorageInfo)
        file = info.relative_path
        if file in ("", ".", "..") or set(file) & set("/\\\0"):
            raise self._corrupt(f"no name of a file for {name[:100]!r}: {file[:100]!r}")
        if info.transform_descriptors:
            transforms = ", ".join(text[:50] for text in info.transform_descriptors[:4])
            raise self._unsupported(f"{name[:100]!r} behind stream transforms: {transforms}")
        return StoredPart(name=name, file=file, offset=info.offset, size_bytes=info.length, box=box)

    def _dtype(self, name: str, raw: object) -> str:
        match getattr(raw, "state", None):
            case (type(__name__=dtype), _Inert(args=(layout,)), *_) if dtype in DTYPES:
                if layout != "torch.strided":
                    raise self._unsupported(f"{name[:100]!r}, which is a sparse tensor")
                return str(dtype)
        raise self._corrupt(f"no dtype of {name[:100]!r}")

    def _record(self, raw: object, kind: type[_T]) -> _T:
        try:
            return msgspec.convert(raw, ready(kind), from_attributes=True)
        except msgspec.ValidationError as error:
            raise self._corrupt(f"a malformed {kind.__name__}: {error}") from None

    def _unsupported(self, found: str) -> UsageError:
        return UsageError("cannot import", where=self.where, found=found, remedy=REMEDY)

    def _corrupt(self, found: str) -> CorruptError:
        return CorruptError("cannot import", where=self.where, found=found)
