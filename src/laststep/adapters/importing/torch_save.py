"""Read what `torch.save` wrote: tensors and plain values, on the CPU, never code."""

from __future__ import annotations

import contextlib
import pickletools
import re
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch

from laststep.errors import CorruptError, LaststepError, UsageError

if TYPE_CHECKING:
    from typing import BinaryIO

ZIP = b"PK\x03\x04"
_REFUSED = re.compile(r"([\w.]+) was not an allowed global")


def load(source: Path | BinaryIO, *, where: str, remedy: str) -> object:
    """What a file, or a part of one, holds; `remedy` is for one that holds code."""
    try:
        return load_plain(source)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # junk makes torch raise anything, even a KeyError
        raise _unreadable(error, source, where, remedy) from error


def load_plain(source: Path | BinaryIO) -> object:
    """Tensors and plain values, on the CPU; raises anything."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickles that torch.save did not write
        return torch.load(source, map_location="cpu", weights_only=True)


def refused_by(error: Exception) -> str | None:
    """The class or function that torch did not want to load."""
    refused = _REFUSED.search(f"{error} {error.__cause__ or ''}")
    return None if refused is None else refused[1]


def _unreadable(
    error: Exception, source: Path | BinaryIO, where: str, remedy: str
) -> LaststepError:
    """The error for torch's refusal, without torch's advice to run the code in the file."""
    refused, reason = refused_by(error), f"{error} {error.__cause__ or ''}"
    if refused is not None:
        return UsageError(
            "cannot import",
            where=where,
            expected="tensors and plain values",
            found=f"{refused}, which is code and not allowed",
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
            found="a sound file of torch.save with what only its own code can read: "
            + reason.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0][:200],
            remedy=remedy,
        )
    return CorruptError(
        "cannot import: not a torch.save file nor safetensors",
        where=where,
        found="a zip archive that is damaged, cut off or not torch's" if _is_zip(source) else None,
    )


def _is_sound(source: Path | BinaryIO) -> bool:
    """Whether a file is what torch.save wrote, as far as that can be seen without reading it as
    torch does: its archive is whole, and its pickles have an end."""
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
"""Before there were archives: a number, a version, the system, what was saved, and storages."""


def _ends(file: IO[bytes]) -> bool:
    """Whether there is a pickle up to its end; nothing in it is run."""
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
