"""A store for tests, which ranks open by its name."""

from __future__ import annotations

import threading
from typing import Any

from laststep.storage.directory import DirectoryStore


class Stuck(DirectoryStore):
    """A store in which no file is ever finished."""

    def __init__(self, url: str) -> None:
        super().__init__(url.removeprefix("stuck://"))

    def open_writer(self, name: str, *, expected_bytes: int) -> Any:
        writer = super().open_writer(name, expected_bytes=expected_bytes)
        writer.finish = lambda _: threading.Event().wait()
        return writer
