"""A replica may take only some items: what lies there is a partial checkpoint, and says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

import laststep
from expect import raises
from laststep import events
from laststep.catalog.attempt import read_decision
from laststep.catalog.run import Run
from laststep.errors import (
    AlreadyExistsError,
    CorruptError,
    MismatchError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.format import manifest
from laststep.settings import as_keywords
from laststep.storage.directory import DirectoryStore
from laststep.tiers.copying import Copier
from laststep.tiers.replicas import replica_status
from laststep.tiers.tier import Tier
from waiting import wait_until

if TYPE_CHECKING:
    from laststep.format.manifest import Commit


GOLDEN = Path(__file__).resolve().parent.parent / "golden"
GOLDEN_RUNS = sorted(path.parent for path in GOLDEN.glob("version-*/*/run.json"))


class Training:
    """A model, its optimizer and a small loader, at the primary, and parts of them elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.primary, self.weights, self.far = (
            folder / name for name in ("primary", "weights", "far")
        )
        self.model = {"w": torch.zeros(1 << 19), "b": torch.zeros(3)}
        self.optimizer = {"m": torch.zeros(1 << 20)}
        self.loader = {"at": 0, "order": torch.zeros(5)}
        self.heard: list[events.Event] = []

    def open(self, *tiers: Tier | str, **settings: object) -> laststep.Checkpointer:
        replicas = tiers or (Tier(str(self.weights), items=("model",)),)
        how: dict[str, object] = {"flush": "thread", "progress": False, **settings}
        return laststep.Checkpointer(
            tiers=[str(self.primary), *replicas],
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            **as_keywords({"subscribers": [self.heard.append], **how}),
        )  # type: ignore[call-overload]

    def save(self, ckpt: laststep.Checkpointer, step: int) -> None:
        self.set(step)
        ckpt.save(step).result()

    def set(self, value: int) -> None:
        for tensor in (*self.model.values(), *self.optimizer.values(), self.loader["order"]):
            tensor.fill_(value)
        self.loader["at"] = value

    def wait_for(self, step: int) -> None:
        wait_until(lambda: step in [e.step for e in self.heard if isinstance(e, events.TierHolds)])

    def model_is(self, step: int) -> bool:
        return all(bool((tensor == step).all()) for tensor in self.model.values())

    def rest_is(self, step: int) -> bool:
        return bool((self.optimizer["m"] == step).all()) and self.loader["at"] == step


@pytest.fixture
def training(run_folder: Path) -> Training:
    run_folder.mkdir()
    return Training(run_folder)


@pytest.fixture
def saved(training: Training) -> Training:
    """Two steps, both at the primary, of which the model is replicated."""
    with training.open() as ckpt:
        ckpt.restore()
        for step in (1, 2):
            training.save(ckpt, step)
            training.wait_for(step)
    return training


def commit_of(run: Path, step: int = 2) -> Commit:
    store = DirectoryStore(run)
    [listed] = [one for one in Run.open(store).checkpoints() if one.step == step]
    assert listed.commit is not None
    return listed.commit


def test_a_tier_holds_only_the_items_that_it_takes(saved: Training) -> None:
    checkpoint = laststep.open(saved.weights)[2]
    assert checkpoint.items() == ["model"]
    assert checkpoint.omitted_items == ("loader", "optimizer")
    assert checkpoint.tensors() == ["model/w", "model/b"]
    assert bool((checkpoint.tensor("model/w")[:] == 2).all())
    assert checkpoint.verify().damage == ()
    assert laststep.open(saved.primary)[2].omitted_items == ()
    [folder] = saved.weights.glob("step-00000002.*")
    assert not (folder / "optimizer.safetensors").exists()


def test_the_manifest_of_an_excerpt_is_one_of_its_own(saved: Training) -> None:
    whole, partial = commit_of(saved.primary), commit_of(saved.weights)
    assert partial.run == whole.run
    assert partial.index_count == whole.index_count == 1
    assert partial.index_digest(0) != whole.index_digest(0)
    [folder] = saved.weights.glob("step-00000002.*")
    stored = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert (partial.written.files, partial.written.size_bytes) == (len(stored), sum(stored))
    assert partial.written.size_bytes < whole.written.size_bytes
    assert [item.name for item in partial.items] == ["model"]


