"""What a path or URL says of where a place is, by its text alone."""

from __future__ import annotations

import contextlib
import os
import re

from laststep.errors import Usage

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"(?:s3|gs|az|shm):/?[^/]")


def scheme_of(place: object) -> str | None:
    """The scheme of a URL, in small letters; None for anything else."""
    match = _SCHEME.match(place) if isinstance(place, str) else None
    return None if match is None else match[1].lower()


def refuse_secrets(url: str) -> None:
    """`Usage` for a URL with a user or a password, which would end in logs and manifests."""
    scheme = scheme_of(url)
    if scheme is not None and "@" in url.partition("://")[2].partition("/")[0]:
        raise Usage(
            "refused a URL with a user or a password", where=f"{scheme}://…",
            expected="credentials by the environment, where no log and no manifest has them",
            remedy="docs/guides/object-storage.md has the variables",
        )  # fmt: skip


def absolute(path: object) -> str:
    """The path from the root on, without `~`, `.` and `..`, by its text alone: no link is followed.
    `file://…` is one too. `Usage` for what is no path on this machine, such as `s3://…`."""
    text: object = None
    with contextlib.suppress(TypeError):  # of a path that is not what it says
        text = os.fspath(path)  # type: ignore[call-overload]
    if not isinstance(text, str) or not text or "\0" in text:
        raise Usage(
            "this is not the path of a folder",
            expected="a str or an os.PathLike",
            found=repr(path),
            remedy='pass a path, such as "runs/first"',
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        # Messages between processes, and the log, are text.
        raise Usage(
            "this path is no text", expected="a path that is valid UTF-8", found=ascii(text),
            remedy="rename the folder, or make a link to it with another name",
        ) from None  # fmt: skip
    if _ONE_SLASH.match(text):
        raise Usage(
            "this looks like a URL and is none", found=repr(path),
            expected="two slashes behind the colon, or the path of a folder",
            remedy=f"a folder of that name is ./{text}",
        )  # fmt: skip
    scheme = scheme_of(text)
    if scheme == "file":
        from urllib.parse import unquote  # not in a flusher, which is given a path

        host, slash, rest = text.partition("://")[2].partition("/")
        text = unquote(slash + rest)
        scheme = None if host in ("", "localhost") and slash else scheme
    if scheme is not None:
        raise Usage(
            "this is a URL, not the path of a folder", found=repr(path),
            expected="a folder on this machine, as a path or as file:///…",
            remedy="name a folder on this machine",
        )  # fmt: skip
    return os.path.abspath(os.path.expanduser(text))
