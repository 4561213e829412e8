"""What planning and committing a save, and planning a load, cost in jobs of up to 131,072 ranks.

`python bench/scale.py`: one process plays one rank in the middle, the first rank of a group, the
first of all, and a rank that loads, with the functions that a save and a restore call. The jobs are
made up (`bench/scale_jobs.py`), on nodes of eight ranks. A job of the same size and one of half the
size load. Nothing is written or sent. DCP's planner does the same work for up to 512 ranks.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT), str(ROOT / "src")]

import msgspec  # noqa: E402

from bench import scale_load  # noqa: E402
from bench.hardware import commit  # noqa: E402
from bench.scale_jobs import (  # noqa: E402
    JOBS,
    LEAST_RANKS,
    SHAPES,
    TENSORS,
    Job,
    forked,
    measured,
    plan_of,
    share_of,
    taken_on,
)
from laststep.commit.rounds import Round  # noqa: E402
from laststep.format import index as index_format  # noqa: E402
from laststep.format import manifest  # noqa: E402
from laststep.plan.layouts import GlobalLayout, agree, decode_local_layout  # noqa: E402
from laststep.plan.receipts import (  # noqa: E402
    Receipt,
    Summary,
    cut,
    items_of,
    layout_groups_of,
    objection_to,
    summarise,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from laststep.flush.saves import Save

DCP_RANKS = 512
"""DCP's planner takes too long for more ranks than these."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", default="512,8192,131072", help=f"multiples of {LEAST_RANKS} (%(default)s)"
    )
    parser.add_argument("--only", default=",".join((*JOBS, "dcp")), help="(%(default)s)")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    sizes, kinds = list(map(int, chosen.ranks.split(","))), chosen.only.split(",")
    if any(ranks < 1 or ranks % LEAST_RANKS for ranks in sizes):
        parser.error(f"--ranks: expected multiples of {LEAST_RANKS}")
    if unknown := {*kinds} - {*JOBS, "dcp"}:
        parser.error(f"--only: unknown {', '.join(unknown)}")
    rows: list[dict[str, Any]] = []
    for ranks in sizes:
        for kind in kinds:
            if kind != "dcp":
                rows.append({"job": kind, **_measure(kind, ranks)})
                print(_row(rows[-1]), flush=True)
            elif ranks <= DCP_RANKS:
                rows.append({"job": kind, **forked(partial(_measure_dcp, ranks))})
                print(_row_of_dcp(rows[-1]), flush=True)
    if chosen.json:
        report = {"kind": "scale", "commit": commit(ROOT), "date": time.strftime("%Y-%m-%d")}
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps({**report, "rows": rows}, indent=1))


