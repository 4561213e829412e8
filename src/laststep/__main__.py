"""Run the `laststep` command as `python -m laststep`, for environments where the script is not on
the path."""

from __future__ import annotations

from laststep.cli import main

main()
