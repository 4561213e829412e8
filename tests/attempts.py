"""Decide about an attempt by the name of its folder, as a writer that has looked before would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.catalog import attempt
from laststep.catalog.attempt import parse_folder, read_decision

if TYPE_CHECKING:
    from laststep.catalog.run import Run
    from laststep.format.manifest import Abort, Commit
    from laststep.storage.store import Store


def of(store: Store, folder: str) -> attempt.Attempt:
    name = parse_folder(folder)
    assert name is not None
    return attempt.Attempt(store, name)


def commit(run: Run, folder: str, commit: Commit) -> None:
    of(run.store, folder).commit(commit)


def abort(run: Run, folder: str, reason: str) -> Commit | Abort:
    return attempt.abort(run.store, folder, reason)


def decided(run: Run, folder: str) -> Commit | Abort | None:
    return read_decision(run.store, folder)
