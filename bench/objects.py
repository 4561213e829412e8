"""`python bench/objects.py s3://bucket/prefix`: saves to and restores from an object store.

Beside raw clients and DCP in the same run, on the same bytes:

- save: `save().wait()` until committed, against one `obstore.put` in parts, 12 at a time
- restore: `restore()` by a new Checkpointer, which starts its flusher meanwhile, and once more by
  the same one; against ranged gets of obstore into memory, 12 at a time: of one object in aligned
  ranges, and of the very ranges that a restore reads
- DCP over s3fs, where that can be imported: saving and loading the same state
- a part: bytes and requests of a restore of one tensor, and of a slice, against the bytes wanted
- the digest of all bytes on one thread, since restores verify and raw clients do not

In rotation, medians with the spread beside them. The usual variables name the server, such as
AWS_ENDPOINT_URL. What it leaves behind is below the prefix, and deleted at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
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
from laststep.codecs.digests import block_digests  # noqa: E402
from laststep.memory.pool import REMOTE_SLOT_BYTES  # noqa: E402
from laststep.storage.bucket import Bucket, Patience  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PART_BYTES = 8 << 20
AT_ONCE = 12
AGAINST = (
    ("save", "raw upload"),
    ("save", "DCP save"),
    ("restore", "raw ranged reads"),
    ("restore again", "raw ranged reads"),
    ("restore again", "raw reads of the same ranges"),
    ("restore again", "DCP load"),
)


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
        with laststep.Checkpointer(
            f"{self.url}/run", s=self.state, options=laststep.Options(progress=False)
        ) as c:
            c.save(0).wait()
            for tensor in self.state.values():  # what did not change would not be written
                tensor.add_(1)
            began = time.perf_counter()
            c.save(1).wait()
            return time.perf_counter() - began

    def restore(self, *, again: bool = False) -> float:
        """By a new Checkpointer, made before the clock starts, as the raw client is."""
        with laststep.Checkpointer(
            f"{self.url}/run", s=self.state, options=laststep.Options(progress=False)
        ) as c:
            if again:
                c.restore()
            began = time.perf_counter()
            c.restore()
            return time.perf_counter() - began

    def raw_put(self) -> float:
        """One object, in parts."""
        began = time.perf_counter()
        obstore.put(
            self.bucket.client,
            f"{self.bucket.prefix}/raw",
            memoryview(self.bytes),
            use_multipart=True,
            chunk_size=PART_BYTES,
            max_concurrency=AT_ONCE,
        )
        return time.perf_counter() - began

    def raw_get(self) -> float:
        """All of one object by ranges."""
        key = f"{self.bucket.prefix}/raw"
        return self._get(key, range(0, len(self.bytes), PART_BYTES), PART_BYTES)

    def raw_same(self) -> float:
        """The ranges that a restore reads of the file of the newest checkpoint."""
        names = self.bucket.below(f"{self.bucket.prefix}/run")
        key = max(name for name in names if name.endswith("/s.safetensors"))
        size = obstore.head(self.bucket.client, key)["size"]
        first = size - self.size_bytes  # behind the header; objects lie in another file
        return self._get(key, range(first, size, REMOTE_SLOT_BYTES), REMOTE_SLOT_BYTES)

    def _get(self, key: str, starts: range, size: int) -> float:
        """Ranges of an object, into memory that is there."""
        into = memoryview(self.bytes)
        began = time.perf_counter()

        def get(start: int) -> None:
            at = start - starts[0]
            length = min(size, len(into) - at)
            got = obstore.get_range(self.bucket.client, key, start=start, length=length)
            into[at : at + length] = memoryview(got)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(get, starts))
        return time.perf_counter() - began

    def dcp_save(self) -> float:
        """DCP over s3fs, with as many threads as laststep has writers."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        self.clear("dcp")
        began = time.perf_counter()
        writer = FsspecWriter(f"{self.url}/dcp", thread_count=4)
        dcp.save(self.state, storage_writer=writer, no_dist=True)
        return time.perf_counter() - began

    def dcp_load(self) -> float:
        """What it saved, into the same tensors."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        began = time.perf_counter()
        dcp.load(self.state, storage_reader=FsspecReader(f"{self.url}/dcp"), no_dist=True)
        return time.perf_counter() - began

    def digest(self) -> float:
        """Of all bytes, block by block, on this thread."""
        began = time.perf_counter()
        block_digests(memoryview(self.bytes))
        return time.perf_counter() - began

    def parts(self) -> dict[str, dict[str, int]]:
        """What restoring a part costs, beside what a look at the run costs that reads none."""
        tensor, elements = self.state["w0"], 1000
        costs = {}
        with counted() as cost:
            checkpoint = laststep.open(f"{self.url}/run").latest()
            checkpoint.tensor("s/w0")
        costs["open"] = {"wanted_bytes": 0, **cost}
        with counted() as cost:
            checkpoint.tensor("s/w0")[elements : 2 * elements]
        costs["slice"] = {"wanted_bytes": 4 * elements, **cost}
        with laststep.Checkpointer(
            f"{self.url}/run", s=self.state, options=laststep.Options(progress=False)
        ) as c:
            with counted() as cost:
                c.restore(only=["s/w0"])
            costs["restore of a tensor"] = {"wanted_bytes": tensor.nbytes, **cost}
        return costs

    def clear(self, name: str) -> None:
        """Delete what is left of one of them."""
        self.bucket.delete(self.bucket.below(f"{self.bucket.prefix}/{name}"))


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """What is asked of the server meanwhile: requests, and bytes of ranges."""
    cost = {"range_bytes": 0, "ranges": 0, "requests": 0}
    once, ranged = Bucket._once, Bucket.read_range  # noqa: SLF001 (what all requests go through)

    def count(self: Bucket, call: Callable[[], object], *, may_miss: bool) -> object:
        cost["requests"] += 1
        return once(self, call, may_miss=may_miss)

    def count_range(self: Bucket, key: str, start: int, size_bytes: int) -> memoryview:
        cost["ranges"] += 1
        cost["range_bytes"] += size_bytes
        return ranged(self, key, start, size_bytes)

    setattr(Bucket, "_once", count)  # noqa: B010 (mypy knows that this is no method of it)
    setattr(Bucket, "read_range", count_range)  # noqa: B010
    try:
        yield cost
    finally:
        setattr(Bucket, "_once", once)  # noqa: B010
        setattr(Bucket, "read_range", ranged)  # noqa: B010


def ways(bench: Bench) -> dict[str, Callable[[], float]]:
    """What is measured, by name; DCP only where it can be."""
    measured = {
        "save": bench.save,
        "raw upload": bench.raw_put,
        "restore": bench.restore,
        "raw ranged reads": bench.raw_get,
        "restore again": functools.partial(bench.restore, again=True),
        "raw reads of the same ranges": bench.raw_same,
        "digest on one thread": bench.digest,
    }
    try:
        import s3fs  # noqa: F401
    except ImportError:
        print("DCP over s3fs: not measured, s3fs is not installed")
        return measured
    return {**measured, "DCP save": bench.dcp_save, "DCP load": bench.dcp_load}


def main() -> None:
    """Measure, print, and write bench/out/objects.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--server", default="", help="what it is and where it runs, for the result")
    given = parser.parse_args()
    bench = Bench(given.url, given.mb << 20)
    seconds: dict[str, list[float]] = {}
    for turn in range(given.reps + 1):  # the first, which makes connections and volumes, is dropped
        for name, way in ways(bench).items():
            spent = way()
            seconds.setdefault(name, []).extend([spent] if turn else [])
    parts = bench.parts()
    for name in ("run", "dcp"):
        bench.clear(name)
    bench.bucket.delete([f"{bench.bucket.prefix}/raw"])
    write(bench, given, seconds, parts)


def write(
    bench: Bench,
    given: argparse.Namespace,
    seconds: dict[str, list[float]],
    parts: dict[str, dict[str, int]],
) -> None:
    """Print it, and leave it in a file."""
    rates = {}
    for name, values in seconds.items():
        each = [round(bench.size_bytes / value / 1e6) for value in values]
        rates[name] = [round(statistics.median(each)), min(each), max(each)]
        print(f"{name:28} {rates[name][0]:6} MB/s ({rates[name][1]} to {rates[name][2]})")
    ratios = {
        f"{ours} / {theirs}": round(rates[ours][0] / rates[theirs][0], 2)
        for ours, theirs in AGAINST
        if theirs in rates
    }
    for told in (ratios, parts):
        for what, value in told.items():
            print(f"{what}: {value}")
    out = ROOT / "bench" / "out"
    out.mkdir(parents=True, exist_ok=True)
    result = {
        "kind": "objects",
        "commit": commit(ROOT),
        "hardware": dataclasses.asdict(hardware(out)),
        "server": given.server,
        "mb": given.mb,
        "repetitions": given.reps,
        "mb_per_s": rates,
        "order": "median, least, most",
        "ratios": ratios,
        "parts": parts,
        "seconds": seconds,
    }
    (out / "objects.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
