"""What planning and committing a save, and planning a load, cost in jobs of up to 131,072 ranks.

`python bench/scale.py`: one process plays one rank, the first one of a group, or the first of all,
with the very code that a save runs; the tables of all classes and the receipts of all ranks are
made up. 3,000 tensors with AdamW state in three layouts; nodes of eight ranks, each of which writes
three files. A job of the same size and one of half the size load. All of it is simulated: nothing
is written and nobody is asked over a network. DCP's planner does the same work on the sizes that it
can still do.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT), str(ROOT / "src")]

import msgspec  # noqa: E402

from laststep.format import group as grouping  # noqa: E402
from laststep.format.index import folder_of  # noqa: E402
from laststep.format.manifest import Commit, FileRecord, encode  # noqa: E402
from laststep.plan.layouts import (  # noqa: E402
    GlobalLayout,
    LocalItem,
    LocalLayout,
    LocalTensor,
    Replicas,
    agree,
    decode_local_layout,
    digest_of,
    encode_local_layout,
)
from laststep.plan.receipts import (  # noqa: E402  # noqa: E402
    Groups,
    ItemTally,
    Receipt,
    Summary,
    cut,
    items_of,
    layout_groups_of,
    objection_to,
    summarise,
)
from laststep.state.layouts import Layout, Mesh, Shard, Sharded  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

TENSORS = 3000
NODE = 8
FILES = ("model", "optimizer", "shared")
STAGES, TP = 16, 8
SHAPES = ((8192, 8192), (8192, 28672), (28672, 8192), (8192,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="512,8192,131072")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        kind, *numbers = chosen.one.split(":")
        print(json.dumps(_measure_one(kind, *map(int, numbers))))
        return
    rows = []
    for ranks in map(int, chosen.ranks.split(",")):
        for kind in (*JOBS, *(["dcp"] if ranks <= 512 else [])):
            rows.append(_alone(f"{kind}:{ranks}"))
            for loading in (ranks, ranks // 2) if kind in JOBS else ():
                sizes = f"{rows[-1]['manifest_bytes']}:{rows[-1]['group_bytes']}"
                loaded = _alone(f"{kind}:{ranks}:{loading}:{sizes}")
                rows[-1].setdefault("loads", []).append(loaded)
            print(_row(rows[-1]), flush=True)
    if chosen.json:
        from bench.hardware import commit

        report = {"kind": "scale", "commit": commit(ROOT), "date": time.strftime("%Y-%m-%d")}
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps({**report, "rows": rows}, indent=1))


def _alone(what: str) -> dict[str, Any]:
    """One measurement in a process of its own: peak memory is the process's."""
    command = [sys.executable, str(Path(__file__)), "--one", what]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)  # type: ignore[no-any-return]


def _measure_one(kind: str, ranks: int, *load: int) -> dict[str, Any]:
    if not load:
        return _measure_dcp(ranks) if kind == "dcp" else _measure(kind, ranks)
    from bench import scale_load

    loading, *metadata = load
    job = JOBS[kind]
    return scale_load.measure(job(ranks), ranks, job(loading), loading, cut(ranks, NODE), *metadata)


def _with_adamw(name: str, shape: tuple[int, ...], layout: Layout | None) -> list[LocalTensor]:
    known = Replicas.UNPROVEN if layout is None else Replicas.EQUAL
    return [
        LocalTensor(name, "bfloat16", shape, layout, known),
        *(
            LocalTensor(f"{name}.{m}", "float32", shape, layout, known)
            for m in ("exp_avg", "exp_avg_sq")
        ),
        LocalTensor(f"{name}.step", "float32", (), None, Replicas.UNPROVEN),
    ]


def _table(tensors: list[LocalTensor]) -> LocalLayout:
    return (LocalItem("state", "value", per_rank=False, tensors=tuple(tensors)),)


def pipeline(ranks: int) -> tuple[list[LocalLayout], Callable[[int], int]]:
    """PP16 x TP8 x FSDP2: stages of consecutive ranks; the embedding is tied to the last stage."""
    each = ranks // STAGES
    local_layouts = []
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
        local_layouts.append(_table(tensors))
    return local_layouts, lambda rank: rank // each


def experts(ranks: int) -> tuple[list[LocalLayout], Callable[[int], int]]:
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


def replicated(_: int) -> tuple[list[LocalLayout], Callable[[int], int]]:
    """Plain DDP."""
    tensors = []
    for number in range(TENSORS):
        tensors += _with_adamw(f"layers.{number}", SHAPES[number % len(SHAPES)], None)
    return [_table(tensors)], lambda rank: 0


JOBS = {"pp-tp-fsdp": pipeline, "experts": experts, "ddp": replicated}


