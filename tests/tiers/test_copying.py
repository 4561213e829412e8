"""A copy of a run is that run: the same bytes, verified on the way, whatever interrupts it."""

from __future__ import annotations

import errno
import subprocess
import threading
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

import attempts
import laststep
from expect import raises
from laststep.catalog.attempt import copying_name
from laststep.catalog.retention import COPY_QUIET_S, QUIET_S, RemovalReason
from laststep.catalog.run import Run
from laststep.constants import BLOCK_BYTES, MANIFEST_NAME
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import failed
from laststep.tiers import copying
from laststep.tiers.copying import Copier, Pacing
from laststep.tiers.runs import plan_copy
from stored import contents, flip

if TYPE_CHECKING:
    from laststep.storage.files import FileReader, FileWriter

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
GOLDEN_RUNS = sorted(path.parent for path in GOLDEN.glob("version-*/*/run.json"))
STEPS = 4
CHUNK_BYTES = 2 * BLOCK_BYTES
"""Here; else 16 MiB, which takes longer."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of two chunks and a bit; from one to the next a few blocks change."""
    import torch

    folder = tmp_path_factory.mktemp("source") / "run"
    model = {"w": torch.randn((2 * CHUNK_BYTES + 3 * BLOCK_BYTES // 2) // 4)}
    with laststep.Checkpointer(
        folder,
        model=model,
        options=laststep.Options(flush="thread", progress=False),
        host_memory_bytes=64 << 20,
    ) as ckpt:
        ckpt.restore()
        for step in range(STEPS):
            model["w"][step * BLOCK_BYTES // 4] += 1
            ckpt.save(step, metrics={"loss": float("nan")}).wait()
    return folder


@pytest.fixture
def source(run: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    folder = tmp_path / "changed"
    subprocess.run(["cp", "-a", run, folder], check=True)  # keeps links
    return folder


def folders(run: Path) -> list[Path]:
    return sorted(run.glob("step-*"))


def check_sound(run: Path) -> None:
    store = DirectoryStore(run)
    for item in Run.open(store).checkpoints():
        assert not verify_checkpoint(store, item.folder).damage


def copier(source: Path, target: Path, **options: object) -> Copier:
    return Copier(DirectoryStore(source), DirectoryStore(target), **options)


@pytest.mark.parametrize("golden", GOLDEN_RUNS, ids=lambda path: path.name)
def test_every_kind_of_checkpoint_is_copied_as_it_is_stored(golden: Path, tmp_path: Path) -> None:
    report = laststep.copy(golden, tmp_path / "copy")
    assert len(report.copied) == len(folders(golden))
    assert contents(tmp_path / "copy") == contents(golden)
    check_sound(tmp_path / "copy")


@pytest.mark.parametrize("golden", GOLDEN_RUNS, ids=lambda path: path.name)
def test_blocks_that_cross_the_edges_of_chunks_are_copied(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", 8192)
    laststep.copy(golden, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(golden)


def data_bytes(place: Path) -> int:
    files = (*place.rglob("*.safetensors"), *place.rglob("*.pack"))
    return sum(path.stat().st_size for path in files)


class Fickle(DirectoryStore):
    """Of a pack, one read among many has another last byte, and so has the next read of that."""

    def open_reader(self, name: str, *, cached: bool = False) -> FileReader:
        reader = super().open_reader(name, cached=cached)
        read, count = reader.read_into, 0

        def read_into(offset: int, into: memoryview) -> int:
            nonlocal count
            got = read(offset, into)
            if name.endswith(".pack"):
                count += 1
                if count in (5, 6):
                    into[got - 1] ^= 1
            return got

        reader.read_into = read_into  # type: ignore[method-assign]
        return reader


def test_every_chunk_verifies_the_blocks_that_it_has_a_part_of(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", 8192)
    folder = folders(run)[1].name  # one block of its own, in a pack
    with raises(CorruptError, where="blocks-r00000.pack"):
        Copier(Fickle(run), DirectoryStore(tmp_path / "copy"), threads=1).copy(folder)
    assert Run.open(DirectoryStore(tmp_path / "copy")).checkpoints() == ()


class Broken(DirectoryStore):
    """The disk cannot read one file."""

    def open_reader(self, name: str, *, cached: bool = False) -> FileReader:
        reader = super().open_reader(name, cached=cached)
        if name.startswith("step-00000001") and name.endswith(".pack"):

            def read_into(offset: int, into: memoryview) -> int:
                raise failed("read", name, OSError(errno.EIO, "an I/O error"))

            reader.read_into = read_into  # type: ignore[method-assign]
        return reader


def test_a_file_that_the_disk_cannot_read_is_damage_of_its_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    report = replace(plan_copy(run, tmp_path / "copy"), source=Broken(run)).execute()
    assert [folder for folder, _ in report.damaged] == [folders(run)[1].name]
    assert "an I/O error" in str(report.damaged[0][1])
    assert len(report.copied) == STEPS - 1


def test_files_that_checkpoints_share_are_linked_again(run: Path, tmp_path: Path) -> None:
    report = laststep.copy(run, tmp_path / "copy", threads=2)
    assert contents(tmp_path / "copy") == contents(run)
    both = [{p.stat().st_ino for p in where.rglob("*.safetensors")} for where in (run, tmp_path)]
    assert len(both[0]) == len(both[1]) == 1 < len(list(run.rglob("*.safetensors")))
    assert report.copied_bytes < data_bytes(tmp_path / "copy") - 2 * CHUNK_BYTES
    assert not list(tmp_path.rglob(copying_name()))


def test_an_older_one_that_comes_later_is_linked_to_those_that_share_with_it(
    run: Path, tmp_path: Path
) -> None:
    laststep.copy(run, tmp_path / "copy", STEPS - 1)
    report = laststep.copy(run, tmp_path / "copy", 0)
    assert report.copied_bytes < data_bytes(tmp_path / "copy") - 2 * CHUNK_BYTES
    check_sound(tmp_path / "copy")


def test_where_there_are_no_links_every_file_is_stored_whole(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectoryStore, "link", lambda *_: False)
    assert laststep.copy(run, tmp_path / "copy").copied_bytes == data_bytes(tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(run)


def test_a_copy_of_one_step_is_a_run_that_can_be_gone_on_with(run: Path, tmp_path: Path) -> None:
    laststep.copy(run, tmp_path / "copy", 2)
    state = {"w": laststep.load(run, step=2)["model"]["w"].clone().zero_()}
    with laststep.Checkpointer(
        tmp_path / "copy", model=state, options=laststep.Options(flush="thread")
    ) as ckpt:
        assert ckpt.restore().step == 2
        ckpt.save(3).wait()
    assert laststep.open(tmp_path / "copy").steps() == [2, 3]
    with raises(
        UsageError, where=tmp_path / "copy", expected=run, found="process"
    ):  # it has a life of its own now
        laststep.copy(run, tmp_path / "copy")


def test_what_is_there_is_not_copied_again(run: Path, tmp_path: Path) -> None:
    laststep.copy(run, tmp_path / "copy", 1)
    plan = plan_copy(run, tmp_path / "copy")
    assert [item.step for item in plan.checkpoints if item.folder in plan.there] == [1]
    report = plan.execute()
    assert (len(report.copied), len(report.there)) == (STEPS - 1, 1)
    assert laststep.copy(run, tmp_path / "copy").copied == ()


def test_a_copy_goes_into_no_other_run(run: Path, tmp_path: Path) -> None:
    with laststep.Checkpointer(
        tmp_path / "other", state={"value": 1}, options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt.restore()
        ckpt.save(9).wait()
    before = contents(tmp_path / "other")
    with raises(UsageError, where=tmp_path / "other", expected=run):
        laststep.copy(run, tmp_path / "other")
    assert contents(tmp_path / "other") == before
    with raises(UsageError, where=run):
        laststep.copy(run, run)


def test_another_checkpoint_of_that_name_is_left_alone(source: Path, tmp_path: Path) -> None:
    laststep.copy(source, tmp_path / "copy", 0)
    manifest = folders(tmp_path / "copy")[0] / MANIFEST_NAME
    theirs = (folders(source)[0] / MANIFEST_NAME).read_bytes().replace(b'"step"', b'"step" ')
    (folders(source)[0] / MANIFEST_NAME).write_bytes(theirs)
    mine = manifest.read_bytes()
    with raises(AlreadyExistsError, where=tmp_path / "copy", expected=source):
        laststep.copy(source, tmp_path / "copy")
    assert manifest.read_bytes() == mine


def test_a_damaged_checkpoint_is_named_and_the_others_are_copied(
    source: Path, tmp_path: Path
) -> None:
    own = folders(source)[1] / "blocks-r00000.pack"  # the blocks that changed in step 1
    flip(own, own.stat().st_size - BLOCK_BYTES // 2)
    with pytest.raises(CorruptError, match=r"blocks-r00000.pack.*\d+-\d+") as caught:
        laststep.copy(source, tmp_path / "copy")
    assert folders(source)[1].name in str(caught.value)
    there = [folder.name for folder in folders(tmp_path / "copy")]
    store = DirectoryStore(source)
    sound = [f.name for f in folders(source) if not verify_checkpoint(store, f.name).damage]
    assert there == sound
    check_sound(tmp_path / "copy")


@pytest.mark.parametrize(
    "golden",
    [
        run if run.name in ("one-rank", "borrowed") else pytest.param(run, marks=pytest.mark.long)
        for run in GOLDEN_RUNS
    ],
    ids=lambda path: path.name,
)
def test_no_flipped_bit_that_verify_finds_is_copied(golden: Path, tmp_path: Path) -> None:
    """Of every file of every kind, at its begin, in its middle and at its end."""
    subprocess.run(["cp", "-a", golden, tmp_path / "run"], check=True)
    store = DirectoryStore(tmp_path / "run")
    folder = folders(tmp_path / "run")[-1]
    for file in sorted(path for path in folder.rglob("*") if path.name != MANIFEST_NAME):
        size = file.stat().st_size
        for at in (9, size // 2, size - 1):
            flip(file, at)
            damaged = bool(verify_checkpoint(store, folder.name).damage)
            one = copier(tmp_path / "run", tmp_path / f"{file.name}-{at}")
            if damaged:
                with pytest.raises(CorruptError):
                    one.copy(folder.name)
            else:
                one.copy(folder.name)
            assert not damaged or not folders(tmp_path / f"{file.name}-{at}")
            flip(file, at)


class Failing(DirectoryStore):
    """Fails the n-th write, and every one after it."""

    def __init__(self, path: Path, writes: int) -> None:
        super().__init__(path)
        self.left = writes

    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriter:
        writer = super().open_writer(name, expected_bytes=expected_bytes)
        write = writer.write_at

        def write_at(offset: int, data: memoryview) -> None:
            self.left -= 1
            if self.left < 0:
                raise StorageError("no more")
            write(offset, data)

        writer.write_at = write_at  # type: ignore[method-assign]
        return writer


class Counting(DirectoryStore):
    """Counts the bytes that are written."""

    written = 0

    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriter:
        self.written += expected_bytes
        return super().open_writer(name, expected_bytes=expected_bytes)


@pytest.mark.parametrize("writes", [1, 3, 4])
def test_an_interrupted_copy_is_invisible_and_gone_on_with(
    run: Path, tmp_path: Path, writes: int
) -> None:
    target = tmp_path / "copy"
    folder = folders(run)[1].name
    one = Copier(DirectoryStore(run), Failing(target, writes), threads=2)
    with pytest.raises(StorageError, match="no more"):
        one.copy(folder)
    there = Run.open(DirectoryStore(target))
    assert there.checkpoints() == ()
    assert [item.is_copy for item in there.attempts()] == [True]
    whole = [
        path
        for path in (target / folder).iterdir()
        if path.suffix in (".safetensors", ".pack")
        and path.read_bytes() == (run / folder / path.name).read_bytes()
    ]
    counted = Counting(target)
    copied_bytes = Copier(DirectoryStore(run), counted).copy(folder)
    kept_bytes = sum(path.stat().st_size for path in whole)
    assert counted.written == copied_bytes == data_bytes(target) - kept_bytes
    assert contents(target / folder) == contents(run / folder)


def test_what_an_interrupted_copy_left_is_kept_only_if_it_is_right(
    run: Path, tmp_path: Path
) -> None:
    one = copier(run, tmp_path / "copy")
    folder = folders(run)[0].name
    one.bring(folder)
    file = tmp_path / "copy" / folder / "model.safetensors"
    flip(file, CHUNK_BYTES + 5)
    assert one.bring(folder) == file.stat().st_size
    one.commit(folder)
    check_sound(tmp_path / "copy")


def test_a_copy_without_all_of_its_files_is_not_committed(run: Path, tmp_path: Path) -> None:
    one = copier(run, tmp_path / "copy")
    folder = folders(run)[0].name
    one.bring(folder)
    (tmp_path / "copy" / folder / "model.safetensors").unlink()
    with raises(StorageError, where=f"{folder}/model.safetensors"):
        one.commit(folder)
    assert Run.open(DirectoryStore(tmp_path / "copy")).checkpoints() == ()


def test_a_copy_without_all_of_its_indexes_is_not_committed(run: Path, tmp_path: Path) -> None:
    one = copier(run, tmp_path / "copy")
    folder = folders(run)[0].name
    one.bring(folder)
    (tmp_path / "copy" / folder / "index-r00000").unlink()
    with raises(StorageError, where=f"{folder}/index-r00000"):
        one.commit(folder)
    assert Run.open(DirectoryStore(tmp_path / "copy")).checkpoints() == ()


def test_several_bring_the_files_of_their_ranks_and_one_commits(tmp_path: Path) -> None:
    golden = GOLDEN / "version-1" / "groups"
    (folder,) = (path.name for path in folders(golden))
    ranks = range(Run.open(DirectoryStore(golden)).checkpoints()[0].commit.ranks)
    for rank in ranks:
        copier(golden, tmp_path / "copy").bring(folder, [rank])
        assert not (tmp_path / "copy" / folder / MANIFEST_NAME).exists()
    copier(golden, tmp_path / "copy").commit(folder)
    assert contents(tmp_path / "copy") == contents(golden)


def test_no_two_copy_the_same_checkpoint_at_once(run: Path, tmp_path: Path) -> None:
    laststep.copy(run, tmp_path / "copy", 1)
    folder = folders(run)[0].name
    store = DirectoryStore(tmp_path / "copy")
    store.make_folder(folder)
    lock = store.lock(f"{folder}/{copying_name()}")
    with raises(AlreadyExistsError, where=f"{tmp_path / 'copy'}/{folder}", found=copying_name()):
        copier(run, tmp_path / "copy").copy(folder)
    lock.close()
    assert copier(run, tmp_path / "copy").copy(folder) is not None


def test_who_comes_late_takes_nothing_of_what_another_has_committed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it begins, nor when it finds that the original is gone, or damaged."""
    target, folder = tmp_path / "copy", folders(source)[1]
    late = copier(source, target)
    copier(source, target).copy(folder.name)
    monkeypatch.setattr(late, "is_there", lambda _: False)
    before = contents(target)
    assert late.copy(folder.name) == 0
    with (
        mock.patch.object(late, "bring", side_effect=CorruptError("a test")),
        pytest.raises(CorruptError),
    ):
        late.copy(folder.name)
    DirectoryStore(source).delete_folder(folder.name, first=MANIFEST_NAME)
    with pytest.raises(NotFoundError):
        late.copy(folder.name)
    assert contents(target).items() >= before.items()  # and that it stands
    check_sound(target)


def test_no_writer_at_the_target_cleans_up_a_copy_under_way(run: Path, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "copy")
    one = copier(run, tmp_path / "copy")
    one.copy(folders(run)[0].name)
    one.bring(folders(run)[1].name)  # and is then interrupted
    there = Run.open(store)
    assert there.orphans() == ()
    there.claim_term(there.newest().point)
    assert [item.folder for item in there.attempts()] == [folders(run)[1].name]
    week_later = time.time() + COPY_QUIET_S + 60
    (orphan,) = there.orphans(now_s=week_later)
    assert (orphan.name, orphan.why) == (folders(run)[1].name, RemovalReason.STALE_COPY)
    lock = store.lock(f"{folders(run)[1].name}/{copying_name()}")
    assert there.orphans(now_s=week_later) == ()  # somebody copies it now
    lock.close()
    there.clean(now_s=week_later)
    assert there.attempts() == ()


class Mounted(DirectoryStore):
    """A folder of a network, where nobody sees the locks of other machines."""

    def locks_tell(self) -> bool:
        return False


def test_an_interrupted_copy_that_a_later_one_has_overtaken_goes_when_nobody_works_on_it(
    run: Path, tmp_path: Path
) -> None:
    first, _, later = (folder.name for folder in folders(run)[:3])
    store = DirectoryStore(tmp_path / "copy")
    one = copier(run, tmp_path / "copy")
    one.bring(first)  # and is then interrupted
    assert Run.open(store).orphans() == ()
    one.copy(later)
    with closing(store.lock(f"{first}/{copying_name()}")):
        assert Run.open(store).orphans() == ()  # somebody copies it now
    there = Run.open(Mounted(tmp_path / "copy"))
    assert there.orphans() == ()
    hour_later = time.time() + QUIET_S + 60
    assert [orphan.name for orphan in there.orphans(now_s=hour_later)] == [first]
    (gone,) = Run.open(store).clean()
    assert (gone.name, gone.why) == (first, RemovalReason.STALE_COPY)
    assert not (tmp_path / "copy" / first).exists()
    assert one.copy(first) is not None
    check_sound(tmp_path / "copy")


def test_what_was_given_up_at_the_target_is_copied_anew(run: Path, tmp_path: Path) -> None:
    folder = folders(run)[0].name
    one = copier(run, tmp_path / "copy")
    one.bring(folder)
    attempts.abort(Run.open(DirectoryStore(tmp_path / "copy")), folder, "for a test")
    assert one.copy(folder) == data_bytes(tmp_path / "copy")
    check_sound(tmp_path / "copy")


class Pruned(DirectoryStore):
    """Its retention takes a checkpoint away as soon as one of its data files is opened."""

    def open_reader(self, name: str, *, cached: bool = False) -> FileReader:
        folder, _, file = name.partition("/")
        if file == "blocks-r00000.pack" and folder.startswith("step-00000001"):
            self.delete_folder(folder, first=MANIFEST_NAME)
        return super().open_reader(name, cached=cached)


def test_what_is_deleted_meanwhile_is_skipped(source: Path, tmp_path: Path) -> None:
    gone = folders(source)[1].name
    report = replace(plan_copy(source, tmp_path / "copy"), source=Pruned(source)).execute()
    assert report.deleted == (gone,)
    assert not report.damaged
    assert [folder.name for folder in folders(tmp_path / "copy")] == list(report.copied)
    assert len(report.copied) == STEPS - 1


def test_a_copy_is_stopped_between_chunks_and_goes_on(run: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    seen: list[int] = []

    def tell(done: int, total: int) -> None:
        seen.append(done)
        stop.set()

    plan = plan_copy(run, tmp_path / "copy")
    with pytest.raises(AbortedError):
        plan.execute(threads=1, pacing=Pacing(stop=stop), watch=lambda _: nullcontext(tell))
    assert len(seen) == 1
    assert laststep.copy(run, tmp_path / "copy").copied == tuple(f.name for f in folders(run))


def test_a_pin_goes_along(source: Path, tmp_path: Path) -> None:
    Run.open(DirectoryStore(source)).pin(folders(source)[2].name)
    laststep.copy(source, tmp_path / "copy")
    listed = Run.open(DirectoryStore(tmp_path / "copy")).checkpoints()
    assert [item.pinned for item in listed] == [False, False, True, False]


def test_a_step_that_there_is_not_is_named_with_those_that_there_are(
    run: Path, tmp_path: Path
) -> None:
    with raises(NotFoundError, found="0, 1, 2, 3"):
        laststep.copy(run, tmp_path / "copy", 9)
    assert not (tmp_path / "copy").exists()


def shared_file(folder: Path) -> Path:
    """The file of an earlier checkpoint that lies there."""
    (found,) = (path for path in folder.iterdir() if "~" in path.name)
    return found


def damage_in(run: Path, folder: str) -> int:
    return len(verify_checkpoint(DirectoryStore(run), folder).damage)


def test_bases_are_verified_in_what_an_interrupted_copy_left(tmp_path: Path) -> None:
    import torch

    source, target = tmp_path / "run", tmp_path / "copy"
    state = {"w": torch.randn(3 << 20).to(torch.bfloat16)}
    with laststep.Checkpointer(
        source,
        model=state,
        compression="max",
        options=laststep.Options(flush="thread", progress=False),
    ) as ckpt:
        ckpt.save(1).result()
        state["w"].view(torch.int16)[::50] ^= 1
        folder = ckpt.save(2).result().folder
    shared = shared_file(source / folder)
    laststep.copy(source, target, step=2)
    for path in list((target / folder).iterdir()):
        path.unlink()
    (target / folder / shared.name).write_bytes(bytes(shared.stat().st_size))
    laststep.copy(source, target, step=2)
    assert damage_in(target, folder) == 0


def test_a_file_with_holes_is_not_linked_into_other_checkpoints(tmp_path: Path) -> None:
    import torch

    source, target = tmp_path / "run", tmp_path / "copy"
    state = {"w": torch.randn(6 << 20)}
    with laststep.Checkpointer(
        source, model=state, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        first = ckpt.save(1).result().folder
        state["w"][: 1 << 20] += 1  # 4 of 24 blocks
        second = ckpt.save(2).result().folder
    laststep.copy(source, target, step=2)
    (target / second / MANIFEST_NAME).unlink()
    with shared_file(target / second).open("r+b") as file:
        file.seek(4096)
        file.write(bytes(2 << 20))  # of blocks that the second does not need
    laststep.copy(source, target)
    assert [damage_in(target, folder) for folder in (first, second)] == [0, 0]