def _measure(kind: str, ranks: int) -> dict[str, Any]:
    job = JOBS[kind](ranks)
    rank = ranks // 2 + 1
    taken = taken_on(job, rank)
    pieces, plan_s, plan_mb = measured(lambda: len(plan_of(job, _agreed(job), rank, taken).pieces))
    global_layout = _agreed(job)
    receipts = _receipts(job, global_layout)
    notes = list(map(msgspec.msgpack.encode, receipts))
    groups = cut(ranks)

    def notes_of(leader: int) -> dict[int, bytes]:
        return {rank: notes[rank] for rank in groups.group_of(leader)}

    last = notes_of(groups.leaders[-2:][0])  # the last group may be a small one
    _, leader_s, leader_mb = measured(lambda: _summed_up(global_layout, last))
    others = [
        msgspec.msgpack.encode(_summed_up(global_layout, notes_of(leader)))
        for leader in groups.leaders[1:]
    ]
    first = notes_of(0)
    document, commit_s, commit_mb = measured(lambda: _commit(global_layout, first, others))
    return {
        "ranks": ranks,
        "layout_groups": len(job.local_layouts),
        "layout_bytes": sum(map(len, job.encoded)),
        "plan_s": plan_s,
        "plan_mb": plan_mb,
        "pieces": pieces,
        "groups": len(groups.leaders),
        "leader_s": leader_s,
        "leader_mb": leader_mb,
        "commit_s": commit_s,
        "commit_mb": commit_mb,
        "manifest_bytes": len(document),
        "files": sum(receipt.written.files for receipt in receipts),
        "largest_folder": _largest_folder(receipts),
        "loads": [
            scale_load.measure(job, global_layout, document, JOBS[kind](loading))
            for loading in (ranks, ranks // 2)
        ],
    }


def _agreed(job: Job) -> GlobalLayout:
    known = dict(
        zip(dict.fromkeys(job.digests), map(decode_local_layout, job.encoded), strict=True)
    )
    return agree(job.digests, known)


def _receipts(job: Job, global_layout: GlobalLayout) -> list[Receipt]:
    """Return the receipts of all ranks. The last rank of a layout group stands for all of them but
    the first, which writes the plain values."""
    receipts: dict[int, Receipt] = {}
    for group in global_layout.layout_groups:
        receipts |= dict.fromkeys(group.ranks, _receipt(job, global_layout, group.ranks[-1]))
        receipts[group.ranks[0]] = _receipt(job, global_layout, group.ranks[0])
    return [receipts[rank] for rank in range(job.ranks)]


def _receipt(job: Job, global_layout: GlobalLayout, rank: int) -> Receipt:
    plan, trees, index = share_of(job, global_layout, rank)
    save = cast("Save", SimpleNamespace(plan=plan))  # nothing else of it is asked for
    round_ = Round(step=1, save=save, global_layout=global_layout)
    round_.seal(trees, rank)
    written = index_format.written_of(index, index_format.encode(index))
    return msgspec.structs.replace(round_.receipt, written=written)


def _summed_up(global_layout: GlobalLayout, notes: Mapping[int, bytes]) -> Summary:
    """Do what the first rank of a group does with the receipts of its group."""
    decode = msgspec.msgpack.Decoder(Receipt).decode
    return summarise({rank: decode(note) for rank, note in notes.items()}, global_layout)


def _commit(
    global_layout: GlobalLayout, notes: Mapping[int, bytes], summaries: Sequence[bytes]
) -> bytes:
    """Do what the first rank of all does: its own group, all summaries, and the manifest."""
    decode = msgspec.msgpack.Decoder(Summary).decode
    every = [_summed_up(global_layout, notes), *map(decode, summaries)]
    objection = objection_to(every, global_layout)
    if objection:
        raise RuntimeError(objection)
    written = manifest.WrittenIndexes()
    for summary in every:
        written = written.plus(summary.written)
    return manifest.encode(
        manifest.Commit(
            run="0" * 32,
            step=1,
            term=1,
            attempt=1,
            created_s=0.0,
            laststep="0",
            items=items_of(every, global_layout),
            written=written,
            ranks=len(global_layout.layout_group_of),
            layout_groups=layout_groups_of(global_layout),
        )
    )


def _largest_folder(receipts: Sequence[Receipt]) -> int:
    """Return the number of entries in the largest folder of the checkpoint."""
    entries: Counter[str] = Counter()
    for rank, receipt in enumerate(receipts):
        folder = index_format.folder_of(rank, len(receipts))
        entries[folder] += receipt.written.files + 1  # and the index
    top = entries.pop("", 0) + len(entries) + 1  # and the manifest
    return max([top, *entries.values()])


def _measure_dcp(ranks: int) -> dict[str, Any]:
    """Put the plans of all ranks together as DCP's coordinator does; FSDP over all of them."""
    import torch
    from torch.distributed.checkpoint.default_planner import (
        create_default_global_save_plan,
        dedup_save_plans,
    )
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    properties = TensorProperties(dtype=torch.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plans = []
    for rank in range(ranks):
        items = []
        for number in range(3 * TENSORS):
            shape = SHAPES[number % len(SHAPES)]
            rows = shape[0] // ranks
            start, size = (rank * rows, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
            chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(size))
            items.append(
                WriteItem(
                    index=MetadataIndex(f"t{number}", torch.Size(start)),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=chunk, properties=properties, size=torch.Size(shape)
                    ),
                )
            )
        plans.append(SavePlan(items))
    began = time.process_time()
    create_default_global_save_plan(dedup_save_plans(plans))
    seconds = time.process_time() - began
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"ranks": ranks, "commit_s": seconds, "commit_mb": memory}


def _row_of_dcp(row: Mapping[str, Any]) -> str:
    return (
        f"{row['ranks']:7} {'dcp':12} coordinator {row['commit_s']:7.3f} s "
        f"{row['commit_mb']:7.0f} MB (plans of all ranks put together)"
    )


def _row(row: Mapping[str, Any]) -> str:
    figures = [
        f"{row['ranks']:7} {row['job']:12}",
        f"rank {row['plan_s']:6.3f} s {row['plan_mb']:5.0f} MB, {row['pieces']} pieces;",
        f"leader of {row['groups']} {row['leader_s']:6.3f} s {row['leader_mb']:3.0f} MB,",
        f"coordinator {row['commit_s']:6.3f} s {row['commit_mb']:3.0f} MB;",
        f"{row['layout_groups']} layouts {row['layout_bytes'] / 1e6:.2f} MB,",
        f"manifest {row['manifest_bytes'] / 1e6:.3f} MB, {row['files']} files,",
        f"{row['largest_folder']} entries in a folder",
    ]
    figures += [
        f"\n        loaded by {load['ranks']}: {load['seconds']:6.3f} s {load['mb']:5.0f} MB, "
        f"{load['chunks']} chunks of {load['writers']} ranks' files, "
        f"{load['metadata_bytes'] / 1e6:.2f} MB of metadata"
        for load in row["loads"]
    ]
    return " ".join(figures)


if __name__ == "__main__":
    main()
