"""What a run does, to be cut at every system call; and what must hold after each cut.

Each scenario is a list of stages. During a stage a crash may leave what was visible before it or
what is visible after it, bit for bit, and nothing else; between stages only the latter. `explore`
is used by the short tests here and, with a larger budget, by the torture.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import crashed_disk
import msgspec

from laststep.catalog import groups
from laststep.catalog.groups import files_of
from laststep.catalog.prune import plan_prune
from laststep.catalog.retention import Keep
from laststep.catalog.run import Run
from laststep.errors import LaststepError, NotFound
from laststep.flush import lending
from laststep.flush.coder import Compressor
from laststep.flush.protocol import FileBegin, Orders
from laststep.flush.writer import SaveFlush
from laststep.format.group import GroupManifest
from laststep.format.header import reserve_bytes
from laststep.format.manifest import Commit, FileRecord, ItemRecord
from laststep.format.safetensors import TensorEntry
from laststep.storage.directory import DirectoryStore
from laststep.terms import ALIGN_BYTES, align_up
from laststep.testing.faults import Change, RecordingDisk
from laststep.testing.stores import write_file
from laststep.tiers.bringing import CopyRoute
from laststep.tiers.copying import Copier

Shown = tuple[tuple[str, bool, tuple[str, ...]], ...] | None
"""Each checkpoint: its folder, whether it is on the lineage, the digests of its files."""

Stage = Callable[[DirectoryStore], None]

_FILES = ("model.safetensors", "shared.safetensors")


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


def save(step: int, epoch: int, attempt: int) -> Stage:
    """Write two files and commit."""

    def stage(store: DirectoryStore) -> None:
        run = Run.open(store)
        folder = run.begin(step=step, epoch=epoch, attempt=attempt)
        for number, name in enumerate(_FILES):
            seed = f"{folder}/{name}".encode()
            data = hashlib.shake_128(seed).digest(5000 + 4000 * number)
            write_file(store, f"{folder}/{name}", data)
        run.commit(folder, _commit(step, epoch, attempt))

    return stage


def save_by_groups(step: int, epoch: int, attempt: int) -> Stage:
    """Two ranks, each a group of its own, write a file each into a folder that one of them makes,
    then the manifests of their groups; and the first one commits."""

    def stage(store: DirectoryStore) -> None:
        run = Run.open(store)
        folder = run.begin(step=step, epoch=epoch, attempt=attempt)
        ranks = [_flush(store, folder, rank) for rank in range(2)]
        records = []
        for rank, flush in enumerate(ranks):
            (file,) = flush.finish(())
            manifest = GroupManifest(
                step=step, epoch=epoch, attempt=attempt, first=rank, ranks=1,
                files=(msgspec.structs.replace(file, rank=rank),),
            )  # fmt: skip
            records.append(groups.write(store, folder, manifest))
        commit = _commit(step, epoch, attempt)
        item = msgspec.structs.replace(commit.items[0], file="r00000/m-r00000.safetensors")
        run.commit(folder, msgspec.structs.replace(
            commit, files=(), items=(item,), groups=tuple(records), ranks=2
        ))  # fmt: skip

    return stage


def save_borrowing(step: int, epoch: int, attempt: int, *, anew: bool = False) -> Stage:
    """Write a file whose tensor stays the same from save to save and whose object changes, and one
    of which nothing does: what stays is borrowed of the newest checkpoint, but for `anew`."""

    def stage(store: DirectoryStore) -> None:
        run = Run.open(store)
        folder = run.begin(step=step, epoch=epoch, attempt=attempt)
        newest, names = run.newest(), ("a.safetensors", "b.safetensors")
        with mock.patch.object(lending, "LEAST_BYTES", 0):
            lenders = {}
            if newest is not None and not anew:
                lenders = lending.of_checkpoint(store, newest.folder, names)
            flush = SaveFlush(store, folder, tuple(map(_plan, names)), lenders)
            for number, name in enumerate(names):
                flush.write(number, 0, memoryview(_image(name)), _SIZE)
            changing = f"object of step {step}".encode()
            records = flush.finish(((0, "m/~6tree", changing), (1, "m/~6tree", b"as it was")))
        shares = {record.sharers for record in records}
        assert shares == {0} or lenders, "what nobody lends is written"
        assert shares != {0} or not lenders, "what somebody lends is not"
        commit = _commit(step, epoch, attempt)
        item = msgspec.structs.replace(commit.items[0], file=names[0])
        run.commit(folder, msgspec.structs.replace(commit, files=records, items=(item,)))

    return stage


class Encoding:
    """Saves whose blocks are encoded by one flusher, which keeps what it wrote in memory."""

    def __init__(self) -> None:
        self._compressor = Compressor(Orders(writers=1, compression="max"), memory_bytes=1 << 20)

    def save(self, step: int, epoch: int, attempt: int) -> Stage:
        """Write a file that differs in a few bytes from save to save, and one of which nothing
        does: the first is told by its difference to what it was, the second linked."""

        def stage(store: DirectoryStore) -> None:
            run = Run.open(store)
            folder = run.begin(step=step, epoch=epoch, attempt=attempt)
            newest, names = run.newest(), ("a.safetensors", "b.safetensors")
            with mock.patch.object(lending, "LEAST_BYTES", 0):
                lenders = {}
                if newest is not None:
                    lenders = lending.of_checkpoint(store, newest.folder, names)
                flush = SaveFlush(
                    store, folder, tuple(map(_plan, names)), lenders, self._compressor
                )
                for number, name in enumerate(names):
                    image = _image(name, mask=3)
                    image[step % _SIZE] ^= 1 - number
                    flush.write(number, 0, memoryview(image), _SIZE)
                records = flush.finish(((0, "m/~6tree", b"a"), (1, "m/~6tree", b"as it was")))
            picked = [report.picked for report in flush.coding()]
            assert picked == (["patches", "raw"] if lenders else ["planes", "planes"])
            commit = _commit(step, epoch, attempt)
            item = msgspec.structs.replace(commit.items[0], file=names[0])
            run.commit(folder, msgspec.structs.replace(commit, files=records, items=(item,)))

        return stage


_SIZE = 5000
_ENCODING = Encoding()


def _plan(name: str) -> FileBegin:
    entry = TensorEntry(name="t", dtype="uint8", shape=(_SIZE,), start=0, stop=_SIZE)
    region = reserve_bytes(
        item="m", tensors=(entry,), object_names=("m/~6tree",), tensor_bytes=_SIZE
    )
    return FileBegin(
        name=name, item="m", region_bytes=region, tensor_bytes=_SIZE, has_objects=True,
        entries=(entry,),
    )  # fmt: skip


def _image(seed: str, mask: int = 0xFF) -> mmap.mmap:
    image = mmap.mmap(-1, align_up(_SIZE, ALIGN_BYTES))
    image[:_SIZE] = bytes(byte & mask for byte in hashlib.shake_128(seed.encode()).digest(_SIZE))
    return image


def _flush(store: DirectoryStore, folder: str, rank: int) -> SaveFlush:
    """The file of a rank, written and not yet durable."""
    flush = SaveFlush(store, folder, (_plan(f"r00000/m-r{rank:05d}.safetensors"),))
    flush.write(0, 0, memoryview(_image(f"{folder}/{rank}")), _SIZE)
    return flush


def create_run(store: DirectoryStore) -> None:
    """Make the run."""
    Run.open_or_create(store)


def claim(continues: tuple[int, int] | None) -> Stage:
    """Start a writer."""
    return lambda store: _ignore(Run.open(store).claim_epoch(continues))


def begin(step: int, epoch: int, attempt: int) -> Stage:
    """Start an attempt and leave it."""
    return lambda store: _ignore(Run.open(store).begin(step=step, epoch=epoch, attempt=attempt))


def abort(folder: str) -> Stage:
    """Give an attempt up."""
    return lambda store: _ignore(Run.open(store).abort(folder, "a test"))


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
    """Copy one checkpoint of a golden run whose checkpoints share files."""
    golden = DirectoryStore(_BORROWED)

    def stage(store: DirectoryStore) -> None:
        folder = sorted(name for name in golden.folder_names("") if name.startswith("step-"))[
            number
        ]
        Copier(CopyRoute(source=golden, target=store, threads=1)).copy(folder)

    return stage


_BORROWED = Path(__file__).resolve().parent.parent / "golden" / "version-2" / "borrowed"

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
        stages=(begin(20, 1, 2), claim((1, 1)), clean, begin(30, 2, 1),
                abort("step-00000030.2-1"), clean),
    ),
    Scenario(
        name="a save by groups of ranks and the prune after it",
        before=(create_run, claim(None), save_by_groups(10, 1, 1)),
        stages=(save_by_groups(20, 1, 2), prune_one(1)),
    ),
    Scenario(
        name="saves that borrow, and the prune of what they borrow of",
        before=(create_run, claim(None), save_borrowing(10, 1, 1)),
        stages=(save_borrowing(20, 1, 2), prune_one(1), save_borrowing(30, 1, 3), prune_one(1),
                save_borrowing(40, 1, 4, anew=True), prune_one(1)),
    ),
    Scenario(
        name="saves that are told by their differences, and the prune of what these are to",
        before=(create_run, claim(None), _ENCODING.save(10, 1, 1)),
        stages=(_ENCODING.save(20, 1, 2), prune_one(1), _ENCODING.save(30, 1, 3), prune_one(1)),
    ),
    Scenario(
        name="copies that are linked to each other, and the prune of what they share",
        before=(copied(0),),
        stages=(copied(1), prune_one(1), copied(2)),
    ),
)  # fmt: skip


def random_scenario(seed: int, stages: int = 8) -> Scenario:
    """A history of saves, repeated steps, restarts, rollbacks, aborts, cleans and prunes."""
    chance = random.Random(seed)
    made: list[Stage] = [create_run, claim(None)]
    epoch, attempt, lineage = 1, 0, [(0, 0)]
    while len(made) < stages + 2:
        kind = chance.choice(("save", "save", "save", "restart", "give up", "clean", "prune"))
        borrows = chance.random() < 0.5
        if kind in ("save", "give up"):
            attempt += 1
            step = chance.randrange(6)
            if kind == "save":
                made.append((save_borrowing if borrows else save)(step, epoch, attempt))
                lineage.append((epoch, attempt))
            else:
                made.append(begin(step, epoch, attempt))
                made.append(abort(f"step-{step:08d}.{epoch}-{attempt}"))
        elif kind == "restart":
            del lineage[max(1, len(lineage) - chance.randrange(3)) :]
            made.append(claim(lineage[-1] if len(lineage) > 1 else None))
            epoch, attempt = epoch + 1, 0
        else:
            made.append(clean if kind == "clean" else prune_oldest)
    return Scenario(name=f"history {seed}", before=tuple(made[:2]), stages=tuple(made[2:]))


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
    except NotFound:
        return None
    result = []
    for item in run.checkpoints():
        if item.commit is None:
            raise Violated(f"{item.folder} is shown but cannot be read: {item.error}")
        digests = []
        for file in files_of(store, item.folder, item.commit):
            data = store.read(f"{item.folder}/{file.name}", limit_bytes=1 << 20)
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
    continues = None if newest is None else (newest.epoch, newest.attempt)
    epoch = run.claim_epoch(continues)
    clean(store)
    if run.attempts():
        raise Violated(f"attempts are left after cleaning: {run.attempts()}")
    if shown(root) != (before or ()):
        raise Violated(f"cleaning changed what is shown: {before} became {shown(root)}")
    save(99, epoch, 1)(store)
    saved = run.newest()
    if saved is None or saved.step != 99:
        raise Violated(f"after the recovery the newest is {saved}")


def _commit(step: int, epoch: int, attempt: int) -> Commit:
    files = tuple(
        FileRecord(
            name=name,
            size_bytes=5000 + 4000 * number,
            header_bytes=4096,
            header_digest="xxh3-128:" + "0" * 32,
        )
        for number, name in enumerate(_FILES)
    )
    item = ItemRecord(name="model", kind="t", file=_FILES[0], tensors=1, size_bytes=1)
    return Commit(
        run="0" * 32, step=step, epoch=epoch, attempt=attempt, created_s=1.0, laststep="0",
        items=(item,), files=files,
    )  # fmt: skip


def _ignore(_: object) -> None:
    return None
