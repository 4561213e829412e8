"""Plan the restore of a checkpoint into the live state of this rank, and agree with other ranks.

Every mismatch that can be found without reading tensors is found, for all items together, before
any live byte is touched. A partial checkpoint is never restored as if it were complete.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from laststep.codecs.digests import digest
from laststep.constants import listed
from laststep.errors import MismatchError, NotFoundError, Problems
from laststep.process.threads import ready
from laststep.ranks.group import collective
from laststep.restoring.match import PLAIN_KINDS, Match, match_item
from laststep.restoring.renaming import modules_in, rename
from laststep.saving.describe import naming
from laststep.state.collecting import collect
from laststep.state.items import make_deferred
from laststep.state.modules import TrainableProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from laststep.ranks.group import Rank, Ranks
    from laststep.read.content import Content
    from laststep.restoring.renaming import Modules
    from laststep.state.provider import State, StateProvider
    from laststep.state.tree import Collected


log = logging.getLogger(__name__)


class _Note(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The findings of one rank, for the others."""

    unexpected: list[str]
    has_aliases: bool
    lacks: bool
    """True if the checkpoint lacks something that this rank has."""
    takes: bool
    """True if this rank restores anything."""
    problems: bytes
    """Digest of what is missing or mismatched on this rank."""
    kept: list[str]
    derived: list[str]


_decode_note = msgspec.msgpack.Decoder(ready(_Note)).decode
VALUE = "state"
"""Name of the only item in a checkpoint of a one-off state."""


def selection(
    only: Sequence[str] | None, item: str, names: Collection[str] = ()
) -> tuple[bool, Callable[[str], bool] | None]:
    """Return whether an item is restored, and a predicate for its stored `names` (None: all)."""
    if only is None or item in only:
        return True, None
    patterns = [p for p in only if fnmatch.fnmatchcase(item, p.split("/", 1)[0])]
    if not patterns:
        return False, None
    picks = [_picks(pattern, item, names) for pattern in patterns]
    return True, lambda name: any(pick(name) for pick in picks)


def _picks(pattern: str, item: str, names: Collection[str]) -> Callable[[str], bool]:
    """Return a predicate for a pattern; a stored tensor's exact name, even `a[0]`, is no glob."""
    whose, slash, tensor = pattern.partition("/")
    if not slash:
        return lambda _name: True
    if whose == item and tensor in names:
        return lambda name: name == tensor
    return lambda name: fnmatch.fnmatchcase(f"{item}/{name}", pattern)


@dataclass(slots=True)
class RestorePlan:
    """The restore of a checkpoint into the live state of one rank, and every mismatch."""

    strict: bool
    matches: list[Match] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    """Items whose state this rank derives from another rank's."""
    kept: list[str] = field(default_factory=list)
    """Per-rank items that this rank does not restore, because the number of ranks changed."""
    merged: list[str] = field(default_factory=list)
    """Items whose state a function computes from the stored states of all ranks."""
    problems: Problems = field(default_factory=Problems)
    """The final result: with several ranks, only what no rank needs is unexpected."""
    have_aliases: bool = False
    """True if any rank reads aliases: two stored tensors that are one live tensor."""

    def take(self, match: Match) -> None:
        name = match.item.name
        if () not in match.foreign:
            self.matches.append(match)
        self.missing += [f"{name}/{tensor}" for tensor in match.missing]
        self.unexpected += [f"{name}/{tensor}" for tensor in match.unexpected]
        self.mismatched += [
            f"{name}/{text}" if "/" in text or ":" in text else f"{name} {text}"
            for text in match.mismatched
        ]
        if not self.strict:
            self.missing += [f"{name}/{value}" for value in match.newer_names]


