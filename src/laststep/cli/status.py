"""The statuses with which a command can end, besides 0."""

from __future__ import annotations

FAILED = 1
"""It did not work; one line on stderr says why."""

MISUSED = 2
"""The command cannot work as it was typed."""

DAMAGED = 3
"""`verify` did its work and found damage."""
