"""`python -m bench [cpu|gpu] [options]`: run the benchmarks.

Without a word: the GPU, if there is one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Choose, and hand the rest of the command line on."""
    word = sys.argv.pop(1) if sys.argv[1:2] in (["cpu"], ["gpu"]) else None
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "src"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see cpu.py

    import torch

    if word == "gpu" or (word is None and torch.cuda.is_available()):
        from bench.on_gpu import main as run
    else:
        from bench.on_cpu import main as run
    run()


if __name__ == "__main__":
    main()
