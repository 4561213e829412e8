"""Read files of tensors: torch.save files and safetensors.

Of a torch.save file tensors and plain values are loaded, on the CPU, never code. Safetensors are
read from a whole file or the part of a file from an offset to its end, and checked as strictly as
our own files. Knows nothing of the purpose of the tensors.
"""

from __future__ import annotations

import pickletools
import re
import warnings
import zipfile
import zlib
from typing import IO, TYPE_CHECKING

import torch

from laststep.errors import CorruptError, LaststepError, UsageError
from laststep.format.layout import decode_plain, region_bytes_of
from laststep.state.tensors import from_bytes

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

ZIP = b"PK\x03\x04"
_REFUSED = re.compile(r"([\w.]+) was not an allowed global")


def read_file(path: Path) -> object:
    """Return the content of a safetensors file or a torch.save file."""
    with path.open("rb") as file:
        head = file.read(9)
        if not head:
            raise CorruptError("cannot import", where=str(path), found="an empty file")
        # Safetensors begin with the length of a header and its JSON, as no torch file does.
        if path.suffix == ".safetensors" or head[8:] == b"{":
            tensors = Safetensors(file, 0, path.stat().st_size, where=str(path))
            return {name: tensors.read(name) for name in tensors.entries}
        remedy = "load the file yourself if you trust it, and save its state_dict()"
        return load(file, where=str(path), remedy=remedy)


def load(file: BinaryIO, *, where: str, remedy: str) -> object:
    """Return the content of a torch.save file. Raise UsageError, with `remedy`, for code in it."""
    file.seek(0)
    try:
        return load_plain(file)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # invalid data makes torch raise anything, even KeyError
        raise _unreadable(error, file, where, remedy) from error


def load_plain(file: BinaryIO) -> object:
    """Return tensors and plain values, on the CPU; may raise any exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickles that torch.save did not write
        return torch.load(file, map_location="cpu", weights_only=True)


def refused_by(error: Exception) -> str | None:
    """Return the class or function that torch refused to load, or None."""
    refused = _REFUSED.search(f"{error} {error.__cause__ or ''}")
    return None if refused is None else refused[1]


def _unreadable(error: Exception, file: BinaryIO, where: str, remedy: str) -> LaststepError:
    """Return the error for torch's refusal, without torch's advice to run the code in the file."""
    file.seek(0)
    refused, is_zip = refused_by(error), file.read(len(ZIP)) == ZIP
    if refused is not None or _is_sound(file, is_zip=is_zip):
        found = "an intact torch.save file with objects that only their own code can read"
        return UsageError(
            "cannot import",
            where=where,
            expected="tensors and plain values, pickled with protocol 2",
            found=f"{refused}, which is code and is not allowed" if refused else found,
            remedy=remedy,
        )
    return CorruptError(
        "cannot import: not a torch.save file nor safetensors",
        where=where,
        found="a zip archive that is damaged, truncated or not from torch" if is_zip else None,
    )


def _is_sound(file: BinaryIO, *, is_zip: bool) -> bool:
    """Return True if a file's archive is complete and its pickles end. Nothing is unpickled."""
    try:
        if is_zip:
            with zipfile.ZipFile(file) as archive:
                pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                return archive.testzip() is None and all(map(_ends, map(archive.open, pickles)))
        file.seek(0)
        # Before archives: a magic number, a version, system information, object, storage keys.
        return all(_ends(file) for _ in range(5))
    except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError):
        return False


def _ends(file: IO[bytes]) -> bool:
    """Return True if there is a pickle with an end; nothing in it is run."""
    try:
        return any(opcode.name == "STOP" for opcode, _, _ in pickletools.genops(file))
    except (ValueError, IndexError, UnicodeDecodeError):
        return False


class Safetensors:
    """The safetensors in a file, from the header at `start` to the end of the file at `stop`."""

    def __init__(self, file: BinaryIO, start: int, stop: int, *, where: str) -> None:
        size_bytes = stop - start
        file.seek(start)
        prefix = file.read(8)
        header_bytes = region_bytes_of(prefix, size_bytes=size_bytes, where=where)
        region = prefix + file.read(header_bytes - len(prefix))
        entries = decode_plain(region, data_bytes=size_bytes - header_bytes, where=where)
        self.entries = {entry.name: entry for entry in entries}
        """By name, in the order of their bytes."""
        self._file = file
        self._data_at = start + header_bytes
        self._where = where

    def read(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        data = bytearray(entry.stop - entry.start)
        self._file.seek(self._data_at + entry.start)
        if self._file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise CorruptError(
                "cannot import", where=self._where, found="a file that became shorter"
            )
        return from_bytes(data, entry.dtype, entry.shape)
