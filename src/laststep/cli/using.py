"""`laststep du`: what the checkpoints of a run take on the disk, and what they share.

With --json: `run`; `checkpoints`, each with `step`, `folder`, `size_bytes` (of all that lies in its
folder), `new_bytes` (of that, what was written for it), `alone_bytes` (what only it holds: deleting
it frees so much), `shared_with` (folders that have a file of it), `files` (how many data files a
restore opens) and `error` (null, or why its manifest cannot be read: all of it then counts as its
own); and of all of them `apart_bytes` (as if each stood alone: what copies of the folders take),
`stored_bytes` (on the disk) and `saved_bytes`, the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.catalog.indexes import sharing_of
from laststep.cli import output, places

if TYPE_CHECKING:
    from laststep.catalog.indexes import Sharing
    from laststep.catalog.listing import Listed

_NUMBERS = ("step", "size", "new", "only here", "files")


def du(run: places.RunPath, *, as_json: output.AsJson = False) -> None:
    """Say what checkpoints take on the disk, and what they share."""
    opened = places.open_run(run)
    checkpoints = opened.checkpoints()
    sharing = sharing_of(opened.store, checkpoints)
    apart_bytes = sum(item.stored_bytes for item in checkpoints)
    stored_bytes = sharing.stored_bytes()
    saved_bytes = apart_bytes - stored_bytes
    if as_json:
        output.print_json(
            {
                "run": opened.store.url,
                "checkpoints": [_document(item, sharing) for item in checkpoints],
                "apart_bytes": apart_bytes,
                "stored_bytes": stored_bytes,
                "saved_bytes": saved_bytes,
            }
        )
        return
    console = output.console()
    if not checkpoints:
        console.print(f"{run} has no checkpoint yet")
        return
    rows = [_row(item, sharing) for item in checkpoints]
    output.print_checkpoints(rows, _NUMBERS, dim=[not item.on_lineage for item in checkpoints])
    total = f"{output.count_text(len(checkpoints), 'checkpoint')}: "
    if saved_bytes:
        apart = output.size_text(apart_bytes)
        total += f"{apart} if each stood alone, {output.size_text(saved_bytes)} saved, "
    console.print(f"{total}{output.size_text(stored_bytes)} on the disk")


def _new_bytes(item: Listed) -> int:
    return item.stored_bytes - (0 if item.commit is None else item.commit.shared_bytes)


def _document(item: Listed, sharing: Sharing) -> dict[str, object]:
    return {
        **output.fields(item, "step", "folder"),
        "size_bytes": item.stored_bytes,
        "new_bytes": _new_bytes(item),
        "alone_bytes": sharing.freed_bytes([item.folder]),
        "shared_with": sharing.sharers(item.folder),
        "files": None if item.commit is None else item.commit.file_count,
        "error": None if item.error is None else str(item.error),
    }


def _row(item: Listed, sharing: Sharing) -> dict[str, str]:
    """What the table says of it, by column."""
    others = sharing.sharers(item.folder)
    return {
        "step": str(item.step),
        "size": output.size_text(item.stored_bytes),
        "new": output.size_text(_new_bytes(item)),
        "only here": output.size_text(sharing.freed_bytes([item.folder])),
        "files": "" if item.commit is None else f"{item.commit.file_count:,}",
        "shared with": output.count_text(len(others), "checkpoint") if others else "",
        "folder": item.folder,
    }
