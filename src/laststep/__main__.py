"""`python -m laststep` is `laststep`, for where that script is not on the path."""

from __future__ import annotations

from laststep.cli import main

main()
