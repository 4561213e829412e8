"""Every change of wording shows in `messages.txt`; no other test depends on words."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import messages


def test_every_message_is_in_the_golden_file() -> None:
    listed = messages.MESSAGES.read_text().splitlines()
    changes = "\n".join(difflib.unified_diff(listed, messages.messages(), lineterm="", n=0))
    assert not changes, f"run `.venv/bin/python tests/golden/messages.py`:\n{changes}"
