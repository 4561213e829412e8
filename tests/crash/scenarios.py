"""What a run does, to be cut at every system call; and what must hold after each cut.

Each scenario is a list of stages. During a stage a crash may leave what was visible before it or
what is visible after it, bit for bit, and nothing else; between stages only the latter. `explore`
is used by the short tests here and, with a larger budget, by the torture.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import mmap
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import crashed_disk
import msgspec

import attempts
from disks import Change, RecordingDisk
from laststep.catalog.attempt import read_indexes
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.codecs.digests import block_digests
from laststep.constants import ALIGN_BYTES, align_up
from laststep.errors import LaststepError, NotFoundError
from laststep.flush import base as flush_base
from laststep.flush.encoder import Compressor
from laststep.flush.protocol import Orders
from laststep.flush.writer import SaveWriter
from laststep.format import index as index_format
from laststep.format.layout import FileLayout, TensorEntry, header_bytes_of
from laststep.format.manifest import Commit, ItemRecord, WrittenIndexes
from laststep.storage.directory import DirectoryStore
from laststep.tiers.copying import Copier

Shown = tuple[tuple[str, bool, tuple[str, ...]], ...] | None
"""Each checkpoint: its folder, whether it is on the lineage, the digests of its indexes and data
files."""

Stage = Callable[[DirectoryStore], None]

_FILES = ("a.safetensors", "b.safetensors")
_SIZES = (5000, 9000)


class Violated(Exception):
    """A crash leaves something that must never be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Stages before the recording, and those that are recorded."""

    name: str
    before: tuple[Stage, ...]
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The calls, and after how many of them what was visible."""

    base: crashed_disk.Tree
    changes: tuple[Change, ...]
    marks: tuple[tuple[int, Shown], ...]

    def allowed(self, calls: int) -> frozenset[Shown]:
        """What may be visible after that many calls."""
        done = [shown for count, shown in self.marks if count <= calls]
        if any(count == calls for count, _ in self.marks):
            return frozenset(done[-1:])
        return frozenset((done[-1], self.marks[len(done)][1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """How much was looked at."""

    cuts: int
    crashes: int
    distinct: int


def save(step: int, term: int, attempt: int) -> Stage:
    """Write two data files and their index, and commit."""

    def stage(store: DirectoryStore) -> None:
        run = Run.open(store)
        folder = run.begin(step=step, term=term, attempt=attempt).folder
        writer = SaveWriter(attempts.of(store, folder), _layouts())
        for number, name in enumerate(_FILES):
            _write(writer, number, _image(f"{folder}/{name}", _SIZES[number]))
        attempts.commit(run, folder, _commit(step, term, attempt, writer.finish(_VALUES)))

    return stage


def save_by_ranks(step: int, term: int, attempt: int) -> Stage:
    """Two ranks write a data file and an index each, into a folder that one of them makes; then
    the first one commits."""

    def stage(store: DirectoryStore) -> None:
        run = Run.open(store)
        folder = run.begin(step=step, term=term, attempt=attempt).folder
        written = WrittenIndexes()
        writers = [_writer_of_rank(store, folder, rank) for rank in range(2)]
        for writer in writers:
            written = written.plus(writer.finish(_VALUES))
        attempts.commit(run, folder, _commit(step, term, attempt, written, ranks=2))

    return stage


def save_sharing(step: int, term: int, attempt: int, *, anew: bool = False) -> Stage:
    """Write two data files of which nothing changes from save to save, and a value that does: the
    files are shared with the newest checkpoint, but for `anew`."""

    def stage(store: DirectoryStore) -> None:
        run = Run.open(store)
        folder = run.begin(step=step, term=term, attempt=attempt).folder
        base = None if anew else _newest(store, run)
        with mock.patch.object(flush_base, "LEAST_BYTES", 0):
            writer = SaveWriter(attempts.of(store, folder), _layouts(), base=base)
            for number, name in enumerate(_FILES):
                _write(writer, number, _image(name, _SIZES[number]))
            written = writer.finish({"m": f"{step}".encode()})
        if base is not None and base.layout(_layouts()[0]) is not None and _is_same(base):
            assert written.shared_bytes == written.size_bytes, "what has not changed is shared"
        attempts.commit(run, folder, _commit(step, term, attempt, written))

    return stage


class Encoding:
    """Saves whose blocks are encoded by one flusher, which keeps what it wrote in memory."""

    def __init__(self) -> None:
        self._compressor = Compressor(Orders(writers=1, compression="max"), memory_bytes=1 << 20)

    def save(self, step: int, term: int, attempt: int) -> Stage:
        """Write a tensor that differs in a few bytes from save to save, and one that does not
        change: the first is encoded against the last checkpoint, the second used again. Both lie
        in pack files."""

        def stage(store: DirectoryStore) -> None:
            run = Run.open(store)
            folder = run.begin(step=step, term=term, attempt=attempt).folder
            base = _newest(store, run)
            with mock.patch.object(flush_base, "LEAST_BYTES", 0):
                writer = SaveWriter(
                    attempts.of(store, folder), _layouts(), base=base, compressor=self._compressor
                )
                for number, name in enumerate(_FILES):
                    image = _image(name, _SIZES[number], mask=3)
                    image[step] ^= 1 - number
                    _write(writer, number, image)
                written = writer.finish(_VALUES)
            picked = [report.picked for report in writer.coding()]
            assert picked == (["patches", "raw"] if base else ["planes", "planes"])
            attempts.commit(run, folder, _commit(step, term, attempt, written))

        return stage


_VALUES = {"m": b"null"}
_ENCODING = Encoding()


def _layouts(names: tuple[str, ...] = _FILES) -> tuple[FileLayout, ...]:
    layouts = []
    for name, size in zip(names, _SIZES, strict=False):
        entries = (TensorEntry(name="t", dtype="uint8", shape=(size,), start=0, stop=size),)
        layouts.append(
            FileLayout(
                name=name,
                item="m",
                header_bytes=header_bytes_of(entries),
                tensor_bytes=size,
                tensors=entries,
            )
        )
    return tuple(layouts)


def _image(seed: str, size: int, mask: int = 0xFF) -> mmap.mmap:
    image = mmap.mmap(-1, align_up(size, ALIGN_BYTES))
    image[:size] = bytes(byte & mask for byte in hashlib.shake_128(seed.encode()).digest(size))
    return image


def _write(writer: SaveWriter, number: int, image: mmap.mmap) -> None:
    data = memoryview(image)
    sums = writer.digests(number, 0, data[: _SIZES[number]])
    writer.write(number, 0, data, _SIZES[number], sums)


def _writer_of_rank(store: DirectoryStore, folder: str, rank: int) -> SaveWriter:
    """The save of a rank, written and not yet durable."""
    layouts = _layouts((f"r00000/m-r{rank:05d}.safetensors",))
    writer = SaveWriter(attempts.of(store, folder), layouts, rank=(rank, 2))
    _write(writer, 0, _image(f"{folder}/{rank}", _SIZES[0]))
    return writer


def _newest(store: DirectoryStore, run: Run) -> flush_base.Base | None:
    newest = run.newest()
    return None if newest is None else flush_base.of_checkpoint(store, newest.folder, 0)


def _is_same(base: flush_base.Base) -> bool:
    """Return whether a checkpoint holds what `save_sharing` writes."""
    stored = base.index.layout(_FILES[0])
    data = memoryview(_image(_FILES[0], _SIZES[0]))[: _SIZES[0]]
    return stored is not None and stored.digests == block_digests(data)


def create_run(store: DirectoryStore) -> None:
    """Make the run."""
    Run.open_or_create(store)


def claim(continues: tuple[int, int] | None) -> Stage:
    """Start a writer."""
    return lambda store: _ignore(Run.open(store).claim_term(continues))


def begin(step: int, term: int, attempt: int) -> Stage:
    """Start an attempt and leave it."""
    return lambda store: _ignore(
        Run.open(store).begin(step=step, term=term, attempt=attempt).folder
    )


def abort(folder: str) -> Stage:
    """Give an attempt up."""
    return lambda store: _ignore(attempts.abort(Run.open(store), folder, "a test"))


def clean(store: DirectoryStore) -> None:
    """Remove what was left behind, however new."""
    Run.open(store).clean(now_s=time.time() + 1e6)


def prune_one(keep_last: int) -> Stage:
    """Delete one checkpoint: each deletion is a stage of its own."""

    def stage(store: DirectoryStore) -> None:
        plan = plan_prune(Run.open(store), Keep(last=keep_last))
        assert len(plan.deletions) == 1
        plan.execute()

    return stage


def prune_oldest(store: DirectoryStore) -> None:
    """Delete at most one checkpoint, as a policy that keeps one would."""
    plan = plan_prune(Run.open(store), Keep(last=1, abandoned=False))
    msgspec.structs.replace(plan, deletions=plan.deletions[:1]).execute()


def copied(number: int) -> Stage:
    """Copy one checkpoint of a run whose checkpoints share files."""

    def stage(store: DirectoryStore) -> None:
        source = DirectoryStore(_shared_run())
        names = sorted(name for name in source.folder_names("") if name.startswith("step-"))
        Copier(source, store, threads=1).copy(names[number])

    return stage


@functools.cache
def _shared_run() -> Path:
    """A run of three checkpoints that share all data files."""
    folder = Path(tempfile.mkdtemp(prefix="shared-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    store = DirectoryStore(folder / "run")
    for stage in (create_run, claim(None), *(save_sharing(n, 1, n) for n in (1, 2, 3))):
        stage(store)
    return folder / "run"


SCENARIOS = (
    Scenario(
        name="a new run and its first save",
        before=(),
        stages=(create_run, claim(None), save(10, 1, 1)),
    ),
    Scenario(
        name="the next save and the prune after it",
        before=(create_run, claim(None), save(10, 1, 1), save(20, 1, 2)),
        stages=(save(30, 1, 3), prune_one(2), prune_one(1)),
    ),
    Scenario(
        name="a step saved again",
        before=(create_run, claim(None), save(10, 1, 1)),
        stages=(save(10, 1, 2), prune_one(1)),
    ),
    Scenario(
        name="a rollback and a save on the new branch",
        before=(create_run, claim(None), save(10, 1, 1), save(20, 1, 2)),
        stages=(claim((1, 1)), save(20, 2, 1)),
    ),
    Scenario(
        name="an attempt given up by the next writer and cleaned",
        before=(create_run, claim(None), save(10, 1, 1)),
        stages=(
            begin(20, 1, 2),
            claim((1, 1)),
            clean,
            begin(30, 2, 1),
            abort("step-00000030.2-1"),
            clean,
        ),
    ),
    Scenario(
        name="a save by ranks in folders and the prune after it",
        before=(create_run, claim(None), save_by_ranks(10, 1, 1)),
        stages=(save_by_ranks(20, 1, 2), prune_one(1)),
    ),
    Scenario(
        name="saves that share files, and the prune of those they share them with",
        before=(create_run, claim(None), save_sharing(10, 1, 1)),
        stages=(
            save_sharing(20, 1, 2),
            prune_one(1),
            save_sharing(30, 1, 3),
            prune_one(1),
            save_sharing(40, 1, 4, anew=True),
            prune_one(1),
        ),
    ),
    Scenario(
        name="saves encoded against earlier ones, and the prune of those",
        before=(create_run, claim(None), _ENCODING.save(10, 1, 1)),
        stages=(_ENCODING.save(20, 1, 2), prune_one(1), _ENCODING.save(30, 1, 3), prune_one(1)),
    ),
    Scenario(
        name="copies that are linked to each other, and the prune of what they share",
        before=(copied(0),),
        stages=(copied(1), prune_one(1), copied(2)),
    ),
)


def random_scenario(seed: int, stages: int = 8) -> Scenario:
    """A history of saves, repeated steps, restarts, rollbacks, aborts, cleans and prunes."""
    chance = random.Random(seed)
    made: list[Stage] = [create_run, claim(None)]
    term, attempt, lineage = 1, 0, [(0, 0)]
    while len(made) < stages + 2:
        kind = chance.choice(("save", "save", "save", "restart", "give up", "clean", "prune"))
        shares = chance.random() < 0.5
        if kind in ("save", "give up"):
            attempt += 1
            step = chance.randrange(6)
            if kind == "save":
                made.append((save_sharing if shares else save)(step, term, attempt))
                lineage.append((term, attempt))
            else:
                made.append(begin(step, term, attempt))
                made.append(abort(f"step-{step:08d}.{term}-{attempt}"))
        elif kind == "restart":
            del lineage[max(1, len(lineage) - chance.randrange(3)) :]
            made.append(claim(lineage[-1] if len(lineage) > 1 else None))
            term, attempt = term + 1, 0
        else:
            made.append(clean if kind == "clean" else prune_oldest)
    return Scenario(name=f"history {seed}", before=tuple(made[:2]), stages=tuple(made[2:]))


# Jobs of two ranks keep their files in folders here, as only large jobs do.
_in_folders = mock.patch.object(index_format, "FLAT_RANKS", 1)


@_in_folders
def record(scenario: Scenario, folder: Path, disk: RecordingDisk) -> Recorded:
    """Perform a scenario in `folder` and keep every call."""
    root = folder / "run"
    folder.mkdir(parents=True)
    for stage in scenario.before:
        stage(DirectoryStore(root))
    base = crashed_disk.read_tree(folder)
    marks = [(0, shown(root))]
    for stage in scenario.stages:
        stage(DirectoryStore(root, disk=disk))
        marks.append((len(disk.changes), shown(root)))
    return Recorded(base=base, changes=tuple(disk.changes), marks=tuple(marks))


def explore(
    folder: Path,
    *,
    budget: int,
    seed: int = 0,
    scenarios: tuple[Scenario, ...] = SCENARIOS,
    make_disk: Callable[[], RecordingDisk] = RecordingDisk,
    recover_every: int = 10,
) -> Explored:
    """Cut every scenario after every call, in up to `budget` ways each; `Violated` if it shows."""
    cuts = crashes = distinct = 0
    for number, scenario in enumerate(scenarios):
        work = folder / f"{number}-{seed}"
        recorded = record(scenario, work / "made", make_disk())
        cuts += len(recorded.changes) + 1
        seen: set[tuple[bytes, frozenset[Shown]]] = set()
        for calls, tree in _crashes(recorded, work / "made", budget, seed):
            crashes += 1
            key = (crashed_disk.fingerprint(tree), recorded.allowed(calls))
            if key not in seen:
                seen.add(key)
                distinct += 1
                recover = distinct % recover_every == 0
                _check(scenario, recorded, calls, tree, work / "crashed", recover=recover)
    return Explored(cuts=cuts, crashes=crashes, distinct=distinct)


def shown(root: Path) -> Shown:
    """What a reader sees, each file by its digest; None where there is no run."""
    store = DirectoryStore(root, direct=False)
    try:
        run = Run.open(store)
    except NotFoundError:
        return None
    result = []
    for item in run.checkpoints():
        if item.commit is None:
            raise Violated(f"{item.folder} is shown but cannot be read: {item.error}")
        indexes = read_indexes(store, item.folder, item.commit)
        digests = [item.commit.written.indexes.hex()]
        for file in (file for index in indexes for file in index.files):
            data = store.read(f"{item.folder}/{file.name}", limit_bytes=1 << 20)
            if len(data) != file.size_bytes:
                raise Violated(f"{item.folder}/{file.name} has {len(data)} bytes")
            digests.append(hashlib.blake2b(data, digest_size=16).hexdigest())
        result.append((item.folder, item.on_lineage, tuple(digests)))
    return tuple(result)


def _crashes(
    recorded: Recorded, root: Path, budget: int, seed: int
) -> Iterator[tuple[int, crashed_disk.Tree]]:
    """Every tree that a crash may leave, with the number of calls before it."""
    world = crashed_disk.World(str(root), recorded.base)
    for calls in range(len(recorded.changes) + 1):
        if calls:
            world.perform(recorded.changes[calls - 1])
        for tree in world.crashes(budget, seed * 100_003 + calls):
            yield calls, tree


@_in_folders
def _check(
    scenario: Scenario,
    recorded: Recorded,
    calls: int,
    tree: crashed_disk.Tree,
    place: Path,
    *,
    recover: bool,
) -> None:
    crashed_disk.write_tree(place, tree)
    last = recorded.changes[calls - 1] if calls else None
    context = f"{scenario.name}, cut after call {calls} ({last and (last.kind.value, last.path)})"
    try:
        found = shown(place / "run")
        if found not in recorded.allowed(calls):
            raise Violated(f"{context}: {found} is shown")
        if recover:
            _recover(place / "run", found)
    except LaststepError as error:
        raise Violated(f"{context}: {error}") from error


def _recover(root: Path, before: Shown) -> None:
    """A new writer takes over, cleans up and saves; nothing that was visible is lost by it."""
    store = DirectoryStore(root, direct=False)
    run = Run.open_or_create(store)
    newest = run.newest()
    continues = None if newest is None else (newest.term, newest.attempt)
    term = run.claim_term(continues)
    clean(store)
    if run.attempts():
        raise Violated(f"attempts are left after cleaning: {run.attempts()}")
    if shown(root) != (before or ()):
        raise Violated(f"cleaning changed what is shown: {before} became {shown(root)}")
    save(99, term, 1)(store)
    saved = run.newest()
    if saved is None or saved.step != 99:
        raise Violated(f"after the recovery the newest is {saved}")


def _commit(step: int, term: int, attempt: int, written: WrittenIndexes, ranks: int = 1) -> Commit:
    item = ItemRecord(name="m", kind="t", tensors=1, size_bytes=1)
    return Commit(
        run="0" * 32,
        step=step,
        term=term,
        attempt=attempt,
        created_s=1.0,
        laststep="0",
        items=(item,),
        written=written,
        ranks=ranks,
    )


def _ignore(_: object) -> None:
    return None
