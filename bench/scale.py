"""What planning and committing a save costs in jobs of up to 131,072 ranks, simulated.

`python bench/scale.py`: one process plays one rank, or the first one, with the very code that a
save runs; the tables of all classes and the receipts of all ranks are made up. 3,000 tensors with
AdamW state in three layouts. Nothing is written and nobody is asked over a network. DCP's planner
does the same work on the sizes that it can still do.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT), str(ROOT / "src")]

import msgspec  # noqa: E402

from laststep.format.manifest import Commit, FileRecord, ItemRecord, encode  # noqa: E402
from laststep.plan.job import (  # noqa: E402
    Agreement,
    Item,
    Table,
    Tensor,
    agree,
    decode_table,
    digest_of,
    encode_table,
)
from laststep.state.layouts import Layout, Mesh, Shard, Sharded  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

TENSORS = 3000
STAGES, TP = 16, 8
SHAPES = ((8192, 8192), (8192, 28672), (28672, 8192), (8192,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="512,8192,131072")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        kind, ranks = chosen.one.split(":")
        print(json.dumps(_measure_dcp(int(ranks)) if kind == "dcp" else _measure(kind, int(ranks))))
        return
    rows = []
    for ranks in map(int, chosen.ranks.split(",")):
        for kind in (*JOBS, *(["dcp"] if ranks <= 512 else [])):
            # A process of its own each: peak memory is the process's.
            command = [sys.executable, str(Path(__file__)), "--one", f"{kind}:{ranks}"]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
            print(_row(rows[-1]), flush=True)
    if chosen.json:
        from bench.hardware import commit

        report = {"kind": "scale", "commit": commit(ROOT), "date": time.strftime("%Y-%m-%d")}
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps({**report, "rows": rows}, indent=1))


def _with_adamw(name: str, shape: tuple[int, ...], layout: Layout | None) -> list[Tensor]:
    return [
        Tensor(name, "bfloat16", shape, layout),
        *(Tensor(f"{name}.{m}", "float32", shape, layout) for m in ("exp_avg", "exp_avg_sq")),
        Tensor(f"{name}.step", "float32", (), None),
    ]


def _table(tensors: list[Tensor]) -> Table:
    return (Item("state", "value", per_rank=False, tensors=tuple(tensors)),)


def pipeline(ranks: int) -> tuple[list[Table], Callable[[int], int]]:
    """PP16 x TP8 x FSDP2: stages of consecutive ranks; the embedding is tied to the last stage."""
    each = ranks // STAGES
    tables = []
    for stage in range(STAGES):
        held = range(stage * each, (stage + 1) * each)
        mesh = Mesh.of(("dp", "tp"), (each // TP, TP), held)
        cut = Sharded((1 << 17, 8192), mesh, (Shard(0, TP), Shard(0)))
        tensors = _with_adamw("embedding", cut.shape, cut) if stage in (0, STAGES - 1) else []
        for number in range(stage, TENSORS, STAGES):
            shape = SHAPES[number % len(SHAPES)]
            dim = len(shape) - 1 if number % 2 else 0
            first = Shard(0, TP if dim == 0 else 1)
            layout = Sharded(shape, mesh, (first, Shard(dim)))
            tensors += _with_adamw(f"layers.{number}", shape, layout)
        tables.append(_table(tensors))
    return tables, lambda rank: rank // each


def experts(ranks: int) -> tuple[list[Table], Callable[[int], int]]:
    """A mixture of experts: a third of the tensors are experts, each cut over 64 ranks."""
    ep = 64
    mesh = Mesh.of(("dp", "ep"), (ranks // ep, ep), range(ranks))
    flat = Mesh.of(("dp",), (ranks,), range(ranks))
    tensors = []
    for number in range(TENSORS):
        shape = SHAPES[number % len(SHAPES)]
        if number % 3 == 0:
            whole = (128, *shape)
            layout = Sharded(whole, mesh, (Shard(1), Shard(0)))
            tensors += _with_adamw(f"experts.{number}", whole, layout)
        else:
            tensors += _with_adamw(f"dense.{number}", shape, Sharded(shape, flat, (Shard(0),)))
    return [_table(tensors)], lambda rank: 0


def replicated(_: int) -> tuple[list[Table], Callable[[int], int]]:
    """Plain DDP."""
    tensors = []
    for number in range(TENSORS):
        tensors += _with_adamw(f"layers.{number}", SHAPES[number % len(SHAPES)], None)
    return [_table(tensors)], lambda rank: 0


JOBS = {"pp-tp-fsdp": pipeline, "experts": experts, "ddp": replicated}


def _measure(kind: str, ranks: int) -> dict[str, Any]:
    tables, class_of = JOBS[kind](ranks)
    data = [encode_table(table) for table in tables]
    names = [digest_of(one) for one in data]
    digests = [names[class_of(rank)] for rank in range(ranks)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    known = {name: decode_table(one) for name, one in zip(names, data, strict=True)}
    agreement = agree(digests, known)
    shares = agreement.shares(ranks // 2 + 1)
    planned = time.perf_counter() - began
    rank_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    began = time.perf_counter()
    manifest, files = _commit(agreement, ranks)
    committed = time.perf_counter() - began
    return {
        "job": kind, "ranks": ranks, "classes": len(tables), "plan_s": planned, "plan_mb": rank_mb,
        "own_parts": len(shares), "table_bytes": sum(map(len, data)), "commit_s": committed,
        "commit_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "manifest_bytes": len(manifest), "files": files,
    }  # fmt: skip


def _commit(agreement: Agreement, ranks: int) -> tuple[bytes, int]:
    """What the first rank does with the receipts of all: take them in, and write the manifest."""
    receipts = [
        msgspec.msgpack.encode([
            FileRecord(name=f"state-r{rank:05d}.safetensors", size_bytes=1 << 30,
                       header_bytes=1 << 20, header_digest="xxh3-128:" + "0" * 32, rank=rank)
        ])
        for rank in range(ranks)
    ]  # fmt: skip
    files = tuple(
        record
        for receipt in receipts
        for record in msgspec.msgpack.decode(receipt, type=list[FileRecord])
    )
    item = ItemRecord(name="state", kind="value", file=files[0].name,
                      tensors=len(agreement.keys), size_bytes=ranks << 30)  # fmt: skip
    record = Commit(run="0" * 32, step=1, epoch=1, attempt=1, created_s=0.0, laststep="0",
                    items=(item,), files=files, ranks=ranks)  # fmt: skip
    return encode(record), len(files)


def _measure_dcp(ranks: int) -> dict[str, Any]:
    """DCP's coordinator: the plans of all ranks, put together; FSDP over all of them."""
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
            items.append(WriteItem(
                index=MetadataIndex(f"t{number}", torch.Size(start)), type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties,
                                            size=torch.Size(shape)),
            ))  # fmt: skip
        plans.append(SavePlan(items))
    began = time.perf_counter()
    create_default_global_save_plan(dedup_save_plans(plans))
    seconds = time.perf_counter() - began
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"job": "dcp", "ranks": ranks, "commit_s": seconds, "commit_mb": memory}


def _row(row: dict[str, Any]) -> str:
    if row["job"] == "dcp":
        return (
            f"{row['ranks']:7} dcp          coordinator {row['commit_s']:7.3f} s "
            f"{row['commit_mb']:7.0f} MB (plans of all ranks put together)"
        )
    figures = [
        f"{row['ranks']:7} {row['job']:12}",
        f"rank {row['plan_s']:6.3f} s {row['plan_mb']:5.0f} MB, {row['own_parts']} parts;",
        f"coordinator {row['commit_s']:6.3f} s {row['commit_mb']:5.0f} MB;",
        f"tables {row['table_bytes'] / 1e6:.2f} MB,",
        f"manifest {row['manifest_bytes'] / 1e6:.2f} MB, {row['files']} files",
    ]
    return " ".join(figures)


if __name__ == "__main__":
    main()
