"""Fit all items of a checkpoint to the live state of this rank, and hear what fits on the others.

Everything that can be known to not fit is found, for all items together, before a single live byte
is touched.

Rounded tensors are refused where the user wants exact ones, and an excerpt is never taken for the
whole.
"""

from __future__ import annotations

import fnmatch
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from laststep.errors import MismatchError, NotFoundError, Problems
from laststep.ranks.group import together
from laststep.restoring.match import PLAIN_KINDS, Match, match_item, newer_entries
from laststep.restoring.renaming import modules_in, rename
from laststep.saving.describe import naming
from laststep.state.items import TrainableProvider, make_late
from laststep.state.modules import loads_in_its_own_way
from laststep.state.provider import lies_above, lies_under
from laststep.state.tensors import collect
from laststep.state.tree import show_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from laststep.format.manifest import Commit
    from laststep.ranks.group import Ranks
    from laststep.ranks.rank import Rank
    from laststep.read.content import Content
    from laststep.restoring.match import Match
    from laststep.restoring.renaming import Modules
    from laststep.state.provider import Collected, State, StateProvider


log = logging.getLogger(__name__)

VALUE = "state"
"""The item that holds a one-off state."""


def selection(
    only: Sequence[str] | None, item: str, names: Collection[str] = ()
) -> tuple[bool, Callable[[str], bool] | None]:
    """Whether an item takes part in a restore, and which of its tensors (None: all of it); `names`
    are those that are stored."""
    if only is None or item in only:
        return True, None
    patterns = [p for p in only if fnmatch.fnmatchcase(item, p.split("/", 1)[0])]
    if not patterns:
        return False, None
    picks = [_picks(pattern, item, names) for pattern in patterns]
    return True, lambda name: any(pick(name) for pick in picks)


def _picks(pattern: str, item: str, names: Collection[str]) -> Callable[[str], bool]:
    """Which tensors a pattern picks: one without a slash all, the very name of a stored one that
    one alone, whatever brackets are in it; any other is a glob."""
    whose, slash, tensor = pattern.partition("/")
    if not slash:
        return lambda _name: True
    if whose == item and tensor in names:
        return lambda name: name == tensor
    return lambda name: fnmatch.fnmatchcase(f"{item}/{name}", pattern)


@dataclass(slots=True)
class Fit:
    """How a checkpoint goes into the live state of one rank, and all that does not fit."""

    matches: list[Match]
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    removed: dict[str, list[str]]
    """Live values that go, by item."""
    derived: set[str] = field(default_factory=set)
    """Items of which this rank derives a state of its own from another's."""
    merged: list[str] = field(default_factory=list)
    """Items whose state is made of those of all ranks that were."""
    problems: Problems = field(default_factory=Problems)
    have_twins: bool = False
    """Whether any rank reads tensors that are two in the checkpoint and one in its state."""
    takes_something: bool = True
    """Whether any rank restores anything."""
    strict: bool = True
    where: str = ""

    def take(self, match: Match, kind: str) -> None:
        """Take in what came of matching an item of that kind."""
        name = match.item.name
        if () not in match.foreign:
            self.matches.append(match)
        self.missing += [f"{name}/{tensor}" for tensor in match.missing]
        self.unexpected += [f"{name}/{tensor}" for tensor in match.unexpected]
        self.mismatched += [
            f"{name}/{text}" if "/" in text or ":" in text else f"{name} {text}"
            for text in match.mismatched
        ]
        newer = match.newer_values() if match.whole else []
        if not self.strict:
            self.missing += [f"{name}/{value}" for value in newer]
        elif newer and kind in PLAIN_KINDS:
            self.removed[name] = newer


