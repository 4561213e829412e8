"""The command line of the two benchmarks, as one checked value."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("raw", "save", "load", "every", "small")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run, how often, where."""

    size_bytes: int
    repetitions: int
    peer_repetitions: int
    """Of everybody else: some are slow, and only ours must be told from noise."""
    folder: Path
    json: Path
    parts: tuple[str, ...]
    peers: tuple[str, ...]
    """Empty: all."""
    budget_s: float
    host_memory_bytes: int
    quick: bool

    def wants(self, part: str) -> bool:
        return part in self.parts

    def wants_peer(self, name: str) -> bool:
        return not self.peers or name in self.peers


def parse(kind: str, *, gb: float, quick_gb: float, names: list[str], budget_s: float) -> Options:
    """Read sys.argv. `names` are the peers that `--only` may name beside the parts."""
    parser = argparse.ArgumentParser(prog=f"bench/{kind}.py", description=__doc__)
    parser.add_argument("--gb", type=float, help=f"size of the state in GB (default {gb})")
    parser.add_argument(
        "--reps", type=int, help="repetitions (default 3; the second samples memory)"
    )
    parser.add_argument("--peer-reps", type=int, help="repetitions of peers (default as --reps)")
    parser.add_argument("--quick", action="store_true", help="a small state and one repetition")
    parser.add_argument("--dir", type=Path, help="folder for the files (default bench/out/tmp)")
    parser.add_argument("--json", type=Path, help=f"result (default bench/out/{kind}.json)")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=budget_s,
        help="begin no repetition but the first after (%(default)s)",
    )
    parser.add_argument(
        "--host-gb", type=float, help="laststep's cap on host memory (default 1.25 times the state)"
    )
    parser.add_argument(
        "--only",
        default="",
        help="parts and peers, separated by commas: " + ", ".join([*PARTS, *names]),
    )
    given = parser.parse_args()
    chosen = [word.strip() for word in given.only.split(",") if word.strip()]
    unknown = [word for word in chosen if word not in (*PARTS, *names)]
    if unknown:
        parser.error(f"--only: unknown {', '.join(unknown)}; see --help")
    size_bytes = int((given.gb or (quick_gb if given.quick else gb)) * 1e9)
    parent = given.dir or HERE / "out" / "tmp"
    parent.mkdir(parents=True, exist_ok=True)
    host_bytes = int(given.host_gb * 1e9) if given.host_gb else int(1.25 * size_bytes)
    repetitions = given.reps or (1 if given.quick else 3)
    return Options(
        size_bytes=size_bytes,
        repetitions=repetitions,
        peer_repetitions=given.peer_reps or repetitions,
        folder=Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=parent)),
        json=given.json or HERE / "out" / f"{kind}.json",
        parts=tuple(word for word in chosen if word in PARTS) or PARTS,
        peers=tuple(word for word in chosen if word in names),
        budget_s=given.budget_s,
        host_memory_bytes=max(host_bytes, 256 << 20),
        quick=given.quick,
    )
