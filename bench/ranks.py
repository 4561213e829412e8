"""Measure a job of several ranks on one machine: `python bench/ranks.py --ranks 2,4`.

FSDP2 state with AdamW on the CPU, over gloo. Save and load of laststep and of DCP take turns on the
same state in the same processes; a save counts until it is durable on all ranks and committed, a
load from cold files until every rank has its part. Times are those of the slowest rank. In every
repetition the disk alone writes and reads as much, in the way that suits it best.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, e.g. 2,4")
    parser.add_argument("--gb", type=float, default=1.0, help="size of the whole state")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker is not None:
        _work(chosen, int(chosen.ranks))
        return
    from bench.hardware import commit, hardware

    results = []
    for ranks in map(int, chosen.ranks.split(",")):
        results.append(_run(chosen, ranks))
        print(_table(results[-1]), flush=True)
    report = {
        "kind": "ranks",
        "commit": commit(ROOT),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": asdict(hardware(chosen.dir)),
        "results": results,
    }
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(report, indent=1))


def _run(chosen: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """All measurements of one number of ranks, in processes of their own."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="laststep-ranks-", dir=chosen.dir))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__)),
        "--ranks",
        str(ranks),
        "--gb",
        str(chosen.gb),
        "--reps",
        str(chosen.reps),
        "--dir",
        str(folder),
        "--port",
        str(port),
    ]
    try:
        workers = [
            subprocess.Popen([*command, "--worker", str(rank)], env=env, stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        out = [worker.communicate(timeout=1800)[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise SystemExit("a worker failed")
        return json.loads(out[0])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _work(chosen: argparse.Namespace, ranks: int) -> None:  # noqa: C901, PLR0915 (one script)
    """One rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import laststep
    from bench.files import make_cold, remove
    from bench.raw import sample, scan

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{chosen.port}", rank=chosen.worker, world_size=ranks
    )
    layers = max(int(chosen.gb * 1e9 / (3 * 4 * WIDTH * WIDTH)), 1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        """Change all of the state: what stays as it was is not written again."""
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    train()
    size = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    found: dict[str, dict[str, list[float]]] = {}

    def timed(peer: str, what: str, seconds: float) -> None:
        slowest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.setdefault(peer, {}).setdefault(what, []).append(float(slowest))

    def cold(path: Path) -> None:
        dist.barrier()
        if chosen.worker == 0:
            make_cold(path)
        dist.barrier()

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def raw(folder: Path) -> None:
        """The disk alone, driven by the first rank while the others wait."""
        dist.barrier()
        if chosen.worker == 0:
            one = sample(folder, size, limits.best_write, limits.best_read)
            times = found.setdefault("raw disk", {})
            times.setdefault("write", []).append(one.write_s * size / one.size_bytes)
            times.setdefault("read", []).append(one.read_s * size / one.size_bytes)
        dist.barrier()

    if chosen.worker == 0:
        limits = scan(chosen.dir / "scan", size)
    for rep in range(chosen.reps):
        raw(chosen.dir / f"raw{rep}")
        run = chosen.dir / f"run{rep}"
        with laststep.Checkpointer(
            run, model=model, optimizer=optimizer, options=laststep.Options(progress=False)
        ) as ckpt:
            for step, name in ((0, "first"), (1, "next")):
                train()
                dist.barrier()
                began = time.perf_counter()
                handle = ckpt.save(step)
                timed("laststep", f"{name} save() returned", time.perf_counter() - began)
                handle.wait()
                timed("laststep", f"{name} durable", time.perf_counter() - began)
        cold(run)
        began = time.perf_counter()
        with laststep.Checkpointer(
            run, model=model, optimizer=optimizer, options=laststep.Options(progress=False)
        ) as ckpt:
            ckpt.restore()
            timed("laststep", "load", time.perf_counter() - began)
        folder = chosen.dir / f"dcp{rep}"
        dist.barrier()
        began = time.perf_counter()
        dcp.save(state(), checkpoint_id=str(folder))
        timed("dcp", "durable", time.perf_counter() - began)
        cold(folder)
        began = time.perf_counter()
        dcp.load(state(), checkpoint_id=str(folder))
        timed("dcp", "load", time.perf_counter() - began)
        dist.barrier()
        if chosen.worker == 0:
            remove(run)
            remove(folder)
        dist.barrier()
    if chosen.worker == 0:
        print(json.dumps({"ranks": ranks, "size_bytes": size, "seconds": found}))
    dist.destroy_process_group()


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['ranks']} ranks, {result['size_bytes'] / 1e9:.2f} GB in all"]
    median = {
        (peer, what): statistics.median(seconds)
        for peer, times in result["seconds"].items()
        for what, seconds in times.items()
    }
    for (peer, what), seconds in median.items():
        all_of_it = result["seconds"][peer][what]
        rate = result["size_bytes"] / seconds / 1e9
        lines.append(
            f"  {peer:9} {what:22} {seconds:7.3f} s ({min(all_of_it):.3f} to {max(all_of_it):.3f}),"
            f" {rate:.2f} GB/s"
        )
    save, load = median["laststep", "next durable"], median["laststep", "load"]
    lines.append(
        f"  laststep is {median['dcp', 'durable'] / save:.2f} times as fast to save, "
        f"{median['dcp', 'load'] / load:.2f} times to load; the disk alone would be "
        f"{median['dcp', 'durable'] / median['raw disk', 'write']:.2f} and "
        f"{median['dcp', 'load'] / median['raw disk', 'read']:.2f} times"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "src")]
    main()