def fit(
    content: Content,
    providers: Mapping[str, StateProvider],
    only: Sequence[str] | None,
    *,
    strict: bool,
    where: str,
    remedy: str,
    ranks: Ranks,
) -> Fit:
    """Fit all wanted items; raises one `MismatchError` that lists everything when `strict`. `where`
    (the checkpoint's folder) and `remedy` are for its message. Where several `ranks` restore, what
    is stored need not be wanted by each of them, but by one."""
    fitted = together(
        ranks, lambda: _look(content, providers, only, ranks.rank, strict=strict, where=where)
    )
    fits = _hear_of_others(fitted, ranks)
    problems = Problems(
        missing=tuple(fitted.missing),
        unexpected=tuple(fitted.unexpected),
        mismatched=tuple(fitted.mismatched),
    )

    def judge() -> None:
        if problems:
            what = "the checkpoint does not fit the live state"
            if not strict:
                what = "nothing of the checkpoint fits the live state, which differs from it"
            ways = _way_by_names(problems, content) + _way_by_hooks(
                problems, content, providers, where
            )
            raise MismatchError.of(problems, where=where, what=what, remedy=remedy + ways)

    if not fits and (strict or not fitted.takes_something):
        together(ranks, judge)
    if problems.missing or problems.mismatched:
        _warn_of_problems(problems)
    _warn_of_removed(fitted.removed)
    fitted.problems = problems
    return fitted


def judge_twins(fitted: Fit, ranks: Ranks) -> None:
    """Judge what only the bytes tell, once they are read: whether what is one tensor here is stored
    as two of the same. If not, that is a `MismatchError` when strict; else the first holds."""
    if not fitted.have_twins:
        return
    mine = together(
        ranks, lambda: [f"{m.item.name}/{text}" for m in fitted.matches for text in m.differing()]
    )
    notes = map(msgspec.msgpack.decode, ranks.gather(msgspec.msgpack.encode(mine)))
    texts = tuple(dict.fromkeys(text for note in notes for text in note))
    if texts and fitted.strict:
        raise MismatchError.of(
            Problems(mismatched=texts),
            where=fitted.where,
            remedy="restore into a state in which they are apart, "
            "or pass strict=False to take the first",
        )
    fitted.problems = msgspec.structs.replace(
        fitted.problems, mismatched=fitted.problems.mismatched + texts
    )


def _look(
    content: Content,
    providers: Mapping[str, StateProvider],
    only: Sequence[str] | None,
    rank: Rank,
    *,
    strict: bool,
    where: str,
) -> Fit:
    """What fits on this rank, and what does not; nothing is touched."""
    fitted = Fit([], [], [], [], {}, strict=strict, where=where)
    looks = _Looks(content, providers, only)
    for name, provider in providers.items():
        if not selection(only, name)[0]:
            continue
        if name not in content.items:
            fitted.missing.append(name)
            continue
        item = content.item(name)
        _, selected = selection(only, name, item.names())
        with naming(name):
            inner = make_late(provider)
        if isinstance(inner, TrainableProvider):
            inner.expect(item.names())
        if not _takes_over(content, name, provider, rank, fitted):
            continue
        if selected is not None and not any(map(selected, item.names())):
            continue
        state, live = looks.at(name)
        renamed = rename(item, live.tree, looks.stored_modules, looks.live_modules)
        match = match_item(renamed, provider, state, live, selected)
        match.exact = strict and selected is None
        fitted.take(match, provider.kind)
    if only is None:
        fitted.unexpected += [name for name in content.items if name not in providers]
    else:
        _check_all_used(only, content, providers, where)
    return fitted


class _Looks:
    """The live items, each looked at once at most; and the modules on both sides, whose ties tell
    which names are of one parameter."""

    def __init__(
        self, content: Content, providers: Mapping[str, StateProvider], only: Sequence[str] | None
    ) -> None:
        self._content = content
        self._providers = providers
        self._only = only
        self._seen: dict[str, tuple[State, Collected]] = {}

    def at(self, name: str) -> tuple[State, Collected]:
        if name not in self._seen:
            with naming(name):
                state = self._providers[name].describe()
                live = collect(state.value, volatile=state.volatile, allow_pickle=True)
            self._seen[name] = state, live
        return self._seen[name]

    def stored_modules(self) -> Modules:
        modules: Modules = {}
        for item in self._content.items.values():
            modules |= modules_in(item.name, item.kind, item.tree, item.ties)
        return modules

    def live_modules(self) -> Modules:
        """Of groups only those that take part: others may be dear to look at."""
        modules: Modules = {}
        for name, provider in self._providers.items():
            takes_part, _ = selection(self._only, name)
            if provider.kind == "module" or (provider.kind == "group" and takes_part):
                live = self.at(name)[1]
                modules |= modules_in(name, provider.kind, live.tree, live.ties)
        return modules


