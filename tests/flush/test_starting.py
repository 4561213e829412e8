"""The helper process imports no more than it needs: every start of a job waits for it."""

from __future__ import annotations

import subprocess
import sys

from laststep.flush import client as starting

SLOW = frozenset(
    {
        "dataclasses",
        "inspect",
        "numpy",
        "pathlib",
        "site",
        "subprocess",
        "torch",
        "typing_extensions",
    }
)
"""What would take milliseconds, and what a dependency takes only where it finds it."""


def test_the_helper_starts_without_what_takes_long_to_import() -> None:
    show = "print(*(name for name, module in sys.modules.items() if module is not None))"
    imports = starting._CODE.replace("main(sys.argv[1])", show)
    assert show in imports
    done = subprocess.run(
        [
            sys.executable,
            *starting._BARE,
            imports,
            "",
            *starting._places(encodes=False, foreign=False),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "laststep.flush.server" in loaded
    assert not loaded & SLOW
