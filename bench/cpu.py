"""Measure laststep and its peers without a GPU: `python bench/cpu.py`, see bench/README.md."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(root), str(root / "src")]  # from a plain checkout, nothing installed

    # Threads of torch that spin while they wait may make iterations many times longer once
    # anything else runs on a small machine, and drown what is measured. Read as torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from bench.on_cpu import main

    main()
