"""Run PyTorch's own tests of torch.distributed.checkpoint on laststep's storage.

    dcp.py PYTORCH/test/distributed/checkpoint              all that use torch's storage
    dcp.py PYTORCH/test/distributed/checkpoint -k planner   with options of pytest

PYTORCH is a checkout of the release of torch that is installed; nothing is downloaded. The tests of
all files that name torch's storage run first as they are, and those that pass once more with
`laststep.dcp.Writer` and `Reader` in the place of `FileSystemWriter` and `FileSystemReader`. They
have to pass again, or to fail because laststep refuses stream extensions. The status is 1 if one
does neither.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).resolve().parent
SRC = HERE.parent.parent / "src"
USES_STORAGE = re.compile(r"FileSystem(Writer|Reader)|checkpoint_id|torch_save_to_dcp")
REFUSED = "stream extensions are not supported"
TIMEOUT_S = 900


class Outcome(NamedTuple):
    kind: str
    """`passed`, `failed` or `skipped`."""
    text: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    arguments, options = parser.parse_known_args()
    folder: Path = arguments.folder.resolve()
    files = sorted(
        str(path) for path in folder.rglob("test_*.py") if USES_STORAGE.search(path.read_text())
    )
    if not files:
        print(f"no test of DCP in {folder}: expected test/distributed/checkpoint of PyTorch")
        return 2
    import torch

    print(f"torch {torch.__version__}, {len(files)} files of {folder}", flush=True)
    stock: dict[str, Outcome] = {}
    ours: dict[str, Outcome] = {}
    for file in files:  # each by itself: some leave a process group behind
        found = run([file], folder, options)
        stock.update(found)
        passed = [name for name, outcome in found.items() if outcome.kind == "passed"]
        if passed:
            ours.update(run(passed, folder, options, first_on_path=[HERE / "on_laststep"]))
    return report(stock, ours)


def run(
    tests: list[str], folder: Path, options: list[str], first_on_path: Iterable[Path] = ()
) -> dict[str, Outcome]:
    """Run tests in a process of their own, and return the outcome of each by its id for pytest."""
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    with tempfile.TemporaryDirectory(prefix="laststep-dcp-") as scratch:
        result = Path(scratch) / "result.xml"
        # None of this project's settings: warnings of torch are not errors of its tests.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "-W",
            "ignore",
            "--tb=short",
        ]
        command += ["-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", f"--timeout={TIMEOUT_S}"]
        command += [f"--junit-xml={result}", *options, *tests]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, first_on_path), str(SRC), *inherited]),
            "TMPDIR": scratch,
        }
        subprocess.run(command, cwd=scratch, env=environment, check=False)
        outcomes: dict[str, Outcome] = {}
        for case in ET.parse(result).iter("testcase"):  # noqa: S314 (pytest has written it)
            outcome = Outcome("passed")
            for found in case:
                if found.tag == "skipped":
                    outcome = Outcome("skipped")
                elif found.tag in ("failure", "error"):
                    outcome = Outcome("failed", found.text or "")
            *module, suite = (case.get("classname") or "").split(".")
            file = folder.joinpath(*module).with_suffix(".py")
            outcomes[f"{file}::{suite}::{case.get('name')}"] = outcome
        return outcomes


def report(stock: dict[str, Outcome], ours: dict[str, Outcome]) -> int:
    """Print how many pass on each storage, and every test that passes on torch's alone."""
    kinds = Counter(outcome.kind for outcome in stock.values())
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    print(f"torch's storage: {counts}")
    again = [name for name, outcome in ours.items() if outcome.kind == "passed"]
    print(f"laststep: {len(again)} of the {kinds['passed']} that pass on torch's storage")
    missing = [name for name, outcome in stock.items() if outcome.kind == "passed"]
    missing = sorted(set(missing) - set(again))
    refused = [name for name in missing if REFUSED in ours.get(name, Outcome("")).text]
    for name in missing:
        kind = ours[name].kind if name in ours else "not run"
        print(f"  {Path(name).name}: {'refused, stream extensions' if name in refused else kind}")
    return 0 if again and refused == missing else 1


if __name__ == "__main__":
    sys.exit(main())
