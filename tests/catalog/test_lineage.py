"""The lineage, against a history that is replayed one event at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from laststep.catalog.attempt import AttemptName
from laststep.catalog.terms import Chain, Point, order, superseded


@dataclass
class _History:
    """What a run would remember if it kept the lineage as a list all along."""

    names: list[AttemptName] = field(default_factory=list)
    links: dict[int, Point | None] = field(default_factory=dict)
    state: list[AttemptName] = field(default_factory=list)
    term: int = 0
    attempt: int = 0

    def restart(self, back: int) -> None:
        """A new start that continues from the commit `back` before the newest, or afresh."""
        self.state = self.state[: max(0, len(self.state) - back)]
        self.term += 1
        self.attempt = 0
        self.links[self.term] = self.state[-1].point if self.state else None

    def attempted(self, step: int, *, commits: bool) -> None:
        self.attempt += 1
        if commits:
            name = AttemptName(step=step, term=self.term, attempt=self.attempt)
            self.names.append(name)
            self.state.append(name)

    def chain(self) -> Chain:
        limits: dict[int, int | None] = {self.term: None}
        continues = self.links[self.term]
        while continues is not None:
            limits[continues[0]] = continues[1]
            continues = self.links[continues[0]]
        return Chain(limits=limits)


_events = st.lists(
    st.one_of(
        st.tuples(st.just("restart"), st.integers(0, 5)),
        st.tuples(st.just("commit"), st.integers(0, 9)),
        st.tuples(st.just("fail"), st.integers(0, 9)),
    ),
    max_size=40,
)


def _replay(events: list[tuple[str, int]]) -> _History:
    history = _History()
    history.restart(0)
    for kind, number in events:
        if kind == "restart":
            history.restart(number)
        else:
            history.attempted(number, commits=kind == "commit")
    return history


@given(_events)
def test_epoch_records_alone_define_the_lineage(events: list[tuple[str, int]]) -> None:
    history = _replay(events)
    assert list(order(history.names, history.chain())) == history.state


@given(_events, st.data())
def test_deleted_checkpoints_do_not_change_the_lineage_of_the_others(
    events: list[tuple[str, int]], data: st.DataObject
) -> None:
    history = _replay(events)
    left = [name for name in history.names if data.draw(st.booleans())]
    expected = [name for name in history.state if name in left]
    assert list(order(left, history.chain())) == expected


@given(_events, st.data())
def test_the_last_readable_commit_of_a_step_replaces_the_earlier_ones(
    events: list[tuple[str, int]], data: st.DataObject
) -> None:
    names = order(_replay(events).names, Chain(limits={}))
    sound = frozenset(name for name in names if data.draw(st.booleans()))
    replaced = superseded(names, sound)
    for place, name in enumerate(names):
        later = [n for n in names[place + 1 :] if n.step == name.step and n in sound]
        assert replaced.get(name) == (later[-1] if later else None)


def test_without_records_all_count_by_step() -> None:
    names = [
        AttemptName(step=3, term=1, attempt=1),
        AttemptName(step=1, term=2, attempt=1),
        AttemptName(step=2, term=1, attempt=9),
    ]
    assert [name.step for name in order(names, Chain(limits={}))] == [1, 2, 3]


def test_folders_without_records_count_up_to_the_step_that_was_taken_up_again() -> None:
    kept = [AttemptName(step=1, term=1, attempt=1), AttemptName(step=2, term=2, attempt=1)]
    left_behind = [AttemptName(step=3, term=1, attempt=2), AttemptName(step=4, term=2, attempt=2)]
    new = AttemptName(step=3, term=3, attempt=1)
    chain = Chain(limits={3: None, 2: 1}, unrecorded_from=(2, 1))
    assert list(order([*kept, *left_behind, new], chain)) == [*kept, new]


def test_a_chain_with_a_lost_record_keeps_what_is_known() -> None:
    old = AttemptName(step=1, term=1, attempt=1)
    known = AttemptName(step=2, term=2, attempt=1)
    beyond = AttemptName(step=3, term=2, attempt=2)
    chain = Chain(limits={3: None, 2: 1})
    assert list(order([old, known, beyond], chain)) == [known]