def _measure(kind: str, ranks: int) -> dict[str, Any]:
    local_layouts, layout_group_of = JOBS[kind](ranks)
    data = [encode_local_layout(local_layout) for local_layout in local_layouts]
    names = [digest_of(one) for one in data]
    digests = [names[layout_group_of(rank)] for rank in range(ranks)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    known = {name: decode_local_layout(one) for name, one in zip(names, data, strict=True)}
    global_layout = agree(digests, known)
    shares = global_layout.assignments(ranks // 2 + 1)
    planned = time.perf_counter() - began
    rank_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "job": kind,
        "ranks": ranks,
        "classes": len(local_layouts),
        "plan_s": planned,
        "plan_mb": rank_mb,
        "own_parts": len(shares),
        "table_bytes": sum(map(len, data)),
        **_saved(global_layout, ranks),
    }


def _saved(global_layout: GlobalLayout, ranks: int) -> dict[str, Any]:
    """What the first rank of a group does with the receipts of its group, and the first of all with
    the summaries; what that costs, and what it writes."""
    groups = cut(ranks, NODE)
    alone = len(groups.leaders) == 1
    last = groups.leaders[-2:][0]
    notes = _receipts(global_layout, groups, last)
    own, leader_s, leader_mb = _timed(lambda: _gather(global_layout, notes))
    first = _receipts(global_layout, groups, 0)
    summaries = [
        msgspec.msgpack.encode(_gather(global_layout, _receipts(global_layout, groups, leader))[0])
        for leader in groups.leaders[1:]
    ]
    manifest, commit_s, commit_mb = _timed(lambda: _commit(global_layout, groups, first, summaries))
    entries: dict[str, set[str]] = {}
    for rank in range(ranks):
        folder = folder_of(rank, ranks)
        entries.setdefault(folder, set()).update(f"{name}{rank}" for name in FILES)
    top = len(entries.pop("", ())) + len(entries) + (1 if alone else 2)
    return {
        "groups": len(groups.leaders),
        "leader_s": leader_s,
        "leader_mb": leader_mb,
        "commit_s": commit_s,
        "commit_mb": commit_mb,
        "manifest_bytes": len(manifest),
        "group_bytes": 0 if alone else len(own[1]),
        "files": ranks * len(FILES),
        "largest_folder": max(top, len(groups.leaders), *(len(e) for e in entries.values()), 0),
    }


def _timed(act: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it gives, how long that takes, and how many MB of Python's memory at most."""
    began = time.perf_counter()
    result = act()
    seconds = time.perf_counter() - began
    tracemalloc.start()
    act()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, seconds, most / 1e6


def _receipts(global_layout: GlobalLayout, groups: Groups, leader: int) -> list[bytes]:
    return [_receipt(global_layout, rank, groups.ranks) for rank in groups.group_of(leader)]


def _receipt(global_layout: GlobalLayout, rank: int, ranks: int) -> bytes:
    names = [f"{folder_of(rank, ranks)}{name}-r{rank:05d}.safetensors" for name in FILES]
    files = tuple(
        FileRecord(
            name=name,
            size_bytes=1 << 30,
            header_bytes=1 << 20,
            header_digest="xxh3-128:" + "0" * 32,
            rank=rank,
        )
        for name in names
    )
    items = {
        item: ItemTally(kind="value", per_rank=False, tensors=1000, size_bytes=1 << 30, file=name)
        for item, name in zip(FILES, names, strict=True)
    }
    trees = dict.fromkeys(FILES, b"0" * 16)
    return msgspec.msgpack.encode(
        Receipt(global_layout=global_layout.digest, files=files, items=items, trees=trees)
    )


def _gather(global_layout: GlobalLayout, notes: list[bytes]) -> tuple[Summary, bytes]:
    """What the first rank of a group does: a summary, and the manifest of the group."""
    decode = msgspec.msgpack.Decoder(Receipt).decode
    found = [decode(note) for note in notes]
    receipts = {receipt.files[0].rank: receipt for receipt in found}
    manifest = grouping.GroupManifest(
        step=1,
        term=1,
        attempt=1,
        first=min(receipts),
        ranks=len(receipts),
        files=tuple(file for receipt in found for file in receipt.files),
    )
    record, data = grouping.encode(manifest)
    return msgspec.structs.replace(summarise(receipts, global_layout), group=record), data


def _commit(
    global_layout: GlobalLayout, groups: Groups, notes: list[bytes], summaries: list[bytes]
) -> bytes:
    """What the first rank does: its own group, all summaries, and the manifest."""
    decode = msgspec.msgpack.Decoder(Summary).decode
    every = [_gather(global_layout, notes)[0], *map(decode, summaries)]
    objection = objection_to(every, global_layout)
    if objection:
        raise RuntimeError(objection)
    files: tuple[FileRecord, ...] = ()
    if len(every) == 1:
        some = [msgspec.msgpack.decode(note, type=Receipt).files for note in notes]
        files = tuple(file for one in some for file in one)
    record = Commit(
        run="0" * 32,
        step=1,
        term=1,
        attempt=1,
        created_s=0.0,
        laststep="0",
        files=files,
        items=items_of(every, global_layout),
        ranks=groups.ranks,
        classes=layout_groups_of(global_layout),
        groups=() if files else tuple(one.group for one in every if one.group is not None),
    )
    return encode(record)


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
        f"leader {row['leader_s']:6.3f} s {row['leader_mb']:3.0f} MB,",
        f"coordinator {row['commit_s']:6.3f} s {row['commit_mb']:3.0f} MB;",
        f"tables {row['table_bytes'] / 1e6:.2f} MB, manifest {row['manifest_bytes'] / 1e6:.3f} MB,",
        f"{row['groups']} groups of {row['group_bytes'] / 1e6:.3f} MB, {row['files']} files,",
        f"{row['largest_folder']} in a folder",
    ]
    figures += [
        f"\n        loaded by {one['ranks']}: {one['seconds']:6.3f} s {one['mb']:5.0f} MB, "
        f"{one['chunks']} chunks of {one['files']} ranks' files, "
        f"{one['metadata_bytes'] / 1e6:.2f} MB of metadata"
        for one in row["loads"]
    ]
    return " ".join(figures)


if __name__ == "__main__":
    main()
