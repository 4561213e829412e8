"""Make the golden runs anew: `python tests/golden/make.py NAME …`, or all without a name.

Only a new version of the format gets new runs, beside the old ones. Those that are here MUST NOT be
made again once the format has been released: they are what that release wrote.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "ranks"), str(HERE.parent.parent / "src")]

from crew import Crew  # noqa: E402

FORMAT = HERE / "version-1"
JOBS = {
    "one-rank": ("one_rank", 1),
    "fsdp2": ("fsdp2", 3),
    "groups": ("groups", 4),
    "per-rank": ("per_rank", 2),
    "dcp": ("through_dcp", 2),
    "borrowed": ("borrowed", 1),
    "coded": ("coded", 1),
    "partial": ("partial", 1),
}


def main(names: list[str]) -> None:
    """Make the runs of these names; refuses where there is one."""
    for name in names or JOBS:
        run = FORMAT / name
        if run.exists():
            sys.exit(f"{run} is there already")
        function, ranks = JOBS[name]
        if ranks == 1:
            import writing

            process = multiprocessing.get_context("fork").Process(
                target=getattr(writing, function), args=(str(run),)
            )
            process.start()
            process.join()
        else:
            os.environ.setdefault("WARM_PYTHON", sys.executable)
            crew = Crew(size=ranks, also=(HERE,))
            crew(f"writing:{function}", ranks, run=str(run))
            crew.close()


if __name__ == "__main__":
    main(sys.argv[1:])
