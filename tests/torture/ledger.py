"""What must be restorable: the plain record against which the model judges a run.

Derived from docs/guides/guarantees.md and docs/format.md (lineage, retention), not from the code.
Knows nothing of files; whoever keeps it tells it what was committed, damaged or seen to be gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Damage = Literal["flipped", "incomplete", "unreadable"]
"""Bytes that changed; a file that is missing, or a data file of another size; a manifest that is
none any more. Retention sees the last two, a restore all of them."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """A checkpoint that was committed."""

    folder: str
    step: int
    form: int
    mark: int
    term: int
    loss: float
    damage: Damage | None = None
    pinned: bool = False
    may_go: bool = False
    """No rule keeps it: retention deletes it now or after a later commit."""
    gone: bool = False

    @property
    def is_sound(self) -> bool:
        return self.damage is None

    @property
    def is_whole(self) -> bool:
        """As far as names and sizes tell."""
        return self.damage in (None, "flipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules of retention, as `laststep.Keep` has them; the metric is the loss, small is good."""

    last: int | None = None
    every: int | None = None
    best: int | None = None


class Ledger:
    """The commits of a run in their order, and from which of them each term continues."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.terms: dict[int, str | None] = {}

    def there(self) -> list[Entry]:
        """All that was not seen to be gone."""
        return [entry for entry in self.entries.values() if not entry.gone]

    @property
    def newest_epoch(self) -> int:
        return max(self.terms, default=0)

    def lineage(self) -> list[Entry]:
        """What the present state of the run descends from, oldest first, without what is gone and
        without what a later commit of the same step has replaced. A term that has no commit
        has decided nothing."""
        decided = [entry.term for entry in self.there()]
        return _current(self._chain(max(decided), None)) if decided else []

    def descent(self, folder: str | None) -> list[Entry]:
        """What a state descends from that is the one of that checkpoint."""
        if folder is None:
            return []
        return _current(self._chain(self.entries[folder].term, folder))

    def steps_ever(self, folder: str | None) -> set[int]:
        """The steps of all that a state descends from, also of what is gone meanwhile."""
        if folder is None:
            return set()
        return {entry.step for entry in self._chain(self.entries[folder].term, folder)}

    def _chain(self, term: int, upto: str | None) -> list[Entry]:
        """All commits of a term (up to one), and before them what that term continues."""
        own = [entry for entry in self.entries.values() if entry.term == term]
        if upto is not None:
            own = own[: [entry.folder for entry in own].index(upto) + 1]
        before = self.terms[term]
        if before is None:
            return own
        return self._chain(self.entries[before].term, before) + own

    # What a restore gives

    def of_newest(self) -> tuple[list[Entry], list[Entry]]:
        """Which may come back from `restore()`, and which are passed over before the last of them.

        More than one where retention may be deleting just now. None: nothing can be restored.
        """
        allowed: list[Entry] = []
        skipped: list[Entry] = []
        for entry in reversed(self.lineage()):
            if entry.is_sound:
                allowed.append(entry)
                if not entry.may_go:
                    return allowed, skipped
            else:
                skipped.append(entry)
        return allowed, skipped

    def of_step(self, step: int) -> Entry | None:
        """Which `restore(step)` means: of the lineage, or else the last one beside it."""
        return next(iter(self.all_of_step(step)), None)

    def all_of_step(self, step: int) -> list[Entry]:
        """The same, and what it means once that is gone, which retention may be about to delete."""
        found: dict[str, Entry] = {}
        for entries in (self.lineage(), self.there()):
            for entry in reversed([entry for entry in entries if entry.step == step]):
                found.setdefault(entry.folder, entry)
                if not entry.may_go:
                    return list(found.values())
        return list(found.values())

    # Retention

    def retain(self, rules: Rules | None, *, resumed_from: str | None, abandoned: bool) -> set[str]:
        """Apply rules: what none of them keeps, which may be gone from now on."""
        lineage = self.lineage()
        # Without rules everything stays, but what was saved again.
        kept = {entry.folder for entry in self._kept(lineage, rules or Rules())}
        on_lineage = {entry.folder for entry in lineage}
        replaced = self._replaced()
        going: list[Entry] = []
        for entry in self.there():
            evidence = entry.folder not in on_lineage or not entry.is_whole
            if entry.folder in replaced and entry.damage != "unreadable":
                evidence = False  # saved again: it goes at the next retention
            stays = entry.folder in kept or entry.pinned or entry.folder == resumed_from
            if not stays and (abandoned or not evidence):
                going.append(entry)
        # A replacement stays as long as what it replaces: only it says that that one is replaced.
        left = {entry.folder for entry in going}
        stay = [e for e in self.there() if e.folder in replaced and e.folder not in left]
        needed = {replaced[entry.folder] for entry in stay if entry.is_whole}
        dropped = set()
        for entry in going:
            if entry.folder not in needed:
                entry.may_go = True
                dropped.add(entry.folder)
        return dropped

    def _kept(self, lineage: list[Entry], rules: Rules) -> list[Entry]:
        whole = [entry for entry in lineage if entry.is_whole]
        kept = whole[-1:]
        if rules == Rules():
            return whole
        if rules.last is not None:
            kept += whole[-rules.last :]
        if rules.every is not None:
            kept += [entry for entry in whole if entry.step % rules.every == 0]
        if rules.best is not None:
            known = [entry for entry in reversed(whole) if not math.isnan(entry.loss)]
            kept += sorted(known, key=lambda entry: entry.loss)[: rules.best] if known else whole
        return kept

    def _replaced(self) -> dict[str, str]:
        """What a later whole one of the same step replaces, and that one."""
        if not self.terms:
            return {}
        chain = self._chain(self.newest_epoch, None)
        current = _current(chain)
        by_step = {entry.step: entry.folder for entry in current if entry.is_whole}
        here = {entry.folder for entry in current}
        return {e.folder: by_step.get(e.step, "") for e in chain if e.folder not in here}


def _current(chain: list[Entry]) -> list[Entry]:
    """Those that no later whole one of the same step replaces."""
    found: list[Entry] = []
    taken: set[int] = set()
    for entry in reversed(chain):
        if entry.step not in taken and not entry.gone:
            found.append(entry)
            if entry.is_whole:
                taken.add(entry.step)
    return found[::-1]
