"""A dict that holds things with a state of their own, such as a schedule, beside plain entries.

It is one item. Each thing in it has a provider of its own, and what is stored is what the dict
holds at that moment: entries come and go, and another thing may stand under a key. Knows nothing
of how a provider is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laststep.errors import Mismatch
from laststep.state.provider import ABSENT, AroundProvider, State, StateProvider, handing_over
from laststep.state.values import put_entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.state.provider import WhenRanksChange
    from laststep.state.tree import Path


def make_late(provider: StateProvider) -> StateProvider:
    """See to it that what is made late exists, also within: only then does it tell what it is.
    Returns what others stand around."""
    while isinstance(provider, AroundProvider):
        provider = provider._inner
    if isinstance(provider, GroupProvider):
        for member in provider._members.values():
            make_late(member)
    return provider


class EntryProvider(StateProvider):
    """A plain entry of a dict that is a group: looked up at each save, replaced on restore."""

    kind = "value"
    cheap = True
    passive = True

    def __init__(self, owner: dict[Any, Any], key: object) -> None:
        self._owner = owner
        self._key = key

    def describe(self) -> State:
        return State(value=self._owner[self._key])

    def restore(self, value: object) -> None:
        with handing_over("an entry of a dict"):
            put_entry(self._owner, self._key, value)


class GroupProvider(StateProvider):
    """Several providers as one item, each under its own key. `make` chooses one for a key."""

    kind = "group"

    def __init__(self, owner: dict[Any, Any], make: Callable[[Any], StateProvider]) -> None:
        self._owner = owner
        self._make = make
        self._made: dict[Any, tuple[object, StateProvider]] = {}
        """What stood under each key when it was last looked at, and its provider."""

    @property
    def _members(self) -> dict[Any, StateProvider]:
        """The providers of what the dict holds now. That of a thing which is still there stays, for
        what it has learnt; a plain entry, such as a dict, may have become a thing by now."""
        made = {}
        for key, thing in self._owner.items():
            known = self._made.get(key)
            if known is None or known[0] is not thing or isinstance(known[1], EntryProvider):
                known = thing, self._make(key)
            made[key] = known
        self._made = made
        return {key: member for key, (_thing, member) in made.items()}

    @property
    def cheap(self) -> bool:  # type: ignore[override]
        return all(member.cheap for member in self._members.values())

    @property
    def passive(self) -> bool:  # type: ignore[override]
        return all(member.passive for member in self._members.values())

    @property
    def per_rank(self) -> bool:  # type: ignore[override]
        members = self._members.values()
        return bool(members) and all(member.per_rank for member in members)

    @property
    def mixed(self) -> bool:
        """Whether some of it is each rank's own and some is not: no job of several saves that."""
        members = self._members.values()
        inside = any(getattr(member, "mixed", False) for member in members)
        return inside or len({member.per_rank for member in members}) > 1

    @property
    def when_ranks_change(self) -> WhenRanksChange:  # type: ignore[override]
        """What its members say, if they agree; functions are asked for each member's state."""
        said = self._policies()
        if said and all(map(callable, said.values())):
            return self._merged
        return "refuse" if self.undecided else next(iter(said.values()), "refuse")

    @property
    def undecided(self) -> str:
        """Which members say different things of that, and what, in words."""
        said = {
            key: "a function" if callable(policy) else f"{policy!r}"
            for key, policy in self._policies().items()
        }
        if len(set(said.values())) < 2:
            return ""
        return ", ".join(f"{key}: {policy}" for key, policy in said.items())

    def _policies(self) -> dict[Any, WhenRanksChange]:
        return {key: member.when_ranks_change for key, member in self._members.items()}

    def _merged(self, states: list[Any], rank: int, ranks: int) -> object:
        """The state that the functions of all members make of theirs."""
        made = {}
        for key, merge in self._policies().items():
            if not all(isinstance(state, dict) and key in state for state in states):
                raise Mismatch(
                    f"not every rank has stored {key}", remedy="leave it out, or restore without it"
                )
            if callable(merge):
                made[key] = merge([state[key] for state in states], rank, ranks)
        return made

    def derive(self, value: object, rank: int) -> None:
        for key, member in self._stored_in(value).items():
            if value[key] is not ABSENT:  # type: ignore[index]
                member.derive(value[key], rank)  # type: ignore[index]

    def parts(self) -> tuple[object, ...]:
        return tuple(part for member in self._members.values() for part in member.parts())

    def describe(self) -> State:
        members = self._members
        states = {key: member.describe() for key, member in members.items()}
        volatile = {(key, *path) for key, state in states.items() for path in state.volatile}
        things = ((k, m) for k, m in members.items() if not isinstance(m, EntryProvider))
        return State(
            value={key: state.value for key, state in states.items()},
            fresh=tuple((key, *path) for key, state in states.items() for path in state.fresh),
            loose=tuple((key, *path) for key, state in states.items() for path in state.loose),
            things=tuple(
                (key, *path)
                for key, member in things
                for path in (states[key].things if isinstance(member, GroupProvider) else ((),))
            ),
            volatile=frozenset(volatile),
        )

    def check(self, stored: object) -> list[str]:
        if not isinstance(stored, dict):
            return ["is not a group"]
        return [
            f"{key} {text}"
            for key, member in self._stored_in(stored).items()
            for text in member.check(stored[key])
        ]

    def refuses(self, stored: object) -> dict[Path, str]:
        return {
            (key, *path): f"{key} {text}"
            for key, member in self._stored_in(stored).items()
            for path, text in member.refuses(stored[key]).items()  # type: ignore[index]
        }

    def lacks(self, stored: object) -> list[Path]:
        return [
            (key, *path)
            for key, member in self._stored_in(stored).items()
            for path in member.lacks(stored[key])  # type: ignore[index]
        ]

    def _stored_in(self, stored: object) -> dict[Any, StateProvider]:
        """The members of which there is something in a stored tree."""
        if not isinstance(stored, dict):
            return {}
        return {key: member for key, member in self._members.items() if key in stored}

    def models(self, paths: list[Path]) -> list[object]:
        members = self._members
        return [members[p[0]].models([p[1:]])[0] if p and p[0] in members else None for p in paths]

    def devices(self, paths: list[Path]) -> list[str]:
        members = self._members
        return [
            members[p[0]].devices([p[1:]])[0] if p and p[0] in members else "cpu" for p in paths
        ]

    def restore(self, value: object) -> None:
        if not isinstance(value, dict):
            return
        members = self._members
        for key, member in members.items():
            if key not in value and _is_plain(member):
                del self._owner[key]  # as in a plain dict: it came to be after the checkpoint
            elif value.get(key, ABSENT) is not ABSENT:
                member.restore(value[key])
        for key, entry in value.items():
            if key not in members:
                put_entry(self._owner, key, entry)


def _is_plain(member: StateProvider) -> bool:
    """Whether it is a plain entry, or a dict from which all things have gone."""
    if isinstance(member, GroupProvider):
        return all(map(_is_plain, member._members.values()))
    return isinstance(member, EntryProvider)
