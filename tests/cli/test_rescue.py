"""`laststep rescue`: what the dead have left in shared memory is stored, and their memory freed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import laststep as library
from laststep.catalog.names import AttemptName
from laststep.codecs import objects
from laststep.codecs.digests import block_digests
from laststep.format.manifest import ItemRecord
from laststep.format.safetensors import TensorEntry
from laststep.memory import segments
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore
from laststep.terms import CHUNK_BYTES
from laststep.tiers import sealed

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.memory.segments import Segment

ROOT = Path(__file__).resolve().parents[2]
SIZE_BYTES = 3 << 20
OWNER = """
import os, sys
from laststep.memory import segments

base, run, ranks = sys.argv[1:]
segment, fd = segments.make(base, run, rank=0, ranks=int(ranks), size_bytes=16 << 20)
print(segment.folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path) -> str:
    place = tmp_path / "shm"
    place.mkdir()
    return str(place)


class Owner:
    """A process that has a segment, until it is killed."""

    def __init__(self, base: str, run: Path, ranks: int = 1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, base, str(run), str(ranks)], text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.segment = segments.opened(self.process.stdout.readline().strip())

    def die(self) -> Segment:
        self.process.kill()
        self.process.communicate()
        return self.segment


@pytest.fixture
def own(base: str, maker) -> Callable[..., Owner]:
    owners = []

    def start(ranks: int = 1) -> Owner:
        owners.append(Owner(base, maker.path, ranks))
        return owners[-1]

    yield start
    for owner in owners:
        owner.die()


