"""`python bench/objects.py s3://bucket/prefix`: saves to and restores from an object store.

Beside raw clients in the same run, on the same bytes:

- upload: `save().wait()` until committed, against one `obstore.put` in parts, 12 at a time, and
  against DCP over s3fs, where s3fs can be imported
- restore: `restore()` by a new Checkpointer, against ranged gets of obstore, 12 at a time

In rotation, medians with the spread beside them. The usual variables name the server, such as
AWS_ENDPOINT_URL. What it leaves behind is below the prefix, and deleted at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import obstore  # noqa: E402
import torch  # noqa: E402

import laststep  # noqa: E402
from bench.hardware import commit, hardware  # noqa: E402
from laststep.storage.bucket import Bucket  # noqa: E402
from laststep.storage.retrying import Patience  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

PART_BYTES = 8 << 20
AT_ONCE = 12


class Bench:
    """The state, and the ways to bring it to a server and back."""

    def __init__(self, url: str, size_bytes: int) -> None:
        self.url = url
        self.size_bytes = size_bytes
        count = max(1, size_bytes >> 24)
        self.state = {f"w{n}": torch.rand(size_bytes // count // 4) for n in range(count)}
        self.bytes = bytearray(os.urandom(1 << 20) * (size_bytes >> 20))
        self.bucket = Bucket(url, Patience())

    def save(self) -> float:
        """A save until it is committed, not the first of its Checkpointer."""
        self.clear("run")
        with laststep.Checkpointer(f"{self.url}/run", s=self.state, progress=False) as c:
            c.save(0).wait()
            began = time.perf_counter()
            c.save(1).wait()
            return time.perf_counter() - began

    def restore(self) -> float:
        """By a new Checkpointer, made before the clock starts, as the raw client is."""
        with laststep.Checkpointer(f"{self.url}/run", s=self.state, progress=False) as c:
            began = time.perf_counter()
            c.restore()
            return time.perf_counter() - began

    def raw_put(self) -> float:
        """One object, in parts."""
        began = time.perf_counter()
        obstore.put(
            self.bucket.client, f"{self.bucket.prefix}/raw", memoryview(self.bytes),
            use_multipart=True, chunk_size=PART_BYTES, max_concurrency=AT_ONCE,
        )  # fmt: skip
        return time.perf_counter() - began

    def raw_get(self) -> float:
        """All of it by ranges, into memory that is there."""
        into = memoryview(self.bytes)
        began = time.perf_counter()

        def get(start: int) -> None:
            length = min(PART_BYTES, len(into) - start)
            key = f"{self.bucket.prefix}/raw"
            got = obstore.get_range(self.bucket.client, key, start=start, length=length)
            into[start : start + length] = memoryview(got)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(get, range(0, len(into), PART_BYTES)))
        return time.perf_counter() - began

    def dcp(self) -> float:
        """DCP over s3fs, with as many threads as laststep has writers."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(f"{self.url}/dcp", thread_count=4)
        began = time.perf_counter()
        dcp.save(self.state, storage_writer=writer, no_dist=True)
        spent = time.perf_counter() - began
        self.clear("dcp")
        return spent

    def clear(self, name: str) -> None:
        """Delete what is left of one of them."""
        self.bucket.delete(self.bucket.below(f"{self.bucket.prefix}/{name}"))


def ways(bench: Bench) -> dict[str, Callable[[], float]]:
    """What is measured, by name; DCP only where it can be."""
    measured = {
        "save": bench.save, "raw upload": bench.raw_put,
        "restore": bench.restore, "raw ranged reads": bench.raw_get,
    }  # fmt: skip
    try:
        import s3fs  # noqa: F401
    except ImportError:
        print("DCP over s3fs: not measured, s3fs is not installed")
        return measured
    return {**measured, "DCP over s3fs": bench.dcp}


def main() -> None:
    """Measure, print, and write every repetition to bench/out/objects.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--reps", type=int, default=3)
    given = parser.parse_args()
    bench = Bench(given.url, given.mb << 20)
    seconds: dict[str, list[float]] = {}
    for turn in range(given.reps + 1):  # the first, which makes connections and volumes, is dropped
        for name, way in ways(bench).items():
            spent = way()
            seconds.setdefault(name, []).extend([spent] if turn else [])
    bench.clear("run")
    bench.bucket.delete([f"{bench.bucket.prefix}/raw"])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        rates = sorted(bench.size_bytes / value / 1e6 for value in values)
        middle = bench.size_bytes / medians[name] / 1e6
        print(f"{name:18} {middle:6.0f} MB/s ({rates[0]:.0f} to {rates[-1]:.0f})")
    for ours, theirs in (
        ("save", "raw upload"), ("restore", "raw ranged reads"), ("save", "DCP over s3fs"),
    ):  # fmt: skip
        if theirs in medians:
            print(f"{ours} against {theirs}: {medians[theirs] / medians[ours]:.2f}")
    out = ROOT / "bench" / "out"
    out.mkdir(parents=True, exist_ok=True)
    result = {
        "kind": "objects", "commit": commit(ROOT), "size_bytes": bench.size_bytes,
        "hardware": dataclasses.asdict(hardware(out)), "seconds": seconds,
    }  # fmt: skip
    (out / "objects.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
