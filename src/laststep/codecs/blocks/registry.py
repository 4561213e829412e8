"""The one place where codecs of blocks are found, by the names that files call them.

Those that laststep brings are imported when they are first asked for. Packages that bring others
say so by an entry point, `laststep.codecs`, under the codec's name: every process finds these. What
is registered is known in the process that did it.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING

from laststep.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from laststep.codecs.blocks.codec import BlockCodec

__all__ = ["codec_named", "register"]

OURS = ("patches", "planes", "raw", "subtract")
_RESERVED = ("rounded",)
"""What files call blocks that no codec decodes (`format.deriving`)."""
_EXTRAS = {"zstandard": "'laststep[compress]'"}
"""The extra of laststep that brings a module."""
_GROUP = "laststep.codecs"
_registered: dict[str, BlockCodec] = {}


def register(codec: BlockCodec) -> None:
    """Make a codec known in this process. `UsageError` where another one has its name: two that
    call themselves the same would decode each other's blocks."""
    if re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", codec.name) is None:
        raise UsageError(
            "cannot register a codec under this name",
            found=repr(codec.name),
            expected="up to 32 lower-case letters, digits and dashes",
        )
    # One act for "is it free" and "take it": two threads cannot both find it free.
    holder = (
        None if codec.name in (*OURS, *_RESERVED) else _registered.setdefault(codec.name, codec)
    )
    if holder is not codec:
        taken_by = "a codec of laststep" if holder is None else repr(holder)
        raise UsageError(
            "cannot register a codec under this name",
            expected="a name that is free",
            found=f"{codec.name!r} is taken by {taken_by}",
            remedy="give it a name of its own",
        )


def is_known_everywhere(name: str) -> bool:
    """Whether other processes find the codec as well."""
    return name in OURS or bool(entry_points(name))


def codec_named(name: str) -> BlockCodec:
    """The codec of that name; `UsageError`, naming what is missing, where it cannot be had."""
    codec = _ours(name) if name in OURS else _registered.get(name) or _installed(name)
    if codec is None:
        raise UsageError(
            f"no codec is registered under the name {name!r}",
            expected=f"one of {', '.join(sorted({*OURS, *_registered}))}",
            found=repr(name),
            remedy="install or register the codec that wrote this, or upgrade laststep",
        )
    if codec.needs is not None:
        try:
            importlib.import_module(codec.needs)
        except ImportError as error:
            raise UsageError(
                f"the codec {name!r} needs the module {codec.needs}, which cannot be imported",
                found=str(error),
                remedy=f"pip install {_EXTRAS.get(codec.needs, codec.needs)}",
            ) from error
    return codec


def entry_points(name: str) -> list[EntryPoint]:
    """What packages that are installed bring under that name."""
    from importlib import metadata  # takes long, and hardly anybody needs it

    return list(metadata.entry_points(group=_GROUP, name=name))


def _installed(name: str) -> BlockCodec | None:
    for point in entry_points(name):
        codec: BlockCodec = point.load()
        if codec.name != name:
            raise UsageError(
                "a package brings a codec under another name than its own",
                where=point.value,
                expected=repr(name),
                found=repr(codec.name),
                remedy=f"the entry point in {_GROUP!r} has to be named as the codec is",
            )
        register(codec)
        return codec
    return None


def _ours(name: str) -> BlockCodec:
    module = importlib.import_module(f"laststep.codecs.blocks.{name}")
    codec: BlockCodec = module.CODEC
    return codec