def test_all_commands_of_a_run_work_on_an_excerpt(saved: Training, run_folder: Path) -> None:
    assert laststep.open(saved.weights).steps() == [1, 2]
    loaded = laststep.load(saved.weights)
    assert isinstance(loaded, dict)
    assert list(loaded) == ["model"]
    target = {"model": {"w": torch.zeros(1 << 19), "b": torch.zeros(3)}}
    laststep.load(saved.weights, into=target)
    assert bool((target["model"]["w"] == 2).all())
    laststep.copy(saved.weights, run_folder / "again")
    assert commit_of(run_folder / "again") == commit_of(saved.weights)


def test_a_copy_of_some_items_is_the_same_excerpt(saved: Training, run_folder: Path) -> None:
    report = laststep.copy(saved.primary, run_folder / "copied", items=("model",))
    assert len(report.copied) == 2
    assert commit_of(run_folder / "copied") == commit_of(saved.weights)
    again = laststep.copy(saved.primary, run_folder / "copied", items=("model",))
    assert (again.copied, len(again.there)) == ((), 2)


def test_an_excerpt_of_an_excerpt_is_that_of_the_whole(saved: Training, run_folder: Path) -> None:
    laststep.copy(saved.primary, run_folder / "two", items=("model", "loader"))
    laststep.copy(run_folder / "two", run_folder / "one", items=("model",))
    assert commit_of(run_folder / "one") == commit_of(saved.weights)


def test_a_copy_of_all_items_is_the_original(saved: Training, run_folder: Path) -> None:
    laststep.copy(saved.primary, run_folder / "all", items=("loader", "model", "optimizer"))
    assert commit_of(run_folder / "all") == commit_of(saved.primary)


def test_a_copy_of_items_that_are_not_there_names_those_that_are(
    saved: Training, run_folder: Path
) -> None:
    with raises(NotFoundError, "'ema'", found="model, optimizer, loader"):
        laststep.copy(saved.primary, run_folder / "copied", items=("ema",))
    assert not (run_folder / "copied").exists()


def test_the_whole_does_not_go_where_an_excerpt_of_it_lies(saved: Training) -> None:
    with raises(AlreadyExistsError, where=saved.weights):
        laststep.copy(saved.primary, saved.weights)
    with pytest.raises(AlreadyExistsError):
        laststep.copy(saved.weights, saved.primary)


# What a tier may take


def test_a_misspelt_item_is_refused_with_those_that_there_are(training: Training) -> None:
    with raises(
        UsageError,
        where=None,
        found="'modle'",
        expected="model, optimizer, loader",
        remedy="'model'",
    ):
        training.open(Tier(str(training.weights), items=("modle",)))
    assert not training.primary.exists()


@pytest.mark.parametrize("items", [(), "model", (1,)])
def test_items_are_names(items: object) -> None:
    with pytest.raises(UsageError, match="items"):
        Tier("far", items=items)  # type: ignore[arg-type]


def test_the_home_and_shared_memory_take_all_items(training: Training) -> None:
    primary = Tier(str(training.primary), items=("model",))
    with raises(UsageError, found=str(training.primary)):
        laststep.Checkpointer(tiers=[primary, "far"], model=training.model)
    memory = Tier("shm://", items=("model",))
    with raises(UsageError, found="'shm://'"):
        laststep.Checkpointer(tiers=[memory, str(training.primary)], model=training.model)


# What is restored of it


def test_an_excerpt_is_never_restored_as_the_whole(saved: Training) -> None:
    with laststep.Checkpointer(
        saved.weights, model=saved.model, options=laststep.Options(flush="thread")
    ) as ckpt:
        for how in ({}, {"strict": False}, {"step": 1}):
            with raises(MismatchError, remedy="only=['model']") as caught:
                ckpt.restore(**how)  # type: ignore[arg-type]
            assert caught.value.problems.missing == ("loader", "optimizer")
        saved.set(9)
        assert ckpt.restore(only=["model"]).step == 2
    assert saved.model_is(2)
    assert saved.rest_is(9)