def _takes_over(
    content: Content, name: str, provider: StateProvider, rank: Rank, fitted: Fit
) -> bool:
    """Whether a rank takes over a state that each has for itself; there may be other ranks now."""
    stored, policy = content.commit.ranks, provider.when_ranks_change
    if not provider.per_rank or stored == rank.ranks:
        return True
    if callable(policy):
        fitted.merged.append(name)
        return False
    if policy in ("keep", "derive") and rank.number < stored:
        return True
    if policy == "derive":
        fitted.derived.add(name)
        return True
    what = f"each rank has its own; it was saved by {stored}, and this job has {rank.ranks}"
    if undecided := getattr(provider, "undecided", ""):
        fitted.mismatched.append(
            f"{name}: {what}; its parts differ in when_ranks_change ({undecided}): have them say "
            "the same, or pass them as items of their own"
        )
    elif policy == "refuse":
        fitted.mismatched.append(
            f"{name}: {what}; wrap it to say what becomes of it: laststep.PerRank({name}, "
            "when_ranks_change='keep', 'drop' or a function)"
        )
    elif policy == "drop":
        log.warning("%s: %s: it is dropped", name, what)
    else:
        log.warning("%s: %s: rank %d begins with its own", name, what, rank.number)
    return False


def _hear_of_others(fitted: Fit, ranks: Ranks) -> bool:
    """Hear what fits on the other ranks: only what none of them has use for is unexpected. Returns
    whether everything fits on all ranks."""
    twins = any(match.twins for match in fitted.matches)
    lacks = bool(fitted.missing or fitted.mismatched)
    takes = any(match.takes_something for match in fitted.matches) or bool(fitted.merged)
    mine = _FitNote(unexpected=fitted.unexpected, twins=twins, lacks=lacks, takes=takes)
    notes = [
        msgspec.msgpack.decode(note, type=_FitNote)
        for note in ranks.gather(msgspec.msgpack.encode(mine))
    ]
    common = set(notes[0].unexpected).intersection(*(note.unexpected for note in notes[1:]))
    fitted.unexpected = [text for text in fitted.unexpected if text in common]
    fitted.have_twins = any(note.twins for note in notes)
    any_lacks = any(note.lacks for note in notes)
    # Who has use for none of it, such as for what others have, lacks nothing.
    fitted.takes_something = not any_lacks or any(note.takes for note in notes)
    return not common and not any_lacks


