"""What shows to others that a save is coming."""

from __future__ import annotations

from typing import TYPE_CHECKING

from expect import warned
from laststep.catalog.instances import Start, coming
from laststep.errors import StorageError
from laststep.storage.directory import DirectoryStore
from laststep.storage.locks import FileLock

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_mark_that_failed_once_does_not_end_all_marking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = DirectoryStore(tmp_path / "run")
    start = Start(store)

    def refused(_lock: FileLock, _place: int) -> None:
        raise StorageError("cannot mark", found="No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "mark", refused)
        assert start.announce(1) is None
        assert start.announce(2) is None
    assert len(warned(caplog, "No locks available")) == 1
    assert start.announce(3) is not None
    assert [one.places for one in coming(store)] == [{3}]
    start.over(3)
    assert coming(store) == ()
    start.close()