def plan_restore(
    content: Content,
    providers: Mapping[str, StateProvider],
    only: Sequence[str] | None,
    *,
    strict: bool,
    remedy: str,
    ranks: Ranks,
) -> RestorePlan:
    """Plan the restore of all selected items. Raise `MismatchError` with every problem if `strict`,
    or if nothing fits. A stored tensor is unexpected only if no rank needs it."""
    plan = RestorePlan(strict)
    collective(ranks, functools.partial(_look, plan, content, providers, only, ranks.rank))
    plan.have_aliases = any(match.aliases for match in plan.matches)
    lacks = bool(plan.missing or plan.mismatched)
    takes = bool(plan.merged) or any(m.reads or not m.item.names for m in plan.matches)
    note = _Note(
        unexpected=plan.unexpected,
        has_aliases=plan.have_aliases,
        lacks=lacks,
        takes=takes,
        problems=digest("\n".join([*plan.missing, *plan.mismatched]).encode()),
        kept=plan.kept,
        derived=plan.derived,
    )
    notes = [_decode_note(data) for data in ranks.all_gather(msgspec.msgpack.encode(note))]
    common = set(plan.unexpected).intersection(*(note.unexpected for note in notes))
    unexpected = list(filter(common.__contains__, plan.unexpected))
    plan.have_aliases = any(note.has_aliases for note in notes)
    lacks, takes = any(note.lacks for note in notes), any(note.takes for note in notes)
    plan.problems = problems = Problems(
        missing=tuple(plan.missing), unexpected=tuple(unexpected), mismatched=tuple(plan.mismatched)
    )
    # Restoring nothing is only a problem if something is missing or mismatched.
    is_useless = lacks and not takes

    def judge() -> None:
        if problems:
            what = "the checkpoint does not fit the live state"
            if not strict:
                what = "no part of the checkpoint fits the live state, which differs"
            raise MismatchError.of(problems, where=content.where, what=what, remedy=remedy)

    if is_useless or (strict and (unexpected or lacks)):
        collective(ranks, judge)
    if ranks.size == 1:
        _log_ranks_changed({ranks.rank.number: note}, content.commit.ranks, ranks.rank.ranks)
    elif ranks.rank.is_first:
        _log_ranks_changed(dict(enumerate(notes)), content.commit.ranks, ranks.size)
    if problems.missing or problems.mismatched:
        is_repeated = not ranks.rank.is_first and note.problems == notes[0].problems
        _warn_of_problems(problems, logging.INFO if is_repeated else logging.WARNING)
    for match in plan.matches if strict else ():
        if match.newer_names and providers[match.item.name].kind in PLAIN_KINDS:
            log.warning(
                "%s is reset to the saved state, without %s; pass strict=False to keep them",
                match.item.name,
                ", ".join(match.newer_names[:3]),
            )
    return plan


def compare_aliases(plan: RestorePlan, ranks: Ranks, where: str) -> None:
    """Compare aliases after the reads; if any differ, raise when strict, else add problems."""
    differing = collective(
        ranks, lambda: [f"{m.item.name}/{text}" for m in plan.matches for text in m.differing()]
    )
    notes = map(msgspec.msgpack.decode, ranks.all_gather(msgspec.msgpack.encode(differing)))
    texts = tuple(dict.fromkeys(text for note in notes for text in note))
    if texts and plan.strict:
        raise MismatchError.of(
            Problems(mismatched=texts),
            where=where,
            remedy="restore into separate tensors, or pass strict=False to take the first",
        )
    plan.problems = msgspec.structs.replace(
        plan.problems, mismatched=plan.problems.mismatched + texts
    )


def _look(
    plan: RestorePlan,
    content: Content,
    providers: Mapping[str, StateProvider],
    only: Sequence[str] | None,
    rank: Rank,
) -> None:
    """Plan for this rank alone; nothing is touched."""

    @functools.cache
    def live_item(name: str) -> tuple[State, Collected]:
        with naming(name):
            state = providers[name].describe()
            return state, collect(state.value, volatile=state.volatile, allow_pickle=True)

    def live_modules() -> Modules:
        """Return the live modules; describing groups that take no part may be expensive."""
        modules: Modules = {}
        for name, provider in providers.items():
            takes_part, _ = selection(only, name)
            if provider.kind == "module" or (provider.kind == "group" and takes_part):
                live = live_item(name)[1]
                modules |= modules_in(name, provider.kind, live.tree, live.ties)
        return modules

    def stored_modules() -> Modules:
        modules: Modules = {}
        for item in content.items.values():
            modules |= modules_in(item.name, item.kind, item.tree, item.ties)
        return modules

    for name, provider in providers.items():
        if not selection(only, name)[0]:
            continue
        if name not in content.items:
            plan.missing.append(name)
            continue
        item = content.items[name]
        _, selected = selection(only, name, item.names)
        with naming(name):
            inner = make_deferred(provider)
        if isinstance(inner, TrainableProvider):
            inner.expect(item.names)
        if not _takes_over(content, name, provider, rank, plan):
            continue
        if selected is not None and not any(map(selected, item.names)):
            continue
        state, live = live_item(name)
        match = Match(item=item, whole=selected is None)
        match.exact = plan.strict and match.whole
        rename(match, live.tree, stored_modules, live_modules)
        match_item(match, provider, state, live, selected)
        plan.take(match)
    if only is None:
        plan.unexpected += itertools.filterfalse(providers.__contains__, content.items)
    else:
        _check_all_used(only, content, providers)


