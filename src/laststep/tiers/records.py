"""Copy the records that make two places the same run: its id and the records of its terms.

A checkpoint is copied under its own name, so that name must mean the same in both places. The
target may lack records, but it MUST NOT have any that the source lacks or has with different bytes:
a job would then have continued there, and the order of commits would no longer determine the newest
checkpoint. Records are copied in the order of their numbers, before the first commit that needs
them, so the target is a valid run at any time.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from laststep.catalog import lineage, run, terms
from laststep.catalog.listing import Scanner
from laststep.catalog.terms import RECORD_LIMIT_BYTES, Terms
from laststep.errors import AlreadyExistsError, NotFoundError, UsageError

if TYPE_CHECKING:
    from laststep.storage.store import Store


class Records:
    """The records of one run in two places."""

    def __init__(self, source: Store, target: Store, *, may_be_ahead: bool = False) -> None:
        """Compare `source` with `target`. With `may_be_ahead` the target may have terms that the
        source lacks; records that it is missing are still copied."""
        self._source = source
        self._target = target
        self._may_be_ahead = may_be_ahead
        self._same: set[str] = set()
        """Names of records that are equal in both places. Cached, because records never change."""
        self._is_same_run = False
        self._has_record = False
        """True if the target is known to have the record of the run."""

    def bring(self, term: int | None) -> None:
        """Copy the record of the run, and those of all terms (up to `term` if given) with the
        endings of their job instances. Raise `UsageError` if the target is a different run."""
        self.check()
        self.bring_run()
        known = Terms(self._source)
        if numbers := [n for n in known.numbers() if term is None or n <= term]:
            terms.make_folder(self._target)
        folder = lineage.TERMS_FOLDER
        there = {f"{folder}/{name}" for name in self._target.file_names(folder)} if numbers else ()
        for number in numbers:
            record = known.read(number)
            wanted = [lineage.term_record_name(number)]
            if record is not None and record.start:
                wanted.append(lineage.ending_name(record.start))
            for name in wanted:
                if name not in there:
                    with contextlib.suppress(NotFoundError):  # the job instance did not end well
                        self._bring(name)

    def check(self) -> None:
        """Raise `UsageError` if the run ids differ, or if the target has a term that the source
        lacks or has with another record.

        Of the terms that both have, only the newest is compared: every term belongs to one job
        instance, so if the places had diverged earlier, this record would differ too.
        """
        self._check_run()
        here, there = (frozenset(Terms(store).numbers()) for store in (self._source, self._target))
        wrong = [] if self._may_be_ahead else sorted(there - here)
        wrong += [
            number
            for number in sorted(here & there)[-1:]
            if not self._is_same(lineage.term_record_name(number))
        ]
        if wrong:
            who = Terms(self._target).described(wrong[0])
            raise self._other(f"another job saved there separately: {who}")

    def bring_run(self) -> None:
        """Copy the record of the run."""
        self._check_run()
        if self._has_record:
            return
        has_record = lineage.RUN_NAME in self._target.file_names("")
        try:
            data = self._source.read(lineage.RUN_NAME, limit_bytes=RECORD_LIMIT_BYTES)
        except NotFoundError:  # folders without run.json are also a run
            if has_record and not self._is_same_run:
                raise self._other("the other has a record, this one has none") from None
            return
        if not has_record and Scanner(self._target).names() and not self._is_same_run:
            raise self._other("folders of checkpoints without a record")
        # Even if `has_record`: that record may exist only in shared memory.
        with contextlib.suppress(AlreadyExistsError):
            self._target.create(lineage.RUN_NAME, data)
        self._check_run()
        self._has_record = True

    def _check_run(self) -> None:
        """Raise `UsageError` if the two places have different run ids. If one has lost `run.json`,
        its manifests provide the id."""
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
            "cannot copy into a different run",
            where=self._target.url,
            expected=f"an empty place, or a copy of {self._source.url}",
            found=found,
            remedy="copy to another place; two copies that were both saved to cannot be merged",
        )
