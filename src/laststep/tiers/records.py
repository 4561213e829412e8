"""What makes two places the same run: its id, and the records of its epochs.

A checkpoint is copied under its own name, so both places have to mean the same by it. The target
may lack records, but it MUST NOT have any that the source does not have with the same bytes: then
somebody has gone on there, and what is newest would no longer be told by the order of commits.
Records are brought in the order of their numbers, before the first commit that needs them: at any
instant the target is a run.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from laststep.catalog import epochs, lineage, run
from laststep.catalog.epochs import RECORD_LIMIT_BYTES, Epochs
from laststep.catalog.listing import Scanner
from laststep.errors import AlreadyExistsError, NotFoundError, UsageError

if TYPE_CHECKING:
    from laststep.storage.store import Store


class Records:
    """The records of one run in two places."""

    def __init__(self, source: Store, target: Store, *, may_be_ahead: bool = False) -> None:
        """`may_be_ahead`: the target may have gone on from the source; what it lacks of that comes
        all the same."""
        self._source = source
        self._target = target
        self._may_be_ahead = may_be_ahead
        self._same: set[str] = set()
        """Names whose bytes are the same in both places; records never change."""
        self._is_same_run = False
        self._has_record = False
        """Whether the target is known to have the record of the run."""

    def bring(self, epoch: int | None) -> None:
        """Bring the record of the run, and those of all epochs up to this one, or of all, with the
        endings of their starts; `UsageError` where the target is not the same run."""
        self.check()
        self.bring_run()
        known = Epochs(self._source)
        if numbers := [n for n in known.numbers() if epoch is None or n <= epoch]:
            epochs.make_folder(self._target)
        folder = lineage.EPOCHS_FOLDER
        there = {f"{folder}/{name}" for name in self._target.file_names(folder)} if numbers else ()
        for number in numbers:
            record = known.read(number)
            wanted = [lineage.epoch_record_name(number)]
            if record is not None and record.start:
                wanted.append(lineage.ending_name(record.start))
            for name in wanted:
                if name not in there:
                    with contextlib.suppress(NotFoundError):  # a start that has not ended
                        self._bring(name)

    def check(self) -> None:
        """`UsageError` where an epoch of the target is not one of the source, or is another; or the
        run is. Of the epochs that both have the newest is compared: each is of one start, so
        whoever had gone on by itself before would have another one here."""
        self._check_run()
        here, there = (frozenset(Epochs(store).numbers()) for store in (self._source, self._target))
        wrong = [] if self._may_be_ahead else sorted(there - here)
        wrong += [
            number
            for number in sorted(here & there)[-1:]
            if not self._is_same(lineage.epoch_record_name(number))
        ]
        if wrong:
            who = Epochs(self._target).described(wrong[0])
            raise self._other(f"somebody has saved there by itself: {who}")

    def bring_run(self) -> None:
        """Bring the record of the run."""
        self._check_run()
        if self._has_record:
            return
        has_record = lineage.RUN_NAME in self._target.file_names("")
        try:
            data = self._source.read(lineage.RUN_NAME, limit_bytes=RECORD_LIMIT_BYTES)
        except NotFoundError:  # folders without a record are a run too
            if has_record and not self._is_same_run:
                raise self._other("that one has a record, this one has none") from None
            return
        if not has_record and Scanner(self._target).names() and not self._is_same_run:
            raise self._other("folders of checkpoints without a record")
        # Also where `has_record`: that record may be in shared memory, and not stored yet.
        with contextlib.suppress(AlreadyExistsError):
            self._target.create(lineage.RUN_NAME, data)
        self._check_run()
        self._has_record = True

    def _check_run(self) -> None:
        """Raise `UsageError` if the two places have different run ids. Either may have lost
        `run.json`; its manifests then tell the id."""
        if self._is_same_run:
            return
        expected, found = (run.run_id(store) for store in (self._source, self._target))
        if expected and found and expected != found:
            raise self._other(f"run {found} instead of {expected}")
        self._is_same_run = bool(expected) and expected == found

    def _bring(self, name: str) -> None:
        if name in self._same:
            return
        data = self._source.read(name, limit_bytes=RECORD_LIMIT_BYTES)
        try:
            self._target.create(name, data)
            self._same.add(name)
        except AlreadyExistsError:
            if not self._is_same(name):
                raise self._other(f"{name} differs") from None

    def _is_same(self, name: str) -> bool:
        if name not in self._same:
            one, other = (
                store.read(name, limit_bytes=RECORD_LIMIT_BYTES)
                for store in (self._source, self._target)
            )
            if one == other:
                self._same.add(name)
        return name in self._same

    def _other(self, found: str) -> UsageError:
        return UsageError(
            "cannot copy into another run",
            where=self._target.url,
            expected=f"an empty place, or a copy of {self._source.url}",
            found=found,
            remedy="copy to another place; of two copies that both went on, neither can take in "
            "the other",
        )
