"""Decode the `.metadata` of torch.distributed.checkpoint (DCP): entries and their locations.

Pure; knows nothing of files or torch. The pickle is read without calling anything in it, and every
part that is used is checked here: types, ranges, and that the chunks of a tensor cover it exactly
once. Damage is a `CorruptError`; metadata that is intact but not supported is a `UsageError`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec

from laststep.adapters.importing import inert_pickle
from laststep.adapters.importing.inert_pickle import Global, PickledObject
from laststep.constants import DTYPES, listed, with_article
from laststep.errors import CorruptError, UsageError
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
ADMITTED = frozenset(
    (module, name) for module, names in _ADMITTED_NAMES.items() for name in names.split()
)
"""All classes and functions that may occur in the metadata, by module and name."""

REMEDY = (
    "load the folder yourself if you trust it, with "
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save, and save its parts"
)

_MAX_DIMS = 64
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


# The attributes that are used of DCP's objects. `Any` is checked when it is used.


class Metadata(msgspec.Struct):
    state_dict_metadata: dict[Any, Any]
    storage_data: dict[Any, Any]
    planner_data: dict[Any, Any] | None = None


class TensorStorageMetadata(msgspec.Struct):
    size: Any
    properties: Any
    chunks: list[Any]


class ChunkStorageMetadata(msgspec.Struct):
    offsets: Any
    sizes: Any


class MetadataIndex(msgspec.Struct):
    fqn: str
    offset: Any = None


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
    if data[:1] == b"{":
        raise UsageError(
            "cannot import",
            where=where,
            found="an index of HuggingFace storage, not of DCP's own",
            remedy="import the safetensors files in the folder one by one",
        )
    metadata = inert_pickle.read(data, admitted=ADMITTED, where=where, remedy=REMEDY)
    return _MetadataDecoder(where, in_parts=in_parts).entries(metadata)


@dataclass(frozen=True, slots=True)
class _MetadataDecoder:
    where: str
    in_parts: bool

    def entries(self, raw: object) -> tuple[MetadataEntry, ...]:
        metadata = self._record(raw, Metadata)
        places: dict[tuple[str, object], object] = {}
        for key, info in metadata.storage_data.items():
            index = self._record(key, MetadataIndex)
            at = None if index.offset is None else self._size(index.offset, "an index")
            places[index.fqn, at] = info
        paths = metadata.planner_data or {}
        entries = []
        for key, content in metadata.state_dict_metadata.items():
            name = self._name(key)
            path = self._path(name, paths.get(name, (name,)))
            entries.append(self._entry(name, path, content, places))
        return tuple(entries)

    def _entry(
        self, name: str, path: Path, raw: object, places: dict[tuple[str, object], object]
    ) -> MetadataEntry:
        if isinstance(raw, PickledObject) and raw.kind.name == "BytesStorageMetadata":
            part = self._part(name, None, places.get((name, None)))
            return MetadataEntry(name=name, path=path, parts=(part,))
        tensor = self._record(raw, TensorStorageMetadata)
        shape = self._size(tensor.size, f"the shape of {name[:100]!r}")
        boxes = [box for box in (self._box(name, chunk) for chunk in tensor.chunks) if box.volume]
        self._check_boxes(name, shape, boxes)
        parts = tuple(self._part(name, box, places.get((name, box.start))) for box in boxes)
        dtype = self._dtype(name, tensor.properties)
        return MetadataEntry(name=name, path=path, parts=parts, dtype=dtype, shape=shape)

    def _check_boxes(self, name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
        title = f"{name[:100]!r} of shape {list(shape)}"
        for box in boxes:
            if len(box.start) != len(shape) or whole(shape).meet(box) != box:
                raise self._corrupt(f"{title} with a chunk outside of it, [{box.text}]")
        if self.in_parts or covers_once(shape, boxes):
            return
        shown = listed(f"[{box.text}]" for box in boxes)
        raise self._corrupt(f"{title} with chunks that do not cover it once: {shown or 'none'}")

    def _part(self, name: str, box: Box | None, raw: object) -> StoredPart:
        if raw is None:
            raise self._corrupt(f"nothing that says where {name[:100]!r} is stored")
        info = self._record(raw, _StorageInfo)
        file = info.relative_path
        if file in ("", ".", "..") or set(file) & set("/\\\0"):
            raise self._corrupt(f"no name of a file for {name[:100]!r}: {file[:100]!r}")
        if info.transform_descriptors:
            raise UsageError(
                "cannot import",
                where=self.where,
                found=f"{name[:100]!r} behind stream transforms: "
                + ", ".join(text[:50] for text in info.transform_descriptors[:4]),
                remedy="load the folder with torch.distributed.checkpoint, and save it without "
                "transforms",
            )
        return StoredPart(name=name, file=file, offset=info.offset, size_bytes=info.length, box=box)

    def _dtype(self, name: str, raw: object) -> str:
        state = raw.state if isinstance(raw, PickledObject) else None
        if not isinstance(state, tuple) or len(state) < 2:
            raise self._corrupt(f"no dtype of {name[:100]!r}")
        dtype, layout = state[:2]
        if not isinstance(dtype, Global) or dtype.module != "torch" or dtype.name not in DTYPES:
            raise self._corrupt(f"no dtype of {name[:100]!r}")
        if not isinstance(layout, PickledObject) or layout.args != ("torch.strided",):
            raise UsageError(
                "cannot import",
                where=self.where,
                found=f"{name[:100]!r}, which is a sparse tensor",
                remedy=REMEDY,
            )
        return dtype.name

    def _box(self, name: str, raw: object) -> Box:
        title, chunk = f"a chunk of {name[:100]!r}", self._record(raw, ChunkStorageMetadata)
        start, shape = self._size(chunk.offsets, title), self._size(chunk.sizes, title)
        if len(start) != len(shape):
            raise self._corrupt(f"{title} with {len(start)} offsets and {len(shape)} sizes")
        return whole(shape).moved(start)

    def _size(self, raw: object, title: str) -> tuple[int, ...]:
        """Return the sizes of a pickled torch.Size."""
        sizes = raw.args[0] if isinstance(raw, PickledObject) and len(raw.args) == 1 else None
        try:
            found = msgspec.convert(sizes, tuple[_Count, ...])
        except msgspec.ValidationError as error:
            raise self._corrupt(f"{title} that is not a torch.Size: {error}") from None
        if len(found) > _MAX_DIMS:
            raise self._corrupt(f"{title} that is a torch.Size of {len(found)} dimensions")
        return found

    def _path(self, name: str, raw: object) -> Path:
        if not isinstance(raw, tuple) or not raw or not isinstance(raw[0], str):
            raise self._corrupt(f"no path for {name[:100]!r}")
        if len(raw) > MAX_DEPTH:
            raise self._corrupt(f"{name[:100]!r} below {len(raw)} levels, of {MAX_DEPTH} at most")
        for part in raw:
            if type(part) is not int:
                self._name(part)
        return raw

    def _record(self, raw: object, kind: type[_T]) -> _T:
        """Return the attributes of an object whose class has the name of `kind`."""
        if not isinstance(raw, PickledObject) or raw.kind.name != kind.__name__:
            other = raw.kind.name if isinstance(raw, PickledObject) else type(raw).__name__
            raise self._corrupt(f"a {other} where a {kind.__name__} belongs")
        try:
            return msgspec.convert(raw.state, kind)
        except msgspec.ValidationError as error:
            raise self._corrupt(f"a malformed {kind.__name__}: {error}") from None

    def _name(self, name: object) -> str:
        if not isinstance(name, str):
            raise self._corrupt(f"{with_article(type(name))} as a name")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise self._corrupt(f"the name {name[:100]!a}, which is not text") from None
        return name

    def _corrupt(self, found: str) -> CorruptError:
        return CorruptError("cannot import", where=self.where, found=found)
