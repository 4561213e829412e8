"""Store what is whole in shared memory and nowhere else: what its own flusher would have done.

Whoever rescues a save takes the lock of its epoch, whose writer is dead, makes its attempt anew and
commits it, unless another start has taken the run over: by the same order of steps as any writer
(`Run.begin`), so that of the two at most one wins. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from contextlib import closing
from typing import TYPE_CHECKING

from laststep.catalog import epochs
from laststep.catalog.run import Run
from laststep.codecs.digests import DIGEST_BYTES, block_digests
from laststep.errors import Corrupt, Exists
from laststep.format.manifest import Commit
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES, align_up

if TYPE_CHECKING:
    from laststep.storage.store import Store
    from laststep.tiers.sealed import SealedCheckpoint, SealedFile

log = logging.getLogger(__name__)


def rescue(store: Store, checkpoint: SealedCheckpoint) -> bool:
    """Store and commit it in its run; False where it is committed already."""
    run, at = Run.open(store), checkpoint.save.at
    if isinstance(run.decision(at.folder), Commit):
        return False
    run.check_newest(at.epoch)
    with closing(run.lock_epoch(at.epoch)):
        if isinstance(run.decision(at.folder), Commit):
            return False  # somebody else has rescued it meanwhile
        store.delete_folder(at.folder)  # what its writer has left is not whole
        run.begin(step=at.step, epoch=at.epoch, attempt=at.attempt)
        folders = {name.rpartition("/")[0] for name in checkpoint.files} - {""}
        for inner in sorted(folders):
            store.make_folder(f"{at.folder}/{inner}", parents=False)
        for file in checkpoint.files.values():
            _write(store, checkpoint, file)
        for inner in ("", *folders):
            store.sync_folder(f"{at.folder}/{inner}".rstrip("/"))
        run.check_newest(at.epoch)
        run.commit(at.folder, checkpoint.commit)
    log.warning("step %d was stored out of shared memory, as %s", at.step, at.folder)
    return True


def found_anew(store: Store, checkpoint: SealedCheckpoint) -> bool:
    """Store it where all of its run was lost: first the records that make it that run, in the order
    in which they were made. False where its writer has left none."""
    save = checkpoint.save
    if save.records:
        epochs.make_folder(store)
    for name, data in save.records:
        with contextlib.suppress(Exists):
            store.create(name, data)
    if not save.records or Run.open(store).id != save.run:
        return False
    return rescue(store, checkpoint)


def _write(store: Store, checkpoint: SealedCheckpoint, file: SealedFile) -> None:
    """Write a data file; `Corrupt` where the memory is not what was sealed."""
    name = f"{checkpoint.folder}/{file.name}"
    into = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # not closed: an error's traceback may hold it
    with (
        closing(checkpoint.reader(file.name)) as reader,
        closing(store.open_writer(name, expected_bytes=reader.size_bytes)) as writer,
    ):
        size, region = reader.size_bytes, reader.header_bytes
        for start in (*range(0, region, CHUNK_BYTES), *range(region, size, CHUNK_BYTES)):
            stop = min(start + CHUNK_BYTES, region if start < region else size)
            got = reader.read_into(start, into[: stop - start])
            if start >= region:
                _verify(file, start - region, into[:got], name)
            with into[: align_up(got, writer.alignment_bytes)] as part:
                writer.write_at(start, part)
        writer.finish(size)


def _verify(file: SealedFile, at: int, data: memoryview, where: str) -> None:
    first = at // BLOCK_BYTES * DIGEST_BYTES
    found = block_digests(data[: max(file.tensor_bytes - at, 0)])
    expected = file.digests[first : first + len(found)]
    if found != expected:
        raise Corrupt("shared memory is not as it was sealed", where=where,
                      expected=expected.hex(), found=found.hex())  # fmt: skip
