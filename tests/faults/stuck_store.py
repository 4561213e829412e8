"""Stores for tests, which trainers, ranks and flushers open by their names."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from laststep.errors import StorageError
from laststep.storage.directory import DirectoryStore


class Stuck(DirectoryStore):
    """A store in which no file is ever finished; for a flusher that is a thread."""

    def open_writer(self, name: str, *, expected_bytes: int) -> Any:
        writer = super().open_writer(name, expected_bytes=expected_bytes)
        writer.finish = lambda _: threading.Event().wait()
        return writer


class Gated(DirectoryStore):
    """A store that finishes a file once `FOLDER.open` lies beside it; with `FOLDER.full`, none.
    `FOLDER.waits` shows that one waits."""

    def __init__(self, url: str) -> None:
        self._place = Path(url.removeprefix("gated://"))
        super().__init__(str(self._place))

    @property
    def url(self) -> str:
        """By which a flusher opens it too."""
        return f"gated://{self._place}"

    def open_writer(self, name: str, *, expected_bytes: int) -> Any:
        writer = super().open_writer(name, expected_bytes=expected_bytes)
        finish = writer.finish

        def finish_when_open(size_bytes: int) -> None:
            if self._place.with_suffix(".full").exists():
                raise StorageError("there is no room", where=name)
            self._place.with_suffix(".waits").touch()
            while not self._place.with_suffix(".open").exists():
                time.sleep(0.01)  # a test says when
            finish(size_bytes)

        writer.finish = finish_when_open
        return writer
