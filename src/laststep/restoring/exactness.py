"""Whether what is restored is what training had: nothing of it was rounded when it was saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.errors import Mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.read.content import Content
    from laststep.restoring.match import Match


def refuse_rounded(content: Content, matches: Iterable[Match], where: str) -> None:
    """`Mismatch` if a tensor that is to be restored was rounded."""
    if not content.commit.lossy:
        return
    for match in matches:
        for name in match.reads:
            how = _rounded(content, match.item.name, name)
            if how is not None:
                raise Mismatch(
                    "the checkpoint is not exact", where=where,
                    expected="no tensor that was rounded, with exact=True",
                    found=f"{match.item.name}/{name}, rounded to {how} when it was saved",
                    remedy="restore(exact=False) takes it as it is; `laststep ls` shows which "
                    "checkpoints are exact",
                )  # fmt: skip


def _rounded(content: Content, item: str, name: str) -> str | None:
    for place in content.places(item, name):
        stored = content.files[place.file].stored
        for entry in stored.layout.tensors if stored.lossy else ():
            if entry.start == place.start and entry.name in stored.lossy:
                return stored.lossy[entry.name]
    return None