@pytest.mark.parametrize("items", [["model"], ["model", "optimizer", "loader"]])
def test_a_job_may_go_on_where_an_excerpt_lies(saved: Training, items: list[str]) -> None:
    state = {item: getattr(saved, item) for item in items}
    with laststep.Checkpointer(
        saved.weights, items=state, options=laststep.Options(flush="thread")
    ) as ckpt:
        assert ckpt.restore(only=["model"]).step == 2
        saved.model["b"].fill_(3)
        ckpt.save(3).result()
        assert ckpt.restore().step == 3
    newest = laststep.open(saved.weights).latest()
    assert (newest.items(), newest.omitted_items) == (items, ())
    assert newest.verify().damage == ()
    assert bool((newest.tensor("model/b")[:] == 3).all())
    assert bool((newest.tensor("model/w")[:] == 2).all())


def test_an_item_that_was_left_out_cannot_be_restored(saved: Training) -> None:
    with laststep.Checkpointer(
        saved.weights,
        model=saved.model,
        optimizer=saved.optimizer,
        options=laststep.Options(flush="thread"),
    ) as ckpt:
        for only in (["optimizer"], ["model", "optimizer/m"], "*"):
            with pytest.raises(MismatchError, match="optimizer"):
                ckpt.restore(only=only)


def test_a_home_that_is_lost_does_not_look_like_a_new_run(saved: Training) -> None:
    shutil.rmtree(saved.primary)
    with saved.open() as ckpt, raises(UsageError, saved.weights, where=saved.primary):
        ckpt.restore()
    with laststep.Checkpointer(str(saved.weights), model=saved.model) as ckpt:
        saved.set(9)
        assert ckpt.restore(only=["model"]).step == 2
    assert saved.model_is(2)


def test_of_two_tiers_the_one_with_all_items_brings_the_whole_back(training: Training) -> None:
    tiers = Tier(str(training.weights), items=("model",)), str(training.far)
    with training.open(*tiers) as ckpt:
        ckpt.restore()
        training.save(ckpt, 1)
    shutil.rmtree(training.primary)
    with training.open(*tiers) as ckpt:
        assert ckpt.restore().step == 1
        training.save(ckpt, 2)
    assert commit_of(training.primary, 2).omitted_items == ()


def test_an_older_whole_counts_before_a_newer_excerpt(saved: Training) -> None:
    shutil.rmtree(next(saved.primary.glob("step-00000002.*")))
    with saved.open() as ckpt:
        assert ckpt.restore().step == 1


# Other settings at the next start


def test_the_next_start_may_take_other_items(saved: Training) -> None:
    with saved.open(Tier(str(saved.weights), items=("model", "loader"))) as ckpt:
        ckpt.restore()
        saved.save(ckpt, 3)
        saved.wait_for(3)
    with saved.open(str(saved.weights)) as ckpt:
        ckpt.restore()
        saved.save(ckpt, 4)
        saved.wait_for(4)
    omitted_items = [one.omitted_items for one in laststep.open(saved.weights)]
    assert omitted_items == [("loader", "optimizer"), ("loader", "optimizer"), ("optimizer",), ()]
    shutil.rmtree(saved.primary)
    with saved.open(str(saved.weights)) as ckpt:
        assert ckpt.restore().step == 4


def test_each_tier_has_its_own_items_intervals_and_retention(training: Training) -> None:
    tiers = (
        Tier(str(training.weights), items=("model",), every=2, keep=laststep.Keep(last=2)),
        Tier(str(training.far), items=("loader", "model")),
    )
    with training.open(*tiers) as ckpt:
        ckpt.restore()
        for step in range(5):
            training.save(ckpt, step)
            for tier in (training.weights, training.far)[step % 2 :]:
                holds = (step, str(tier))
                wait_until(
                    lambda holds=holds: (
                        holds
                        in [
                            (e.step, e.tier)
                            for e in training.heard
                            if isinstance(e, events.TierHolds)
                        ]
                    )
                )
    assert laststep.open(training.weights).steps() == [2, 4]
    assert laststep.open(training.far).steps() == list(range(5))
    assert {one.omitted_items for one in laststep.open(training.far)} == {("optimizer",)}


