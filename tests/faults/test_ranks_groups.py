"""Jobs of several groups of ranks: whoever dies or sleeps is named, whoever speaks for it or not;
and an index of any rank that is damaged is found.

Groups are made small here: two ranks each. Large jobs have them by themselves.
"""

from __future__ import annotations

import base64
import json
import shutil
from typing import TYPE_CHECKING

import pytest
from rank_jobs import check

import laststep
from expect import names
from laststep.catalog.attempt import read_index
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.codecs.digests import DIGEST_BYTES
from laststep.format import index as index_format
from laststep.storage.directory import DirectoryStore
from stored import flip, folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rank_jobs import Job, Jobs


@pytest.fixture(scope="module")
def standing(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Path]]:
    """Four ranks in two groups, with a long deadline, and their run; tests leave all alive."""
    run = tmp_path_factory.mktemp("groups") / "run"
    job = jobs.start(4, group=2)
    job.open(run)
    job.save(1)
    job.committed = [1]
    yield job, run
    job.close()
    check(run, job.committed, ranks=4)
    job.clean_up()


def newest(run: Path) -> Path:
    return run / folders(run)[-1]


def test_the_manifest_has_the_digest_of_the_index_of_every_rank(standing: tuple[Job, Path]) -> None:
    job, run = standing
    step = job.committed[-1] + 1
    job.save(step)
    job.committed.append(step)
    check(run, job.committed, ranks=4)
    root = json.loads((newest(run) / "manifest.json").read_bytes())["manifest"]
    assert root["ranks"] == 4
    indexes = sorted(newest(run).glob("index-r*"))
    assert [path.name for path in indexes] == [f"index-r{rank:05d}" for rank in range(4)]
    digests = b"".join(path.read_bytes()[:DIGEST_BYTES] for path in indexes)
    assert base64.b64decode(root["written"]["indexes"]) == digests
    (one,) = root["layout_groups"]
    assert one["spans"] == [[0, 4]]
    sizes = {path.name: path.stat().st_size for path in newest(run).glob("*.safetensors")}
    assert root["written"]["size_bytes"] == sum(sizes.values())
    assert root["written"]["files"] == len(sizes)
    checkpoint = laststep.open(run).latest()
    assert checkpoint.size_bytes == sum(sizes.values())


@pytest.mark.long
def test_a_flusher_killed_before_its_group_has_reported_fails_the_save_of_all(
    standing: tuple[Job, Path],
) -> None:
    job, _ = standing
    step = job.committed[-1] + 1
    job.ranks[2].flusher()
    job.stand_at("receipt", step, 3)
    job.ranks[2].kill_flusher()
    errors = [job.ranks[number].failed() for number in (0, 1, 2)]
    assert all("signal 9" in error for error in errors)
    assert all("rank 2: " in error for error in errors[:2])
    job.ranks[3].do("go receipt")
    assert "rank 2: " in job.ranks[3].failed()
    job.save(step)
    job.committed.append(step)


@pytest.mark.long
def test_a_rank_that_is_killed_before_it_speaks_for_its_group_is_named(
    open_job: Callable[..., Job], run_folder: Path
) -> None:
    job = open_job(4, group=2)
    job.stand_at("summary", 1, 2)
    job.ranks[2].kill()
    for error in (job.ranks[0].gives_up(), job.ranks[1].failed(), job.ranks[3].failed()):
        assert names(error, "rank 2", "step 1", "ranks 2 to 3")
    job.end_all(0, 1, 3)
    check(run_folder, [], ranks=4)


def test_files_in_folders_are_committed_listed_verified_copied_given_up_and_pruned(
    open_job: Callable[..., Job], run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_format, "FLAT_RANKS", 2)
    monkeypatch.setattr(index_format, "_RANKS_PER_FOLDER", 2)
    job = open_job(4, group=2, folders=True)
    job.save(1)
    inside = {path.name for path in newest(run_folder).iterdir()}
    assert inside == {"r00000", "r00002", "manifest.json"}
    assert (newest(run_folder) / "r00002" / "index-r00003").exists()
    job.ranks[3].do("fail")
    job.fails(2)
    job.save(2)
    job.close()
    check(run_folder, [1, 2], ranks=4)  # and nothing of the one that was given up
    shutil.copytree(newest(run_folder), tmp_path / "copy" / newest(run_folder).name)
    assert laststep.load(tmp_path / "copy")["state"]["n"] == 2
    run = Run.open(DirectoryStore(run_folder))
    for item in run.checkpoints():
        there = [path for path in (run_folder / item.folder).rglob("*") if path.is_file()]
        assert item.is_whole
        assert item.stored_bytes == sum(path.stat().st_size for path in there)
        data = [path for path in there if path.suffix == ".safetensors"]
        assert item.size_bytes == sum(path.stat().st_size for path in data)
    commit = run.checkpoints()[-1].commit
    assert commit is not None
    of_rank_3 = read_index(run.store, newest(run_folder).name, commit, 3)
    assert of_rank_3.rank == 3
    assert of_rank_3.files
    assert all(file.name.startswith("r00002/") for file in of_rank_3.files)
    deleted = plan_prune(run, Keep(last=1)).execute()
    assert deleted == ("step-00000001.1-1",)
    check(run_folder, [2], ranks=4)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip(path, 200),
    "gone": lambda path: path.unlink(),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "another": lambda path: shutil.copy(path.with_name("index-r00000"), path),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_index_of_one_rank_is_found_and_passed_over(
    how: str, standing: tuple[Job, Path], run_folder: Path
) -> None:
    job, run = standing
    if len(job.committed) < 2:
        job.save(2)
        job.committed.append(2)
    shutil.copytree(run, run_folder)
    path = newest(run_folder) / "index-r00002"
    DAMAGE[how](path)
    before, step = job.committed[-2:]
    state = {"t": 0, "n": 0}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread", progress=False)
    ) as checkpointer:
        restored = checkpointer.restore(only=["state"], strict=False)
    assert restored.step == before
    ((skipped, reason),) = [(one.step, one.reason) for one in restored.skipped]
    assert skipped == step
    assert "index" in reason
    (damage,) = laststep.open(run_folder)[step].verify().damage
    assert (damage.file, damage.what) == ("index-r00002", "index")
    assert laststep.open(run_folder)[before].verify().damage == ()
