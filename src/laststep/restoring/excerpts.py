"""A checkpoint that has only some items is never taken for all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.errors import Mismatch, Problems
from laststep.restoring.fit import selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.format.manifest import Commit


def refuse_excerpt(commit: Commit, only: Sequence[str] | None, where: str) -> None:
    """`Mismatch` where something is wanted that an excerpt lacks."""
    lacking = [item for item in commit.left_out if selection(only, item)[0]]
    if lacking:
        here = [record.name for record in commit.items]
        error = Mismatch(
            "the checkpoint is an excerpt, without " + ", ".join(lacking), where=where,
            expected="all items" if only is None else f"what only={list(only)} names",
            found=f"{', '.join(here)} of a checkpoint of the run {commit.run}",
            remedy=f"restore(only={here}) takes what is here; the whole is, or was, in the "
            "run that this was copied from",
        )  # fmt: skip
        error.problems = Problems(missing=tuple(lacking))
        raise error
