"""What all tests on a GPU have in common."""

from __future__ import annotations

import pytest

from laststep.capture import copies


@pytest.fixture(autouse=True)
def begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have saves begin early although these states are small: the guess is what can go wrong."""
    monkeypatch.setattr(copies, "EARLY_PAYS_BYTES", 0)