def _takes_over(
    content: Content, name: str, provider: StateProvider, rank: Rank, plan: RestorePlan
) -> bool:
    """Return whether this rank restores an item, given the number of ranks that saved it."""
    stored, policy = content.commit.ranks, provider.when_ranks_change
    if not provider.per_rank or stored == rank.ranks:
        return True
    if callable(policy):
        plan.merged.append(name)
        return False
    if policy in ("keep", "derive") and rank.number < stored:
        return True
    if policy == "derive":
        plan.derived.append(name)
        return True
    if policy == "refuse":
        what = f"per-rank state was saved by {_ranks(stored)}, but this job has {rank.ranks}"
        plan.mismatched.append(
            f"{name}: {what}; pass laststep.PerRank({name}, when_ranks_change=…) "
            "with 'keep', 'drop' or a function"
        )
    else:
        plan.kept.append(name)
    return False


def _log_ranks_changed(notes: Mapping[int, _Note], stored: int, ranks: int) -> None:
    """Log which ranks do not get the per-rank state of their number: rank 0 does so for all."""
    kept, derived = dict[str, list[str]](), dict[str, list[str]]()
    for rank, note in notes.items():
        for name in note.kept:
            kept.setdefault(name, []).append(f"rank {rank}")
        for name in note.derived:
            derived.setdefault(name, []).append(f"rank {rank}")
    why = f"per-rank state was saved by {_ranks(stored)}, but this job has {ranks}"
    for name, of_item in kept.items():
        log.warning(
            "%s: %s: it is not restored on %s, which %s the initial state",
            name,
            why,
            listed(of_item, 8),
            "keeps" if len(of_item) == 1 else "keep",
        )
    for name, of_item in derived.items():
        log.info(
            "%s: %s: %s %s a state derived from rank 0's",
            name,
            why,
            listed(of_item, 8),
            "gets" if len(of_item) == 1 else "get",
        )


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _warn_of_problems(problems: Problems, level: int) -> None:
    """Log live state that is not restored; a user knows of stored tensors that are left out."""
    problems = msgspec.structs.replace(problems, unexpected=())
    shown = "; ".join(problems.lines()[:3])
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    log.log(
        level,
        "the live state was only partly restored: %s%s (restored.problems lists all)",
        shown,
        more,
    )


def _check_all_used(
    only: Sequence[str], content: Content, providers: Mapping[str, StateProvider]
) -> None:
    """Raise `NotFoundError` for a pattern in `only` that picks nothing, such as a misspelt name."""
    for pattern in only:
        if pattern in providers:
            continue
        for name in providers.keys() & content.items.keys():
            names = content.items[name].names
            takes_part, picks = selection([pattern], name, names)
            if takes_part and (picks is None or any(map(picks, names))):
                break
        else:
            stored = ", ".join(sorted(content.items))
            raise NotFoundError(
                "no part of the checkpoint, or no live item, matches",
                where=content.where,
                expected=pattern,
                found=f"live items {', '.join(sorted(providers))}, and items {stored} in the "
                "checkpoint",
                remedy="pass the item to the Checkpointer; `laststep show --all` lists the names",
            )


def refuse_rounded(content: Content, matches: Iterable[Match]) -> None:
    """Raise `MismatchError` if a tensor to restore was rounded when it was saved."""
    if not content.commit.written.lossy:
        return
    for item, name in ((match.item.name, name) for match in matches for name in match.reads):
        for place in content.places(item, name):
            stored = content.files[place.file].stored
            for entry in stored.layout.tensors if stored.lossy else ():
                if entry.start == place.start and entry.name in stored.lossy:
                    raise MismatchError(
                        "the checkpoint is not exact",
                        where=content.where,
                        expected="no tensor that was rounded, with exact=True",
                        found=f"{item}/{name}, rounded to {stored.lossy[entry.name]}",
                        remedy="restore(exact=False) takes it as it is",
                    )


def refuse_partial(content: Content, only: Sequence[str] | None) -> None:
    """Raise `MismatchError` if a selected item is omitted from a partial checkpoint."""
    if not content.commit.omitted_items:
        return
    lacking = [item for item in content.commit.omitted_items if selection(only, item)[0]]
    if lacking:
        here = [record.name for record in content.commit.items]
        error = MismatchError(
            "the checkpoint is partial, without " + ", ".join(lacking),
            where=content.where,
            expected="all items" if only is None else f"what only={list(only)} names",
            found=", ".join(here),
            remedy=f"restore(only={here}) restores the items that are here",
        )
        error.problems = Problems(missing=tuple(lacking))
        error.lines = error.problems.lines()
        raise error
