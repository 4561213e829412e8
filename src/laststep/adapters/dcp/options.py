"""The arguments of torch's own FileSystemWriter that mean nothing to a run, and what is done with
them: a change of the class is all that a user has to write."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypedDict

from torch.distributed.checkpoint.filesystem import SerializationFormat

from laststep.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.checkpoint._extension import StreamTransformExtension

_log = logging.getLogger(__name__)


class StockOptions(TypedDict, total=False):
    """What `Writer` takes beside its own arguments."""

    single_file_per_rank: bool
    sync_files: bool
    per_thread_copy_ahead: int
    cache_staged_state_dict: bool
    serialization_format: SerializationFormat
    _extensions: Sequence[StreamTransformExtension] | None


_SAME: dict[str, object] = {
    "single_file_per_rank": True,
    "sync_files": True,
    "cache_staged_state_dict": False,
    "serialization_format": SerializationFormat.SAFETENSORS,
}
_INSTEAD = {
    "single_file_per_rank": "a rank writes a file for each item, of small ones one for all",
    "sync_files": "what is committed is always on the disk",
    "per_thread_copy_ahead": "tensors are copied through a few buffers of 16 MiB",
    "cache_staged_state_dict": "pass dcp.async_save(async_stager=DefaultStager(…)), and keep it",
    "serialization_format": "all files are safetensors",
}
_told: set[str] = set()


def accept(options: Mapping[str, object]) -> None:
    """Say once in the log which of them have no effect; `UsageError` for those that cannot be
    ignored, as they might encrypt."""
    for name, value in options.items():
        if name == "_extensions":
            if value:
                raise UsageError(
                    "a run takes no stream extensions",
                    found=repr(value)[:200],
                    remedy="leave _extensions out, or keep torch's FileSystemWriter",
                )
        elif name not in _INSTEAD:
            raise TypeError(f"Writer() got an unexpected keyword argument {name!r}")
        elif (name not in _SAME or value != _SAME[name]) and name not in _told:
            _told.add(name)
            _log.warning("%s=%r has no effect on a run: %s", name, value, _INSTEAD[name])


def checked_threads(count: object) -> int:
    if type(count) is not int or count < 1:
        raise UsageError(
            "thread_count is a number of threads", expected="at least 1", found=repr(count)
        )
    return count
