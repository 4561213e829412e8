"""What tests of object stores share: one server for all of them, and its settings."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Lets the tests here import the servers by their names.
sys.path.insert(0, str(Path(__file__).parent))

import weed

from laststep.storage import bucket


@pytest.fixture(scope="session")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A SeaweedFS server."""
    with weed.running(tmp_path_factory.mktemp("weed")) as url:
        yield url


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of its bucket, with the environment that opens it."""
    for name, value in {**weed.KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "x"}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{weed.BUCKET}"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited before something was tried again; nothing waits."""
    waited: list[float] = []

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            waited.append(seconds)

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + sum(waited)

    monkeypatch.setattr(bucket, "time", Clock)
    return waited