@pytest.mark.parametrize("compression", ["none", "max"])
def test_a_chain_of_saves_that_share_files_is_drained(training: Training, compression: str) -> None:
    training.model = {"w": torch.randn(2 << 20), "b": torch.randn(2 << 20).bfloat16()}
    with training.open(compression=compression) as ckpt:
        ckpt.restore()
        for step in range(6):
            training.model["w"][step << 18] += 1
            training.optimizer["m"][step] += 1
            ckpt.save(step).result()
            training.wait_for(step)
    assert commit_of(training.weights, 5).written.shared_bytes > 0
    for one in laststep.open(training.weights):
        assert one.verify().damage == ()
    latest = laststep.open(training.weights).latest()
    for name, tensor in training.model.items():
        assert torch.equal(latest.tensor(f"model/{name}")[:], tensor)


# What is told


def test_events_say_which_items_a_tier_holds(saved: Training) -> None:
    told = [e for e in saved.heard if isinstance(e, events.TierHolds)]
    of_tier = [e for e in told if e.tier == str(saved.weights)]
    assert {e.items for e in of_tier} == {("model",)}


def test_the_standing_of_a_tier_says_what_it_lacks(saved: Training) -> None:
    run = Run.open(DirectoryStore(saved.primary))
    primary, weights = replica_status(run, [str(saved.weights)])
    assert primary.newest.commit.omitted_items == ()
    assert weights.newest.commit.omitted_items == ("loader", "optimizer")


# Formats, ranks, damage


@pytest.mark.parametrize("golden", GOLDEN_RUNS, ids=lambda path: path.name)
def test_each_item_of_every_kind_of_checkpoint_makes_an_excerpt(
    golden: Path, run_folder: Path
) -> None:
    for item in laststep.open(golden).latest().items():
        laststep.copy(golden, run_folder / item, items=[item])
        for partial in laststep.open(run_folder / item):
            whole = laststep.open(golden)[partial.step]
            assert partial.items() == [item]
            assert {*partial.omitted_items} == {*whole.items(), *whole.omitted_items} - {item}
            assert partial.verify().damage == ()
            names = [name for name in whole.tensors() if name.startswith(f"{item}/")]
            assert partial.tensors() == names
            stored = laststep.load(run_folder / item / partial.folder)
            assert isinstance(stored, dict)
            assert list(stored) == [item]


def test_ranks_in_groups_bring_their_own_files_of_an_item(run_folder: Path) -> None:
    golden = GOLDEN / "version-1" / "groups"
    [folder] = [path.name for path in golden.glob("step-*")]
    first = copier(golden, run_folder)
    first.bring(folder, [0])
    for rank in (1, 2, 3):
        with raises(StorageError, where=f"{folder}/index-r"):
            first.commit(folder)
        copier(golden, run_folder).bring(folder, [rank])
    first.commit(folder)
    assert first.is_there(folder)
    checkpoint = laststep.open(run_folder).latest()
    assert checkpoint.omitted_items == ("optimizer",)
    assert checkpoint.verify().damage == ()


DRAINING = """
import sys, torch, laststep

primary, weights, limit = sys.argv[1:]
tier = laststep.Tier(weights, items=("model",), limit=limit or None)
model, optimizer = {"w": torch.full((3 << 20,), 7.0)}, {"m": torch.ones(1 << 20)}
with laststep.Checkpointer(
    tiers=[primary, tier], model=model, optimizer=optimizer,
    options=laststep.Options(flush="thread", progress=False),
) as ckpt:
    if ckpt.restore().step is None:
        ckpt.save(1).result()
        print("saved", flush=True)
"""


