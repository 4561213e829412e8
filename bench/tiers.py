"""Measure tiers: `python bench/tiers.py`, see bench/README.md."""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(root), str(root / "src")]  # from a plain checkout, nothing installed

    from bench.on_tiers import main

    main()
