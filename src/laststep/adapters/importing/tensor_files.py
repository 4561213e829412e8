"""Read files of tensors: torch.save files and safetensors.

Of a torch.save file tensors and plain values are loaded, on the CPU, never code. Safetensors are
checked as strictly as our own files. Knows nothing of the purpose of the tensors.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

import torch

from laststep.errors import CorruptError, UsageError
from laststep.format.layout import decode_plain, region_bytes_of
from laststep.state.tensors import from_bytes

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

_REFUSED = re.compile(r"([\w.]+) was not an allowed global")


def read_file(path: Path) -> object:
    with path.open("rb") as file:
        head = file.read(9)
        # Safetensors begin with the length of a header and its JSON, as no torch file does.
        if path.suffix == ".safetensors" or head[8:] == b"{":
            return _read_safetensors(file, path.stat().st_size, where=str(path))
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
        refused = refused_by(error)
        if refused is not None:  # without torch's advice to run the code in the file
            raise UsageError(
                "cannot import",
                where=where,
                expected="tensors and plain values",
                found=f"{refused}, which is code and is not allowed",
                remedy=remedy,
            ) from error
        raise CorruptError(
            "cannot import",
            where=where,
            expected="what torch.save writes of tensors and plain values, with pickle's protocol 2,"
            " or safetensors",
            found="something else, or a file that is cut or damaged",
            remedy=remedy,
        ) from error


def load_plain(file: BinaryIO) -> object:
    """Return tensors and plain values, on the CPU; may raise any exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about pickles that torch.save did not write
        return torch.load(file, map_location="cpu", weights_only=True)


def refused_by(error: Exception) -> str | None:
    """Return the class or function that torch refused to load, or None."""
    refused = _REFUSED.search(f"{error} {error.__cause__ or ''}")
    return None if refused is None else refused[1]


def _read_safetensors(file: BinaryIO, size_bytes: int, *, where: str) -> dict[str, torch.Tensor]:
    file.seek(0)
    prefix = file.read(8)
    header_bytes = region_bytes_of(prefix, size_bytes=size_bytes, where=where)
    region = prefix + file.read(header_bytes - len(prefix))
    tensors: dict[str, torch.Tensor] = {}
    for entry in decode_plain(region, data_bytes=size_bytes - header_bytes, where=where):
        file.seek(header_bytes + entry.start)
        data = bytearray(entry.stop - entry.start)
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise CorruptError("cannot import", where=where, found="a file that became shorter")
        tensors[entry.name] = from_bytes(data, entry.dtype, entry.shape)
    return tensors
