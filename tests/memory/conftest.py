"""Memory is made ready ahead of time here, as in use."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def pages_on_demand() -> None:
    """Not here."""
