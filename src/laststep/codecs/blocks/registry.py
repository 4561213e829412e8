"""The registry of block codecs, by the names that files use.

Built-in codecs are imported at their first use. Other packages provide codecs through an entry
point in the group `laststep.codecs`, named like the codec: every process finds these. A codec
passed to `register` is known only in the process that registered it.
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

OURS = {"patches": "planes", "planes": "planes", "raw": "codec", "subtract": "planes"}
"""Our own codecs, each with its module."""
_EXTRAS = {"zstandard": "'laststep[compress]'"}
"""Module → the extra of laststep that installs it."""
_GROUP = "laststep.codecs"
_registered: dict[str, BlockCodec] = {}


def register(codec: BlockCodec) -> None:
    """Register a codec in this process. Raise `UsageError` if another codec has its name, because
    one would then decode the other's blocks."""
    if re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", codec.name) is None:
        raise UsageError(
            "cannot register a codec under this name",
            found=repr(codec.name),
            expected="up to 32 lower-case letters, digits and dashes",
        )
    # setdefault is atomic: two threads cannot both find the name unused.
    holder = None if codec.name in OURS else _registered.setdefault(codec.name, codec)
    if holder is not codec:
        taken_by = "a codec of laststep" if holder is None else repr(holder)
        raise UsageError(
            "cannot register a codec under this name",
            expected="an unused name",
            found=f"{codec.name!r} is taken by {taken_by}",
            remedy="give it a name of its own",
        )


def is_known_everywhere(name: str) -> bool:
    """Return True if other processes find the codec as well."""
    return name in OURS or bool(entry_points(name))


def codec_named(name: str) -> BlockCodec:
    """Return the codec with this name. Raise `UsageError` if it, or a module that it requires, is
    missing."""
    if name in OURS:
        module = importlib.import_module(f"{__package__}.{OURS[name]}")
        codec: BlockCodec | None = module.CODECS[name]
    else:
        codec = _registered.get(name) or _installed(name)
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
    """Return the entry points with this name in the installed packages."""
    from importlib import metadata  # slow to import and rarely needed

    return list(metadata.entry_points(group=_GROUP, name=name))


def _installed(name: str) -> BlockCodec | None:
    for point in entry_points(name):
        codec: BlockCodec = point.load()
        if codec.name != name:
            raise UsageError(
                "a package registers a codec under a name other than its own",
                where=point.value,
                expected=repr(name),
                found=repr(codec.name),
                remedy=f"the entry point in {_GROUP!r} has to be named as the codec is",
            )
        register(codec)
        return codec
    return None