class _FitNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others of how a checkpoint fits."""

    unexpected: list[str]
    twins: bool
    """Whether it reads tensors that are two in the checkpoint and one in its state."""
    lacks: bool
    """Whether anything of its state is not stored, or is stored otherwise."""
    takes: bool
    """Whether it restores anything."""


def _way_by_names(problems: Problems, content: Content) -> str:
    """The way out for items that were saved under other names."""
    stored = [name for name in problems.unexpected if name in content.items]
    live = [name for name in problems.missing if "/" not in name]
    if not stored or not live:
        return ""
    return (
        f"; where it is only the name that differs ({', '.join(live)} here, {', '.join(stored)} in "
        "the checkpoint), pass the item by the name that it was saved under"
    )


def _way_by_hooks(
    problems: Problems, content: Content, providers: Mapping[str, StateProvider], where: str
) -> str:
    """The way out for modules that translate the names of older checkpoints when they load: tensors
    that are restored in place do not pass through their hooks."""
    named = {text.partition("/")[0] for text in (*problems.missing, *problems.unexpected)}
    for name in sorted(named.intersection(providers)):
        if any(loads_in_its_own_way(part) for part in providers[name].parts()):
            stored = f"laststep.load({where!r})"
            if set(content.items) != {VALUE}:
                stored += f"[{name!r}]"
            return (
                f"; {name} has hooks for loading, which a restore in place does not run: "
                f"its load_state_dict({stored}) does"
            )
    return ""


def _warn_of_problems(problems: Problems) -> None:
    """Say what of the live state is not restored. Who leaves out what is stored knows that."""
    problems = msgspec.structs.replace(problems, unexpected=())
    shown = "; ".join(problems.lines()[:3])
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    log.warning(
        "not all of the live state is restored, the rest is left as it is: %s%s "
        "(restored.problems is all of it)",
        shown,
        more,
    )


def _warn_of_removed(removed: Mapping[str, Sequence[str]]) -> None:
    for item, names in removed.items():
        log.warning(
            "%s goes back to what was saved, without %s; strict=False would keep them",
            item,
            _first(names),
        )


def warn_of_left_out(item: str, provider: StateProvider, made: object) -> None:
    """Say which plain entries go as a function for other numbers of ranks does not give them."""
    if provider.kind in PLAIN_KINDS:
        state = provider.describe()
        things = state.things
        names = [
            show_path(path)
            for path in newer_entries(made, state.value, ())
            if not lies_above(path, things) and not lies_under(path, things)
        ]
        if names:
            log.warning(
                "%s becomes what its function for when_ranks_change gives, without %s: have it "
                "give them too to keep them",
                item,
                _first(names),
            )


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _check_all_used(
    only: Sequence[str], content: Content, providers: Mapping[str, StateProvider], where: str
) -> None:
    """`NotFoundError` for a part that was asked for and picks nothing, such as a misspelt one."""
    names = {name: content.items[name].names() for name in providers if name in content.items}
    items = f"items {', '.join(sorted(content.items))} in the checkpoint"
    for pattern in only:
        whose = pattern.split("/", 1)[0]
        if pattern in providers or any(
            pattern == item
            or (
                fnmatch.fnmatchcase(item, whose)
                and any(map(_picks(pattern, item, tensors), tensors))
            )
            for item, tensors in names.items()
        ):
            continue
        if not any(fnmatch.fnmatchcase(item, whose) for item in providers):
            raise NotFoundError(
                "no live item of this Checkpointer matches",
                where=where,
                expected=pattern,
                found=f"live items {', '.join(sorted(providers))}, and {items}",
                remedy=f"pass {whose}=… to the Checkpointer to restore it"
                if whose in content.items
                else "name one of the live items",
            )
        raise NotFoundError(
            "nothing in the checkpoint matches",
            where=where,
            expected=pattern,
            found=items,
            remedy="`laststep show --all` lists the names",
        )


def refuse_rounded(content: Content, matches: Iterable[Match], where: str) -> None:
    """`MismatchError` if a tensor that is to be restored was rounded."""
    if not content.commit.lossy:
        return
    for match in matches:
        for name in match.reads:
            how = _rounded(content, match.item.name, name)
            if how is not None:
                raise MismatchError(
                    "the checkpoint is not exact",
                    where=where,
                    expected="no tensor that was rounded, with exact=True",
                    found=f"{match.item.name}/{name}, rounded to {how} when it was saved",
                    remedy="restore(exact=False) takes it as it is; `laststep ls` shows which "
                    "checkpoints are exact",
                )


def _rounded(content: Content, item: str, name: str) -> str | None:
    for place in content.places(item, name):
        stored = content.files[place.file].stored
        for entry in stored.layout.tensors if stored.lossy else ():
            if entry.start == place.start and entry.name in stored.lossy:
                return stored.lossy[entry.name]
    return None


def refuse_excerpt(commit: Commit, only: Sequence[str] | None, where: str) -> None:
    """`MismatchError` where something is wanted that an excerpt lacks."""
    lacking = [item for item in commit.left_out if selection(only, item)[0]]
    if lacking:
        here = [record.name for record in commit.items]
        error = MismatchError(
            "the checkpoint is an excerpt, without " + ", ".join(lacking),
            where=where,
            expected="all items" if only is None else f"what only={list(only)} names",
            found=f"{', '.join(here)} of a checkpoint of the run {commit.run}",
            remedy=f"restore(only={here}) takes what is here; the whole is, or was, in the "
            "run that this was copied from",
        )
        error.problems = Problems(missing=tuple(lacking))
        raise error
