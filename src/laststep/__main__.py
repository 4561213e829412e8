"""`python -m laststep.cli`, for where the script `laststep` is not on the path."""

from __future__ import annotations

from laststep.cli import main

main()