@pytest.mark.long
def test_what_a_kill_left_of_an_excerpt_is_no_checkpoint_and_the_next_start_ends_it(
    training: Training,
) -> None:
    command = [sys.executable, "-c", DRAINING, str(training.primary), str(training.weights)]
    with subprocess.Popen([*command, "1 MB/s"], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"saved\n"
        wait_until(lambda: list(training.weights.glob("step-*/copying.lock")))
        killed.kill()
    assert laststep.open(training.weights).steps() == []
    subprocess.run([*command, ""], check=True)
    [checkpoint] = laststep.open(training.weights)
    assert checkpoint.omitted_items == ("optimizer",)
    assert checkpoint.verify().damage == ()
    assert bool((checkpoint.tensor("model/w")[:] == 7).all())


def lie(run: Path, **changed: object) -> None:
    """Change what the manifest of the second step says, with a right digest."""
    [path] = run.glob("step-00000002.*/manifest.json")
    decided = manifest.decode(path.read_bytes(), where="")
    path.write_bytes(manifest.encode(msgspec.structs.replace(decided, **changed)))


def test_an_excerpt_that_claims_an_item_is_corrupt_where_that_is_not_there(saved: Training) -> None:
    [record] = [one for one in commit_of(saved.primary).items if one.name == "optimizer"]
    here = commit_of(saved.weights)
    lie(saved.weights, items=(*here.items, record), omitted_items=("loader",))
    with pytest.raises(CorruptError):
        laststep.load(saved.weights, step=2)
    with laststep.Checkpointer(
        saved.weights,
        model=saved.model,
        optimizer=saved.optimizer,
        options=laststep.Options(flush="thread"),
    ) as ckpt:
        restored = ckpt.restore(only=["model"])
        assert [skipped.step for skipped in restored.skipped] == [2]


def test_an_excerpt_that_says_it_is_whole_is_corrupt_where_items_share_a_file(
    run_folder: Path,
) -> None:
    run, weights = run_folder / "run", run_folder / "weights"
    small = {"model": {"w": torch.ones(3)}, "loader": {"order": torch.ones(5)}}
    with laststep.Checkpointer(run, items=small, options=laststep.Options(flush="thread")) as ckpt:
        ckpt.restore()
        ckpt.save(2).result()
    laststep.copy(run, weights, items=("model",))
    assert list(laststep.load(weights, step=2)) == ["model"]
    lie(weights, omitted_items=())
    with raises(CorruptError, where="shared.safetensors", found="'loader/order'"):
        laststep.load(weights, step=2)


def copier(source: Path, target: Path) -> Copier:
    return Copier(DirectoryStore(source), DirectoryStore(target), items=("model",))


def test_a_damaged_file_of_the_items_is_not_brought(saved: Training, run_folder: Path) -> None:
    [folder] = saved.primary.glob("step-00000002.*")
    damaged = bytearray((folder / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (folder / "model.safetensors").write_bytes(damaged)
    with pytest.raises(CorruptError):
        copier(saved.primary, run_folder / "copied").copy(folder.name)
    assert not list((run_folder / "copied").glob("step-*"))


def test_damage_of_what_is_left_out_does_not_matter(saved: Training, run_folder: Path) -> None:
    [folder] = saved.primary.glob("step-00000002.*")
    damaged = bytearray((folder / "optimizer.safetensors").read_bytes())
    damaged[-1] ^= 1
    (folder / "optimizer.safetensors").write_bytes(damaged)
    copier(saved.primary, run_folder / "copied").copy(folder.name)
    assert commit_of(run_folder / "copied") == commit_of(saved.weights)


def test_a_copy_that_was_interrupted_goes_on_with_other_items(
    saved: Training, run_folder: Path
) -> None:
    target = run_folder / "copied"
    [folder] = saved.primary.glob("step-00000002.*")
    Copier(DirectoryStore(saved.primary), DirectoryStore(target)).bring(folder.name)
    assert (target / folder.name / "optimizer.safetensors").exists()
    moved = copier(saved.primary, target).copy(folder.name)
    assert moved is not None
    assert moved == 0
    assert not (target / folder.name / "optimizer.safetensors").exists()
    assert read_decision(DirectoryStore(target), folder.name) == commit_of(saved.weights)
