"""Store what is whole in shared memory and nowhere else: what its own flusher would have done.

Whoever rescues a save takes the lock of its epoch, whose writer is dead, makes its attempt anew and
commits it, unless another start has gone on without it, or is about to: by the same order of steps
as any writer (`Run.begin`), so that of the two at most one wins. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from contextlib import closing
from typing import TYPE_CHECKING

from laststep.catalog import epochs
from laststep.catalog.epochs import Epochs
from laststep.catalog.lineage import RUN_NAME, epoch_record_name, order
from laststep.catalog.run import Run, newest_point
from laststep.codecs.digests import DIGEST_BYTES, block_digests
from laststep.errors import AbortedError, AlreadyExistsError, CorruptError, NotFoundError
from laststep.format.manifest import Commit
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES, align_up

if TYPE_CHECKING:
    from laststep.format.index import StoredLayout
    from laststep.storage.store import Store
    from laststep.tiers.sealed import SealedCheckpoint, SealedSave

log = logging.getLogger(__name__)


def is_left_behind(store: Store, save: SealedSave) -> bool:
    """Whether the run has gone on without a save that it has not committed: another start has that
    epoch, or what was committed last does not descend from it. A start that has committed nothing
    has decided nothing."""
    if is_of_another(store, save):
        return True
    last = newest_point(store).commit
    return save.at.point < last and not order([save.at], Epochs(store).chain(last[0]))


def is_of_another(store: Store, save: SealedSave) -> bool:
    """Whether its epoch is another start's here: the run was replaced by an older copy, which has
    gone on since."""
    epoch, known = save.at.epoch, dict(save.records)
    with contextlib.suppress(CorruptError):  # that tells nothing
        there, own = Epochs(store).read(epoch), known.get(epoch_record_name(epoch))
        if there is not None and own is not None:
            return there != epochs.decode(own, epoch=epoch, where="shared memory")
    return False


def store_snapshot(store: Store, checkpoint: SealedCheckpoint) -> bool:
    """Store and commit it in its run; False where it is committed already."""
    run, save, at = Run.open(store), checkpoint.save, checkpoint.save.at
    if isinstance(run.decision(at.folder), Commit):
        return False
    _check_not_gone_on(run, save)
    put_records(store, save)
    with closing(run.lock_epoch(at.epoch)):
        if isinstance(run.decision(at.folder), Commit):
            return False  # somebody else has rescued it meanwhile
        _begin(run, save)
        names = [*checkpoint.layouts, *checkpoint.indexes]
        folders = {name.rpartition("/")[0] for name in names} - {""}
        for inner in sorted(folders):
            store.make_folder(f"{at.folder}/{inner}", parents=False)
        for name in names:
            _write(store, checkpoint, name)
        for inner in ("", *folders):
            store.sync_folder(f"{at.folder}/{inner}".rstrip("/"))
        _check_not_gone_on(run, save)
        run.commit(at.folder, checkpoint.commit)
    log.warning("step %d was stored out of shared memory, as %s", at.step, at.folder)
    return True


def put_records(store: Store, save: SealedSave) -> None:
    """Bring the records, in the order in which they were made, that say which run it is and whose
    epoch, where the run has lost them."""
    for name, data in save.records:
        if name != RUN_NAME:
            epochs.make_folder(store)
        with contextlib.suppress(AlreadyExistsError):
            store.create(name, data)


def _begin(run: Run, save: SealedSave) -> None:
    """Make the folder, then see whether nobody has gone on; see `Run.begin`."""
    folder, epoch = save.at.folder, save.at.epoch
    if run.epoch(epoch) is None:
        raise NotFoundError(
            f"cannot store step {save.at.step}: the run is not the one that was saved to",
            where=run.store.url,
            expected=f"its record of epoch {epoch}",
            found="none",
            remedy="bring the record back from a copy of the run",
        )
    run.store.delete_folder(folder)  # what its writer has left is not whole
    run.store.make_folder(folder)
    try:
        _check_not_gone_on(run, save)
    except AbortedError as error:
        run.abort(folder, f"the run was taken over by {error.found}")
        raise


def _check_not_gone_on(run: Run, save: SealedSave) -> None:
    """`AbortedError` where another start has gone on without it, or lives and may."""
    known, epoch = Epochs(run.store), save.at.epoch
    living = run.live_writer()
    if is_left_behind(run.store, save) or (living is not None and living.epoch > epoch):
        raise known.superseded(max(known.numbers()), expected=f"nobody to go on since {epoch}")


def _write(store: Store, checkpoint: SealedCheckpoint, name: str) -> None:
    """Write a file; `CorruptError` where the memory is not what was sealed."""
    path = f"{checkpoint.folder}/{name}"
    stored = checkpoint.layouts.get(name)
    into = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # not closed: an error's traceback may hold it
    with (
        closing(checkpoint.reader(name)) as reader,
        closing(store.open_writer(path, expected_bytes=reader.size_bytes)) as writer,
    ):
        size, region = reader.size_bytes, reader.header_bytes
        for start in (*range(0, region, CHUNK_BYTES), *range(region, size, CHUNK_BYTES)):
            stop = min(start + CHUNK_BYTES, region if start < region else size)
            got = reader.read_into(start, into[: stop - start])
            if stored is not None and start >= region:
                _verify(stored, start - region, into[:got], path)
            with into[: align_up(got, writer.alignment_bytes)] as part:
                writer.write_at(start, part)
        writer.finish(size)


def _verify(stored: StoredLayout, at: int, data: memoryview, where: str) -> None:
    first = at // BLOCK_BYTES * DIGEST_BYTES
    found = block_digests(data)
    expected = stored.digests[first : first + len(found)]
    if found != expected:
        raise CorruptError(
            "shared memory is not as it was sealed",
            where=where,
            expected=expected.hex(),
            found=found.hex(),
        )
