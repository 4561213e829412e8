"""Read files of tensors: torch.save files and safetensors.

Of a torch.save file tensors and plain values are loaded, on the CPU, never code. Safetensors are
read from a whole file or the part of a file from an offset to its end, and checked as strictly as
our own files. Knows nothing of the purpose of the tensors.
"""

from __future__ import annotations

import contextlib
import pickletools
import re
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from laststep.errors import CorruptError, LaststepError, UsageError
from laststep.format.layout import TensorEntry, decode_plain, region_bytes_of
from laststep.state.tensors import from_bytes

if TYPE_CHECKING:
    from typing import BinaryIO

ZIP = b"PK\x03\x04"
_REFUSED = re.compile(r"([\w.]+) was not an allowed global")


def load(source: Path | BinaryIO, *, where: str, remedy: str) -> object:
    """Return the content of a file or stream. Raise UsageError, with `remedy`, if it contains code,
    and CorruptError if it is damaged."""
    try:
        return load_plain(source)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # invalid data makes torch raise anything, even KeyError
        raise _unreadable(error, source, where, remedy) from error


def load_plain(source: Path | BinaryIO) -> object:
    """Return tensors and plain values, on the CPU; may raise any exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickles that torch.save did not write
        return torch.load(source, map_location="cpu", weights_only=True)


def refused_by(error: Exception) -> str | None:
    """Return the class or function that torch refused to load, or None."""
    refused = _REFUSED.search(f"{error} {error.__cause__ or ''}")
    return None if refused is None else refused[1]


def _unreadable(
    error: Exception, source: Path | BinaryIO, where: str, remedy: str
) -> LaststepError:
    """Return the error for torch's refusal, without torch's advice to run the code in the file."""
    refused, reason = refused_by(error), f"{error} {error.__cause__ or ''}"
    if refused is not None:
        return UsageError(
            "cannot import",
            where=where,
            expected="tensors and plain values",
            found=f"{refused}, which is code and is not allowed",
            remedy=remedy,
        )
    if "TorchScript" in reason:
        return UsageError(
            "cannot import",
            where=where,
            found="a TorchScript archive",
            remedy="load it with torch.jit.load, and save its state_dict()",
        )
    if _is_sound(source):
        return UsageError(
            "cannot import",
            where=where,
            expected="tensors and plain values, pickled with protocol 2",
            found="an intact torch.save file with objects that only their own code can read: "
            + reason.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0][:200],
            remedy=remedy,
        )
    return CorruptError(
        "cannot import: not a torch.save file nor safetensors",
        where=where,
        found="a zip archive that is damaged, truncated or not from torch"
        if _is_zip(source)
        else None,
    )


def _is_sound(source: Path | BinaryIO) -> bool:
    """Return True if a file looks like intact output of torch.save: its archive is complete and its
    pickles have an end. Nothing is unpickled."""
    with source.open("rb") if isinstance(source, Path) else contextlib.nullcontext(source) as file:
        try:
            if not _is_zip(source):
                file.seek(0)
                return all(_ends(file) for _ in range(_OLD_PICKLES))
            with zipfile.ZipFile(file) as archive:
                pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                return archive.testzip() is None and all(map(_ends, map(archive.open, pickles)))
        except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError):
            return False


_OLD_PICKLES = 5
"""The number of pickles in a file from before archives: a magic number, a version, system
information, the saved object, and storage keys."""


def _ends(file: IO[bytes]) -> bool:
    """Return True if there is a pickle with an end; nothing in it is run."""
    try:
        return any(opcode.name == "STOP" for opcode, _, _ in pickletools.genops(file))
    except (ValueError, IndexError, UnicodeDecodeError):
        return False


def _is_zip(source: Path | BinaryIO) -> bool:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return file.read(4) == ZIP
    source.seek(0)
    return source.read(4) == ZIP


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIndex:
    """The tensors of one header by name, in the order of their bytes, and the offset of their
    data."""

    entries: dict[str, TensorEntry]
    data_at: int


def open_part(file: BinaryIO, *, start: int, stop: int, where: str) -> TensorIndex:
    """Decode the header at `start`. Its data must end at `stop`, the end of the file."""
    size_bytes = stop - start
    file.seek(start)
    prefix = file.read(8)
    header_bytes = region_bytes_of(prefix, size_bytes=size_bytes, where=where)
    region = prefix + file.read(header_bytes - len(prefix))
    entries = decode_plain(region, data_bytes=size_bytes - header_bytes, where=where)
    by_name = {entry.name: entry for entry in entries}
    return TensorIndex(entries=by_name, data_at=start + header_bytes)


def read_tensor(file: BinaryIO, part: TensorIndex, name: str, *, where: str) -> torch.Tensor:
    """Read one tensor of a part."""
    entry = part.entries[name]
    data = bytearray(entry.stop - entry.start)
    file.seek(part.data_at + entry.start)
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise CorruptError("cannot import", where=where, found="a file that became shorter")
    return from_bytes(data, entry.dtype, entry.shape)
