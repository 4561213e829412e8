"""A run as storage of torch.distributed.checkpoint, saved and loaded by real ranks with gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import laststep
from expect import raises
from laststep.catalog.run import Run
from laststep.dcp import Reader, Writer
from laststep.storage.directory import DirectoryStore

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    # Of torch.distributed.checkpoint itself, in a process that is no rank.
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]

COMMON = """
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import laststep
from laststep.dcp import Reader, Writer

torch.set_num_threads(1)


def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(13, 17), torch.nn.ReLU(), torch.nn.Linear(17, 5), torch.nn.Linear(5, 1)
    )
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def train(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 13)).square().sum().backward()
        optimizer.step()


def full(value):
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, dict):
        return {key: full(inner) for key, inner in value.items()}
    return value


def state_of(model, optimizer, step):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "step": step}


def load(step=None):
    model, optimizer = build(99)
    state = state_of(model, optimizer, None)
    dcp.load(state, storage_reader=Reader(run, step))
    set_state_dict(model, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optim"])
    return full(state_of(model, optimizer, state["step"]))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


if __name__ == "__main__":
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run, given = Path(sys.argv[1]), Path(sys.argv[1]).parent
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (ranks,))
    main()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo's that has not ended yet makes the usual way out a SIGABRT
"""


def start(count: int, body: str, run: Path) -> list[tuple[int, str]]:
    """Run `main` of `body` on that many ranks: status and output of each."""
    head, tail = COMMON.split('\nif __name__ == "__main__":')
    script = run.parent / "script.py"
    script.write_text(head + textwrap.dedent(body) + '\nif __name__ == "__main__":' + tail)
    # Hosted here, under a port that nobody else can take before a rank has it.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    processes = [
        subprocess.Popen(
            [os.environ["WARM_PYTHON"], str(script), str(run)],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    told = [""] * count

    def listen(rank: int) -> None:
        told[rank] = processes[rank].communicate(timeout=240)[0]

    threads = [threading.Thread(target=listen, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        process.kill()
    return [(process.wait(), text) for process, text in zip(processes, told, strict=True)]


def run_ranks(count: int, body: str, run: Path) -> None:
    for status, text in start(count, body, run):
        assert status == 0, text


@pytest.mark.long
def test_fsdp_from_two_ranks_to_three_to_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(
        2,
        """
        def main():
            model, optimizer = build(0)
            train(model, optimizer)
            state = state_of(model, optimizer, 7)
            dcp.save(state, storage_writer=Writer(run, step=7))
            torch.save(full(state), given / f"full-{rank}.pt")
            assert same(load(), full(state))
        """,
        run,
    )
    wanted = torch.load(tmp_path / "full-0.pt")
    run_ranks(
        3,
        """
        def main():
            wanted = torch.load(given / "full-0.pt")
            assert same(load(), wanted)
            model, optimizer = build(3)
            state = state_of(model, optimizer, None)
            dcp.load(state, storage_reader=Reader(run))
            dcp.save(state, storage_writer=Writer(run, step=8))
            assert same(load(8), wanted)
        """,
        run,
    )
    for step, ranks in ((7, 2), (8, 3)):
        checkpoint = laststep.open(run)[step]
        assert checkpoint.verify().damage == ()
        assert checkpoint.content().commit.ranks == ranks
        got: Any = laststep.load(run, step=step)
        torch.testing.assert_close(got["model"], dict(wanted["model"]), rtol=0, atol=0)
        moments = got["optim"]["state"]["0.weight"]["exp_avg"]
        assert torch.equal(moments, wanted["optim"]["state"]["0.weight"]["exp_avg"])
        assert got["step"] == 7
    into = {"model": {name: torch.zeros_like(t) for name, t in wanted["model"].items()}}
    dcp.load(into, storage_reader=Reader(run))
    torch.testing.assert_close(into["model"], dict(wanted["model"]), rtol=0, atol=0)
    model = torch.nn.Sequential(
        torch.nn.Linear(13, 17), torch.nn.ReLU(), torch.nn.Linear(17, 5), torch.nn.Linear(5, 1)
    )
    with laststep.Checkpointer(
        run, model=model, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        assert ckpt.restore(only=["model"]).step == 8
    torch.testing.assert_close(dict(model.state_dict()), dict(wanted["model"]), rtol=0, atol=0)


def test_every_way_of_sharding_loads_into_every_other(tmp_path: Path) -> None:
    run_ranks(
        2,
        """
        WAYS = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}
        SHAPES = {"even": (6, 4), "uneven": (5, 3), "one row": (1, 3), "no rows": (0, 3),
                  "large": (700, 1500)}

        def made(shape, placements, value):
            tensor = value if value is not None else torch.zeros(shape)
            return distribute_tensor(tensor, mesh, placements)

        def main():
            torch.manual_seed(1)
            whole = {key: torch.randn(shape) for key, shape in SHAPES.items()}
            state = {
                way: {key: made(None, placements, t) for key, t in whole.items()}
                for way, placements in WAYS.items()
            }
            state["plain"] = dict(whole)
            state["of rank"] = {f"rank {rank}": torch.full((3,), rank), f"value {rank}": rank}
            dcp.save(state, storage_writer=Writer(run, step=0))
            for stored in (*WAYS, "plain"):
                for way, placements in WAYS.items():
                    into = {stored: {k: made(s, placements, None) for k, s in SHAPES.items()}}
                    dcp.load(into, storage_reader=Reader(run))
                    assert same(full(into[stored]), whole), (stored, way)
                into = {stored: {k: torch.zeros(s) for k, s in SHAPES.items()}}
                dcp.load(into, storage_reader=Reader(run))
                assert same(into[stored], whole), stored
            other = 1 - rank
            into = {"of rank": {f"rank {other}": torch.zeros(3), f"value {other}": None}}
            dcp.load(into, storage_reader=Reader(run))
            assert into["of rank"][f"value {other}"] == other
            assert into["of rank"][f"rank {other}"].tolist() == [other] * 3
        """,
        tmp_path / "run",
    )
    got: Any = laststep.load(tmp_path / "run")
    assert list(got) == ["model"]  # "of rank" is no name of an item
    got = got["model"]
    for way in ("rows", "columns", "copies"):
        torch.testing.assert_close(got[way], got["plain"], rtol=0, atol=0)
    assert got["of rank"].keys() == {"rank 0", "rank 1", "value 0", "value 1"}
    assert laststep.open(tmp_path / "run").latest().verify().damage == ()


def test_the_coordinator_writes_the_indexes_of_ranks_that_have_nothing_to_write(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run_ranks(
        3,
        """
        def main():
            state = {"a": {"w": torch.arange(5.0), "none": torch.zeros(0, 4)}, "n": 7}
            dcp.save(state, storage_writer=Writer(run, step=1))
            into = {"a": {"w": torch.zeros(5), "none": torch.ones(0, 4)}, "n": 0}
            dcp.load(into, storage_reader=Reader(run))
            assert into["a"]["w"].tolist() == [0, 1, 2, 3, 4] and into["n"] == 7
        """,
        run,
    )
    [folder] = run.glob("step-*")
    wrote = [path.name for path in folder.glob("*-r*.safetensors")]
    assert len(wrote) < 3, "some rank has nothing to write, or this shows nothing"
    # The last is the coordinator's own.
    indexes = sorted(path.name for path in folder.glob("index-*"))
    assert indexes == [f"index-r{number:05}" for number in range(4)]
    checkpoint = laststep.open(run).latest()
    commit = checkpoint.content().commit
    assert (commit.ranks, commit.index_count) == (3, 4)
    assert checkpoint.verify().damage == ()
    loaded: Any = laststep.load(run)
    assert loaded["a"]["w"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["a"]["none"].shape == (0, 4)


@pytest.mark.long
def test_ranks_save_in_the_background(tmp_path: Path) -> None:
    run_ranks(
        2,
        """
        def main():
            model, optimizer = build(0)
            train(model, optimizer)
            kinds = [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS]
            step = 0
            for kind in (*kinds, *kinds):
                step += 1
                state = state_of(model, optimizer, step)
                wanted = full(state)
                done = dcp.async_save(state, storage_writer=Writer(run, step=step),
                                      async_checkpointer_type=kind)
                done.result()
                assert same(load(), wanted)
                train(model, optimizer)
            step += 1
            dcp.save(state_of(model, optimizer, step), storage_writer=Writer(run, step=step))
            try:
                dcp.async_save(state, storage_writer=Writer(run, step=step),
                               async_checkpointer_type=kinds[1]).result()
            except BaseException as error:
                assert "AlreadyExistsError" in str(error)
            else:
                raise AssertionError("a step was saved twice")
        """,
        tmp_path / "run",
    )
    assert laststep.open(tmp_path / "run").steps() == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_a_planner_may_keep_the_plans_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(
        2,
        """
        def main():
            for step in range(4):
                size = 8 if step < 3 else 10
                whole = torch.arange(float(size)) + step
                state = {"model": {"w": distribute_tensor(whole, mesh, [Shard(0)])}, "n": step}
                # Torch's own storage finds plans that were kept for a run, and the other way round.
                for storage in ({"storage_writer": Writer(run, step=step)},
                                {"checkpoint_id": given / "stock"},
                                {"storage_writer": Writer(given / "sole")}):
                    planner = DefaultSavePlanner(enable_plan_caching=True)
                    dcp.save(state, planner=planner, **storage)
                for path in (given / "stock", given / "sole"):
                    into = {"model": {"w": distribute_tensor(torch.zeros(size), mesh, [Shard(0)])},
                            "n": None}
                    dcp.load(into, storage_reader=Reader(path))
                    assert same(full(into), full(state)), (path, into)
                into = {"model": {"w": distribute_tensor(torch.zeros(size), mesh, [Shard(0)])},
                        "n": None}
                dcp.load(into, storage_reader=Reader(run))
                assert same(full(into), full(state)), (step, into)
        """,
        tmp_path / "run",
    )


def test_ranks_save_for_themselves_without_collectives(tmp_path: Path) -> None:
    run_ranks(
        2,
        """
        def main():
            for value, step in ((1, None), (2, None), (3, 7)):
                whole = torch.arange(15.0).view(5, 3) * value
                state = {"model": {"w": distribute_tensor(whole, mesh, [Shard(0)]),
                                   "row": distribute_tensor(whole[:1], mesh, [Shard(0)]),
                                   "plain": torch.full((3,), rank * value)},
                         "n": rank * value}
                path = run if step is None else given / "steps"
                dcp.save(state, storage_writer=Writer(path, step=step), use_collectives=False)
                into = {"model": {"w": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]),
                                  "row": distribute_tensor(torch.zeros(1, 3), mesh, [Shard(0)]),
                                  "plain": torch.zeros(3, dtype=torch.int64)},
                        "n": None}
                dcp.load(into, storage_reader=Reader(path))
                assert same(full(into), full(state)), into
            stock = given / "stock"
            dcp.save(state, checkpoint_id=stock, use_collectives=False)
            into["model"]["w"].zero_()
            dcp.load(into, storage_reader=Reader(stock))
            assert same(full(into), full(state)), into
            try:
                dcp.save(state, storage_writer=Writer(run))
            except CheckpointException as error:
                assert "collectives" in str(error)
            else:
                raise AssertionError("two ways of saving were mixed")
        """,
        tmp_path / "run",
    )
    own = tmp_path / "run" / "rank-00001"
    assert sorted(path.name for path in own.parent.iterdir()) == ["rank-00000", own.name]
    assert len(list(own.glob("step-*"))) == 1
    assert laststep.open(own).latest().verify().damage == ()
    got: Any = laststep.load(own)
    assert got["model"]["w"]["at 3,0"].tolist() == (torch.arange(15.0).view(5, 3) * 2)[3:].tolist()
    into = {"model": {"plain": torch.zeros(3, dtype=torch.int64)}}
    dcp.load(into, storage_reader=Reader(tmp_path / "run"))  # rank 0's
    assert into["model"]["plain"].tolist() == [0, 0, 0]


def test_a_rank_that_fails_fails_the_save_of_all(tmp_path: Path) -> None:
    run_ranks(
        2,
        """
        class Failing(DefaultSavePlanner):
            def resolve_data(self, item):
                if rank == who:
                    raise OSError(f"rank {rank} cannot")
                return super().resolve_data(item)

        def main():
            global who
            model, optimizer = build(0)
            state = {"model": get_state_dict(model, optimizer)[0]}
            dcp.save(state, storage_writer=Writer(run, step=0))
            for who in (1, 0):
                try:
                    dcp.save(state, storage_writer=Writer(run, step=1), planner=Failing())
                except CheckpointException as error:
                    assert f"rank {who} cannot" in str(error)
                    assert error.failures.keys() == {who}
                else:
                    raise AssertionError("the save did not fail")
                assert laststep.open(run).steps() == [0]
            dist.barrier()
            try:
                dcp.save(state, storage_writer=Writer(run, step=0))
            except CheckpointException as error:
                assert "AlreadyExistsError" in str(error)
            else:
                raise AssertionError("the save did not fail")
            try:
                dcp.save(state, storage_writer=Writer(run, step=1), use_collectives=False)
            except laststep.UsageError as error:
                assert "collectives" in str(error)
            else:
                raise AssertionError("the save did not fail")
            if rank == 0:
                try:
                    dcp.save(state, storage_writer=Writer(run, step=1), no_dist=True)
                except CheckpointException as error:
                    assert "CorruptError" in str(error) or "UsageError" in str(error)
                else:
                    raise AssertionError("the save did not fail")
                plain = {"model": {"w": torch.ones(3)}}
                dcp.save(plain, storage_writer=Writer(run, step=1), no_dist=True)
                into = {"model": {"w": torch.zeros(3)}}
                dcp.load(into, storage_reader=Reader(run), no_dist=True)
                assert same(into, plain)
            dist.barrier()
            dcp.save(state, storage_writer=Writer(run, step=2))
        """,
        tmp_path / "run",
    )
    run = tmp_path / "run"
    assert laststep.open(run).steps() == [0, 1, 2]
    assert len(list(run.glob("step-*"))) == 3
    assert Run.open(DirectoryStore(run)).attempts() == ()


@pytest.mark.long
def test_a_killed_rank_leaves_nothing_visible(tmp_path: Path) -> None:
    run = tmp_path / "run"
    told = start(
        2,
        """
        class Dying(DefaultSavePlanner):
            def resolve_data(self, item):
                if rank == 1:
                    os.kill(os.getpid(), 9)
                return super().resolve_data(item)

        def main():
            state = {"w": distribute_tensor(torch.ones(8), mesh, [Shard(0)])}
            dcp.save(state, storage_writer=Writer(run, step=0))
            dcp.save(state, storage_writer=Writer(run, step=1), planner=Dying())
        """,
        run,
    )
    assert told[1][0] == -signal.SIGKILL, told[1][1]
    assert told[0][0] != 0
    assert laststep.open(run).steps() == [0]
    into = {"w": torch.zeros(8)}
    dcp.load(into, storage_reader=Reader(run))
    assert into["w"].tolist() == [1] * 8
    dcp.save(into, storage_writer=Writer(run, step=1))
    assert len(list(run.glob("step-*"))) == 2


@pytest.mark.long
def test_what_a_checkpointer_of_two_ranks_wrote_is_loaded_by_one_and_by_three(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run_ranks(
        2,
        """
        def main():
            model, optimizer = build(0)
            train(model, optimizer)
            with laststep.Checkpointer(run, model=model, optim=optimizer) as ckpt:
                ckpt.save(7).wait()
            if rank == 0:
                torch.save(full(model.state_dict()), given / "full.pt")
            else:
                full(model.state_dict())
            state = state_of(model, optimizer, 0)
            del state["step"]
            torch.save(full(state), given / f"full-{rank}.pt")
        """,
        run,
    )
    wanted = torch.load(tmp_path / "full-0.pt")
    into = {"model": {name: torch.zeros_like(t) for name, t in wanted["model"].items()}}
    dcp.load(into, storage_reader=Reader(run))
    torch.testing.assert_close(into["model"], dict(wanted["model"]), rtol=0, atol=0)
    run_ranks(
        3,
        """
        def main():
            wanted = torch.load(given / "full-0.pt")
            model, optimizer = build(99)
            state = state_of(model, optimizer, None)
            del state["step"]
            dcp.load(state, storage_reader=Reader(run))
            assert same(full(state), wanted)
        """,
        run,
    )


@pytest.mark.long
def test_ranks_that_find_different_checkpoints_are_told(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer(tmp_path, step=step))
    plans = []
    for step in (1, 2):
        reader = Reader(tmp_path, step)
        planner = dcp.DefaultLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner({"w": torch.zeros(1)}, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    with raises(laststep.AbortedError, found=True):
        reader.prepare_global_plan(plans)
