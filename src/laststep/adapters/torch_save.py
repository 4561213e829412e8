"""Read what `torch.save` wrote: tensors and plain values, on the CPU, never code."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from laststep.errors import Corrupt, LaststepError, Usage

if TYPE_CHECKING:
    from typing import BinaryIO

ZIP = b"PK\x03\x04"
_REFUSED = re.compile(r"([\w.]+) was not an allowed global")


def load(source: Path | BinaryIO, *, where: str, remedy: str) -> object:
    """What a file, or a part of one, holds; `remedy` is for one that holds code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that torch.save did not write
            return torch.load(source, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # junk makes torch raise anything, even a KeyError
        told = f"{error} {error.__cause__ or ''}"
        raise _unreadable(told, source, where, remedy) from error


def _unreadable(told: str, source: Path | BinaryIO, where: str, remedy: str) -> LaststepError:
    """What torch's refusal means, without its advice to run the code in the file."""
    refused = _REFUSED.search(told)
    if refused is not None:
        return Usage(
            "cannot import",
            where=where,
            expected="tensors and plain values",
            found=f"{refused[1]}, which is code and not allowed",
            remedy=remedy,
        )
    if "TorchScript" in told:
        return Usage(
            "cannot import",
            where=where,
            found="a TorchScript archive",
            remedy="load it with torch.jit.load, and save its state_dict()",
        )
    return Corrupt(
        "cannot import: not a torch.save file nor safetensors",
        where=where,
        found="a zip archive that is damaged, cut off or not torch's" if _is_zip(source) else None,
    )


def _is_zip(source: Path | BinaryIO) -> bool:
    if isinstance(source, Path):
        with source.open("rb") as file:
            return file.read(4) == ZIP
    source.seek(0)
    return source.read(4) == ZIP
