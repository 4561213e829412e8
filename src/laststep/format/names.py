"""The names that files and folders of a checkpoint may have: plain on every system."""

from __future__ import annotations

import functools

_MAX_NAME_BYTES = 255
_APART = frozenset('/\\:*?"<>|')
"""What separates or means something in a path, on one system or another."""


@functools.lru_cache(maxsize=1 << 12)
def is_file_name(name: str) -> bool:
    """Return whether that can be a file in a checkpoint's folder, or in a folder within it."""
    parts = name.split("/")
    return len(parts) <= 2 and all(map(is_plain_name, parts))


def is_plain_name(name: str) -> bool:
    """Return whether `name` is one visible component of a path on every system that we know of."""
    return (
        name.isprintable()
        and 0 < len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES
        and not name.startswith(".")
        and _APART.isdisjoint(name)
    )
