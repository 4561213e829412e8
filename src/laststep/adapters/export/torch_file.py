"""Write items as one file that `torch.load` reads, with its default `weights_only=True`.

Optimizers are in the form that `load_state_dict` takes, tied tensors are one tensor, and NumPy
arrays become tensors, which `torch.load` would refuse otherwise. The items are read into memory as
a whole.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import torch

from laststep.adapters.export.folder import Exported, ItemTensors, new_file, published
from laststep.constants import with_article
from laststep.errors import UsageError
from laststep.state.optimizers import torch_form
from laststep.state.tensors import revive
from laststep.state.tree import OWNED, rebuild

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from laststep.browse import Checkpoint
    from laststep.codecs.objects import Tagged


def export_torch(
    checkpoint: Checkpoint, target: str | os.PathLike[str], *, items: Sequence[str], alone: bool
) -> Exported:
    """Write a new file: a dict of all items by name; or with `alone`, the state of the only one."""
    states = {item: state_of(checkpoint, item) for item in items}
    path = Path(target)
    with published(path) as staging:
        save_file(states[items[0]] if alone else states, staging)
        size_bytes = staging.stat().st_size
    names = [name for item in items for name in checkpoint.content().item(item).names]
    return Exported(files={path.name: size_bytes}, tensors=len(names))


def state_of(checkpoint: Checkpoint, item: str) -> object:
    """Return the state of an item in types that `torch.load` reads by default."""
    tensors = ItemTensors(checkpoint, item)
    known: dict[str, torch.Tensor] = {}

    def tensor(name: str) -> torch.Tensor:
        source = tensors.source_of(name)
        if source not in known:
            known[source] = tensors.whole(name)
        return known[source]

    where = f"{checkpoint.folder}, item {item}"
    state = rebuild(tensors.tree, leaf=tensor, revive=functools.partial(_revive, where=where))
    return _plain(state, where)


def save_file(state: object, path: Path) -> None:
    """Write a new durable file by `torch.save`, which itself hides errors such as a full disk."""
    with new_file(path) as file:
        noticing = _NoticingErrors(file)
        try:
            torch.save(state, cast("Any", noticing))
        except RuntimeError:
            if noticing.error is None:
                raise
        if noticing.error is not None:
            raise noticing.error


class _NoticingErrors:
    """A file that remembers the first error of a write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None
        self.flush = file.flush

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise


def _revive(tagged: Tagged, *, where: str) -> object:
    if tagged.tag == "pickle":
        raise UsageError(
            "cannot export a pickled object, which can run any code when loaded",
            where=where,
            remedy="export the items without it, each with --item",
        )
    made = revive(tagged, where=where, allow_pickle=False)
    return torch_form(made) if tagged.tag == OWNED else made


def _plain(value: Any, where: str) -> Any:
    """Return a value in types that `torch.load` reads by default."""
    of = functools.partial(_plain, where=where)
    match value:
        case np.ndarray():
            native = value.astype(value.dtype.newbyteorder("="), order="C")
            try:
                return torch.from_numpy(native)
            except TypeError:  # torch has no such dtype
                raise _unreadable(value, where) from None
        case np.generic() if not isinstance(value.item(), np.generic):
            return of(value.item())
        case dict():
            made = {of(key): of(inner) for key, inner in value.items()}
            return OrderedDict(made) if isinstance(value, OrderedDict) else made
        case list() | deque():
            return [of(inner) for inner in value]
        case tuple() if not isinstance(value, torch.Size):
            return tuple(of(inner) for inner in value)
        case set() | frozenset():
            return set(map(of, value))
        case slice() | range() | np.generic():
            raise _unreadable(value, where)
    if type(value).__module__ in ("datetime", "decimal", "fractions", "pathlib"):
        raise _unreadable(value, where)
    return value


def _unreadable(value: object, where: str) -> UsageError:
    return UsageError(
        "cannot export a value that torch.load refuses",
        where=where,
        found=with_article(type(value)),
        remedy="export the items without it, each with --item",
    )
