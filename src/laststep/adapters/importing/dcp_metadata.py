"""Decode the `.metadata` of torch.distributed.checkpoint (DCP): entries and their locations.

Pure; knows nothing of files or torch. The pickle is read without calling anything in it, and every
part that is used is checked here: types, ranges, and that the chunks of a tensor cover it exactly
once. Damage is a `CorruptError`; metadata that is intact but not supported is a `UsageError`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from laststep.adapters.importing import inert_pickle
from laststep.adapters.importing.inert_pickle import Global, PickledObject
from laststep.constants import DTYPES, listed
from laststep.errors import CorruptError, UsageError
from laststep.state.boxes import Box, covers_once, whole
from laststep.state.tree import MAX_DEPTH

if TYPE_CHECKING:
    from laststep.adapters.nesting import Path

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # up to torch 2.2
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")

ADMITTED = frozenset(
    {
        *(
            (_METADATA, name)
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "MetadataIndex",
                "ChunkStorageMetadata",
                "TensorProperties",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (_FILESYSTEM, "_StorageInfo"),
        (_FILESYSTEM, "_StoragePrefix"),
        (_SHARDED, "TensorProperties"),
        (_SHARDED, "MEM_FORMAT_ENCODING"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name in DTYPES),
        *(("pathlib", name) for name in _PATHS),
        *(("pathlib._local", name) for name in _PATHS),  # Python 3.13
        ("collections", "OrderedDict"),
        ("builtins", "getattr"),  # members of enums in some versions of Python; never called
    }
)
"""All classes and functions that may occur in the metadata, by module and name."""

REMEDY = (
    "load the folder yourself if you trust it, with "
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save, and save its parts"
)

_MAX_DIMS = 64
_MAX_OFFSET = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """Bytes of one file of the folder: a box of a tensor, or a value if `box` is None."""

    name: str
    file: str
    offset: int
    size_bytes: int
    box: Box | None

    def __str__(self) -> str:
        return repr(self.name[:100])


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataEntry:
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
        fields = self._fields(raw, "Metadata")
        flat = self._dict(fields.get("state_dict_metadata"), "state_dict_metadata")
        paths = self._dict(fields.get("planner_data") or {}, "planner_data")
        stored = self._dict(fields.get("storage_data"), "storage_data")
        places = {self._index(index): info for index, info in stored.items()}
        entries = []
        for key, content in flat.items():
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
        fields = self._fields(raw, "TensorStorageMetadata")
        shape = self._size(fields.get("size"), f"the shape of {name[:100]!r}")
        dtype = self._dtype(name, fields.get("properties"))
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise self._corrupt(f"{name[:100]!r} without chunks")
        boxes = [box for box in (self._box(name, chunk) for chunk in chunks) if box.volume]
        self._check_boxes(name, shape, boxes)
        parts = tuple(self._part(name, box, places.get((name, box.start))) for box in boxes)
        return MetadataEntry(name=name, path=path, parts=parts, dtype=dtype, shape=shape)

    def _check_boxes(self, name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
        title = f"{name[:100]!r} of shape {list(shape)}"
        for box in boxes:
            if len(box.start) != len(shape) or whole(shape).meet(box) != box:
                raise self._corrupt(f"{title} with a chunk outside of it, [{box.text}]")
        # Put the dimension with the most cuts first: there, few boxes share a start.
        cuts = [len({box.start[dim] for box in boxes}) for dim in range(len(shape))]
        order = sorted(range(len(shape)), key=lambda dim: -cuts[dim])
        turned = [Box(_picked(box.start, order), _picked(box.stop, order)) for box in boxes]
        if self.in_parts or covers_once(_picked(shape, order), turned):
            return
        held = sum(box.volume for box in boxes)
        missing = math.prod(shape) - held
        problem = f"{missing} elements in no chunk" if missing > 0 else "chunks that overlap"
        shown = listed(f"[{box.text}]" for box in boxes)
        raise self._corrupt(f"{title} with {problem}: there are {shown or 'none'}")

    def _part(self, name: str, box: Box | None, raw: object) -> StoredPart:
        title = f"where {name[:100]!r} is stored"
        if raw is None:
            raise self._corrupt(f"nothing that says {title}")
        fields = self._fields(raw, "_StorageInfo")
        file, offset, size = (fields.get(key) for key in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\\0"):
            raise self._corrupt(f"no name of a file for {title}: {str(file)[:100]!r}")
        if not _is_count(offset) or not _is_count(size):
            raise self._corrupt(f"no offset and length for {title}")
        transforms = fields.get("transform_descriptors")
        if transforms:
            names = transforms if isinstance(transforms, list) else ["unknown"]
            raise UsageError(
                "cannot import",
                where=self.where,
                found=f"{name[:100]!r} behind stream transforms: "
                + ", ".join(text[:50] for text in names[:4] if isinstance(text, str)),
                remedy="load the folder with torch.distributed.checkpoint, and save it without "
                "transforms",
            )
        return StoredPart(name=name, file=file, offset=offset, size_bytes=size, box=box)

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

    def _index(self, raw: object) -> tuple[str, object]:
        fields = self._fields(raw, "MetadataIndex")
        name, offset = fields.get("fqn"), fields.get("offset")
        if not isinstance(name, str):
            raise self._corrupt("an index without a name")
        return name, None if offset is None else self._size(offset, "an index")

    def _box(self, name: str, raw: object) -> Box:
        title = f"a chunk of {name[:100]!r}"
        fields = self._fields(raw, "ChunkStorageMetadata")
        start = self._size(fields.get("offsets"), title)
        shape = self._size(fields.get("sizes"), title)
        if len(start) != len(shape):
            raise self._corrupt(f"{title} with {len(start)} offsets and {len(shape)} sizes")
        return Box(start, tuple(a + b for a, b in zip(start, shape, strict=True)))

    def _size(self, raw: object, title: str) -> tuple[int, ...]:
        """Return the sizes of a pickled torch.Size."""
        sizes = raw.args[0] if isinstance(raw, PickledObject) and len(raw.args) == 1 else None
        if (
            not isinstance(sizes, tuple)
            or len(sizes) > _MAX_DIMS
            or not all(_is_count(size) for size in sizes)
        ):
            raise self._corrupt(f"{title} that is not a torch.Size")
        return sizes

    def _path(self, name: str, raw: object) -> Path:
        if not isinstance(raw, tuple) or not raw or not isinstance(raw[0], str):
            raise self._corrupt(f"no path for {name[:100]!r}")
        if len(raw) > MAX_DEPTH:
            raise self._corrupt(f"{name[:100]!r} below {len(raw)} levels, of {MAX_DEPTH} at most")
        for part in raw:
            if type(part) is str:
                self._name(part)
            elif type(part) is not int:
                raise self._corrupt(f"a {type(part).__name__} in the path of {name[:100]!r}")
        return raw

    def _fields(self, raw: object, kind: str) -> dict[object, object]:
        """Return the attributes of an object whose class has this name; raise CorruptError for
        others."""
        if not isinstance(raw, PickledObject) or raw.kind.name != kind or not raw.state:
            other = raw.kind.name if isinstance(raw, PickledObject) else type(raw).__name__
            raise self._corrupt(f"a {other} where a {kind} belongs")
        return self._dict(raw.state, kind)

    def _dict(self, raw: object, title: str) -> dict[object, object]:
        if not isinstance(raw, dict):
            raise self._corrupt(f"no {title}")
        return raw

    def _name(self, name: object) -> str:
        if not isinstance(name, str):
            raise self._corrupt(f"a {type(name).__name__} as a name")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise self._corrupt(f"the name {name[:100]!a}, which is not text") from None
        return name

    def _corrupt(self, found: str) -> CorruptError:
        return CorruptError("cannot import", where=self.where, found=found)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MAX_OFFSET


def _picked(index: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    return tuple(index[dim] for dim in order)
