"""Save a state to a folder and load it again, without a run.

The folder is an ordinary checkpoint: verified, committed atomically, readable with the same tools.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.browse import Checkpoint, open_folder
from laststep.browse import open as open_catalog
from laststep.catalog.attempt import PIN_NAME, is_checkpoint, parse_folder, read_newest
from laststep.checkpointer import Checkpointer
from laststep.constants import MANIFEST_NAME, with_article
from laststep.errors import (
    AlreadyExistsError,
    CorruptError,
    LaststepError,
    NotFoundError,
    StorageError,
    UsageError,
    ends_tracebacks,
)
from laststep.format.index import index_name
from laststep.memory.pool import ReadBuffers
from laststep.process import signals, system
from laststep.ranks.group import Rank, Ranks, this_rank
from laststep.restoring.exchange import Transfer
from laststep.restoring.match import load_item
from laststep.restoring.plan import VALUE, compare_aliases, plan_restore
from laststep.restoring.restore import hand_over
from laststep.saving.context import check_new_folder
from laststep.settings import FlushIn, Options
from laststep.state.items import providers_for
from laststep.state.tensors import allocate
from laststep.storage.files import UNSUPPORTED, Disk, absolute, failed
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from laststep.restoring.match import Match
    from laststep.storage.store import Store

log = logging.getLogger(__name__)

_READERS = 4
_LOCK = ".lock"
_QUIET = Options(flush=FlushIn.THREAD, progress=False)


class _SoleCheckpointer(Checkpointer):
    """A Checkpointer for this process only, even if its job has other ranks."""

    _who = staticmethod(functools.partial(Rank, 0, 1))
    _may_lack_items = True  # an import adds what it has
    _can_be_off = False


@ends_tracebacks
def save(
    state: object,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> None:
    """Save a state (a nest of values and tensors, a module, an optimizer, …) as one new folder, and
    return when it is durable. Raises `AlreadyExistsError` if the path exists.

    `overwrite` atomically replaces a folder that an earlier `save` wrote; the old one stays until
    the new one is complete. `allow_pickle` pickles objects that cannot be stored otherwise.
    """
    full = absolute(path)
    if os.path.lexists(full):
        full = _to_replace(full, overwrite=overwrite)
    target = Path(full)
    check_new_folder(target)
    beside = open_store(target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _staging(beside, target.name) as name:
            # A temporary run beside the target, of whose only checkpoint the target is made.
            staging = target.parent / name
            saver = _SoleCheckpointer(
                staging, items={VALUE: state}, allow_pickle=allow_pickle, options=_QUIET
            )
            with saver as ckpt:
                handle = ckpt.save(0)
                handle.wait()
            _put(staging / str(handle.report.folder), target, overwrite=overwrite)
            beside.sync_folder("")  # before the old folder is deleted
    except OSError as error:
        raise failed("save a folder", full, error) from error


def _to_replace(full: str, *, overwrite: bool) -> str:
    """Return the folder to replace, links resolved; raise `AlreadyExistsError` if it must stay."""
    if not overwrite:
        raise AlreadyExistsError(
            "the path already exists",
            where=full,
            remedy="choose another path, or pass overwrite=True to replace a checkpoint",
        )
    real = os.path.realpath(full)
    ours = (MANIFEST_NAME, index_name(0), PIN_NAME)
    ends = (".safetensors", ".pack", ".lock")
    if not is_checkpoint(open_store(real)):
        foreign = ["no checkpoint"]
    elif parse_folder(Path(real).name) is not None:
        foreign = ["a checkpoint of a run"]
    else:
        names = sorted(entry.name for entry in Path(real).iterdir())
        foreign = [name for name in names if name not in ours and not name.endswith(ends)]
    if foreign:
        raise AlreadyExistsError(
            "refused to replace what laststep.save did not write",
            where=full,
            expected="only what laststep.save has stored",
            found=", ".join(foreign[:3]),
            remedy="choose another path, or remove it",
        )
    return real


@contextlib.contextmanager
def _staging(beside: Store, name: str) -> Iterator[str]:
    """Yield the name of a locked temporary folder beside the folder `name`, and delete it at the
    end. Temporary folders of dead processes are deleted first."""
    with contextlib.suppress(LaststepError):  # they may belong to another user
        _clear(beside, name)
    staging = f".{name}.tmp-{os.getpid()}-{time.monotonic_ns()}"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(NotFoundError):  # not writable: the save reports it
            held.enter_context(contextlib.closing(beside.lock(staging + _LOCK)))
        try:
            yield staging
        finally:
            beside.delete_folder(staging)
            beside.delete(staging + _LOCK)


def _clear(beside: Store, name: str) -> None:
    ours = re.compile(re.escape(f".{name}.tmp-") + r"[0-9]+-[0-9]+" + re.escape(_LOCK))
    for lock in filter(ours.fullmatch, beside.file_names("") if beside.locks_tell() else ()):
        if not beside.is_locked(lock):
            left = lock.removesuffix(_LOCK)  # may be renamed already, or never created
            log.warning("deleting %s, which a killed save left behind", left)
            beside.delete_folder(left)
            beside.delete(lock)


def _put(made: Path, target: Path, *, overwrite: bool) -> None:
    """Rename a checkpoint to its target, or exchange it with a folder that is there by then."""
    if not os.path.lexists(target):
        try:
            made.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            return
    real = _to_replace(str(target), overwrite=overwrite)
    try:
        Disk().exchange(str(made), real)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        raise StorageError(
            "this filesystem cannot replace a folder atomically",
            where=real,
            expected="one that can exchange two names, as ext4, XFS, Btrfs and tmpfs can",
            found=str(error.strerror),
            remedy="remove the folder first, or save to another path",
        ) from error


@ends_tracebacks
def load(
    path: str | os.PathLike[str],
    into: object = None,
    *,
    step: int | None = None,
    rank: int | None = None,
    map_location: str | torch.device | None = None,
    allow_pickle: bool = False,
    strict: bool = True,
) -> object:
    """Load and return a state that `save` stored, or all items of a run's checkpoint as a dict.
    `optimizer.load_state_dict` accepts the state of an optimizer.

    Raises `CorruptError` if the checkpoint is damaged; an older one is never loaded instead.

    path: The folder of a checkpoint or of a run, or a URL.
    into: A state to restore in place, which is then returned; None creates new objects.
    step: The step of a run to load; None means the newest.
    rank: The rank whose per-rank items to load. None means this process's rank, or rank 0 if the
        checkpoint has no such rank.
    map_location: The device for new tensors; the CPU by default.
    allow_pickle: Unpickle objects that were saved as pickles. Only for trusted files.
    strict: With `into`, False loads everything that fits; True raises `MismatchError` if
        something does not fit.
    """
    target = _device(map_location)
    store = open_store(path)

    def load_from(checkpoint: Checkpoint, *, is_run: bool) -> object:
        me = this_rank()
        alone = Ranks(me)
        own = me.number if me.number < checkpoint.ranks else 0
        with (
            signals.defer_signals(),
            system.translate_oom("load"),
            checkpoint.of_rank(own if rank is None else rank) as seen,
            ReadBuffers(_READERS) as room,
        ):
            content = seen.content()
            single = not is_run and set(content.items) == {VALUE}
            if into is None:
                matches = [load_item(item, target) for item in content.items.values()]
                if rank is None:
                    _tell_whose(seen, matches, own, me)
                Transfer(content, matches, alone).run(room, _READERS)
                values = {
                    m.item.name: m.tree(allow_pickle=allow_pickle, as_torch=True) for m in matches
                }
                return values[VALUE] if single else values
            live = {VALUE: into} if single else into
            if not isinstance(live, Mapping):
                raise UsageError(
                    "cannot determine which item `into` is",
                    expected=f"a dict with the items {', '.join(content.items)}",
                    found=with_article(type(into)),
                    remedy="pass into={'model': model, …}",
                )
            providers = providers_for(live)
            found = plan_restore(
                content,
                providers,
                None,
                strict=strict,
                remedy=(
                    "pass strict=False to load what fits, rank=… for the state of another rank, or "
                    "leave `into` out to see what is stored"
                ),
                # Per-rank items of an explicitly chosen rank fit any number of ranks.
                ranks=alone if rank is None else Ranks(Rank(rank, seen.ranks)),
            )
            if rank is None:
                taken = [match for match in found.matches if match.item.name not in found.derived]
                _tell_whose(seen, taken, own, me)
            Transfer(content, found.matches, alone).run(room, _READERS)
            if found.have_aliases:
                compare_aliases(found, alone, content.where)
            hand_over(content, found, providers, room, me, allow_pickle=allow_pickle)
            return into

    if not is_checkpoint(store):
        catalog = open_catalog(path)
        try:
            if step is not None:
                return load_from(catalog[step], is_run=True)
            return read_newest(store, catalog.latest, lambda found: load_from(found, is_run=True))
        except CorruptError as error:
            _set_remedy(error, "load(…, step=N) loads an earlier step")
            raise
    if step is not None:
        raise UsageError(
            "a single checkpoint has only one step", where=store.url, remedy="leave `step` out"
        )
    while True:
        checkpoint = open_folder(store.url)
        try:
            return load_from(checkpoint, is_run=False)
        except (CorruptError, NotFoundError) as error:
            _set_remedy(error, "load another copy")
            with contextlib.suppress(LaststepError):
                if open_folder(open_store(path).url).created_s != checkpoint.created_s:
                    log.info("%s was overwritten meanwhile: loading it again", store.url)
                    continue
            raise


def _set_remedy(error: LaststepError, remedy: str) -> None:
    """Replace the usual remedy for damage, which is to call restore()."""
    if error.remedy == CorruptError.usual_remedy:
        error.remedy = f"`laststep verify` lists all damage; {remedy}"


def _tell_whose(checkpoint: Checkpoint, matches: Sequence[Match], rank: int, me: Rank) -> None:
    """Warn if the user chose no rank, and this process has no per-rank state of its own there."""
    names = [m.item.name for m in matches if m.item.name in checkpoint.per_rank()]
    if names and me.ranks != checkpoint.ranks:
        log.warning(
            "%s: each of %d ranks has its own; this is rank %d's: load(…, rank=…) loads another's",
            ", ".join(names),
            checkpoint.ranks,
            rank,
        )


def _device(wanted: str | torch.device | None) -> str:
    if wanted is None or wanted == "cpu":
        return "cpu"
    try:
        return str(allocate("uint8", (0,), str(wanted)).device)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # torch raises several
        raise UsageError(
            "cannot load to that device",
            expected="one device that this process has, for all tensors",
            found=f"{wanted!r}: {str(error).partition(chr(10))[0]}",
            remedy='pass map_location="cpu"',
        ) from error


def import_state(
    items: Mapping[str, object], run: str | os.PathLike[str], step: int, *, metadata: object = None
) -> None:
    """Commit items from another source as a checkpoint of a run."""
    with _SoleCheckpointer(run, items=items, options=_QUIET) as ckpt:
        ckpt.continue_newest()
        ckpt.save(step, metadata=metadata)