def seal(segment: Segment, maker, step: int, *, epoch: int, attempt: int) -> str:
    """Leave a save of one tensor in a segment, as a flusher does; its folder in the run."""
    data = bytes(range(256)) * (SIZE_BYTES // 256)
    with Path(segment.pool_path).open("r+b") as pool:
        pool.truncate(CHUNK_BYTES)
        pool.write(data)
    entry = TensorEntry(name="w", dtype="uint8", shape=(SIZE_BYTES,), start=0, stop=SIZE_BYTES)
    tree = objects.encode({"tree": {"w": objects.TensorRef("w")}, "ties": {}, "views": {}})
    file = sealed.SealedFile(
        name="state.safetensors", item="state", region_bytes=4096, tensor_bytes=SIZE_BYTES,
        entries=(entry,), parts={}, chunks=((0, 0),), digests=block_digests(memoryview(data)),
        objects=(("laststep/tree", tree),),
    )  # fmt: skip
    item = ItemRecord(name="state", kind="value", file=file.name, tensors=1, size_bytes=SIZE_BYTES)
    at = AttemptName(step=step, epoch=epoch, attempt=attempt)
    save = sealed.SealedSave(
        run=maker.run.id, at=at, created_s=1_700_000_000.0 + step, files=(file,), items=(item,),
        metrics=objects.encode({}), metadata=objects.encode(None), continues=None,
    )  # fmt: skip
    sealed.put(segment, save)
    return at.folder


def test_what_the_dead_have_left_alone_is_stored_and_their_memory_freed(
    maker, own, laststep, base: str
) -> None:
    epoch = maker.start()
    segment = own().die()
    folder = seal(segment, maker, 7, epoch=epoch, attempt=1)
    told = laststep("rescue", "--base", base)
    assert told.status == 0
    assert "stored now, removed" in told.out
    assert "3.15 MB" in told.out
    assert segments.found(base) == []
    assert library.open(maker.path).steps() == [7]
    assert not verify_checkpoint(DirectoryStore(maker.path), folder).damage
    assert "nothing lies in shared memory" in laststep("rescue", "--base", base).out


def test_a_dry_run_and_keep_remove_nothing(maker, own, laststep, base: str) -> None:
    epoch = maker.start()
    segment = own().die()
    seal(segment, maker, 7, epoch=epoch, attempt=1)
    told = laststep("rescue", "--base", base, "--dry-run")
    assert (told.status, "would be stored" in told.out) == (0, True)
    assert library.open(maker.path).steps() == []
    (one,) = laststep("rescue", "--base", base, "--keep", "--json").json()["segments"]
    assert [save["fate"] for save in one["saves"]] == ["rescued"]
    assert (one["is_removed"], one["is_alive"], one["pid"]) == (False, False, segment.owner.pid)
    assert library.open(maker.path).steps() == [7]
    told = laststep("rescue", maker.path, "--base", base)
    assert "stored already, removed" in told.out
    assert segments.found(base) == []


def test_what_lives_is_listed_and_left_alone(maker, own, laststep, base: str) -> None:
    epoch = maker.start()
    owner = own()
    seal(owner.segment, maker, 7, epoch=epoch, attempt=1)
    empty = own()
    told = laststep("rescue", "--base", base)
    assert told.status == 0
    assert f"pid {owner.process.pid}, alive" in told.out
    assert "left alone" in told.out
    assert len(segments.found(base)) == 2
    assert library.open(maker.path).steps() == []
    empty.die()
    assert "holds no save, removed" in laststep("rescue", "--base", base).out
    assert [one.folder for one in segments.found(base)] == [owner.segment.folder]


def test_what_a_later_start_has_left_behind_goes(maker, own, laststep, base: str) -> None:
    epoch = maker.start()
    seal(own().die(), maker, 7, epoch=epoch, attempt=1)
    maker.start()
    maker.save(8)
    assert "left behind by a later start, removed" in laststep("rescue", "--base", base).out
    assert segments.found(base) == []
    assert library.open(maker.path).steps() == [8]


def gone(maker, segment: Segment) -> None:
    shutil.rmtree(maker.path)


def another(maker, segment: Segment) -> None:
    shutil.rmtree(maker.path)
    type(maker)(maker.path).save(1)


def damaged(maker, segment: Segment) -> None:
    with Path(segment.pool_path).open("r+b") as pool:
        pool.seek(2 << 20)
        pool.write(b"damage")


def unreadable(maker, segment: Segment) -> None:
    segment.put("1-2", b"of a later version")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (gone, "there is no run"),
        (another, "is another one"),
        (damaged, "is not as it was sealed"),
        (unreadable, "1 record in it cannot be read"),
    ],
)
def test_what_cannot_be_stored_stays_and_the_status_says_so(
    maker, own, laststep, base: str, spoil: Callable[..., None], said: str
) -> None:
    epoch = maker.start()
    segment = own().die()
    seal(segment, maker, 7, epoch=epoch, attempt=1)
    spoil(maker, segment)
    told = laststep("rescue", "--base", base)
    assert told.status == 1
    assert said in told.out
    assert segment.folder in told.out
    assert [one.folder for one in segments.found(base)] == [segment.folder]
    assert not laststep("rescue", "--base", base, "--json").json()["ok"]


def test_one_rank_of_several_alone_is_not_stored(maker, own, laststep, base: str) -> None:
    epoch = maker.start()
    seal(own(ranks=2).die(), maker, 7, epoch=epoch, attempt=1)
    told = laststep("rescue", "--base", base)
    assert (told.status, "one of 2 ranks'" in told.out) == (1, True)
    assert len(segments.found(base)) == 1


def test_other_runs_and_half_made_folders_are_left_alone_where_a_run_is_named(
    maker, own, laststep, base: str, tmp_path: Path
) -> None:
    segment = own().die()
    half = Path(segment.folder).with_name("new-1")
    half.mkdir()
    elsewhere = tmp_path / "elsewhere"
    assert laststep("rescue", elsewhere, "--base", base).status == 0
    assert (half.exists(), len(segments.found(base))) == (True, 1)
    report = library.rescue(base=base)
    assert report.debris == (str(half),)
    assert [one.is_removed for one in report.segments] == [True]
    assert report.ok


def test_rescuing_never_imports_torch(maker, own, base: str) -> None:
    epoch = maker.start()
    seal(own().die(), maker, 7, epoch=epoch, attempt=1)
    script = (
        "import sys, laststep; report = laststep.rescue(base=sys.argv[1]); "
        "assert report.segments[0].is_removed; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, base],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=False,
    )  # fmt: skip
    assert done.returncode == 0
