"""The rounds in which the ranks of a job commit their saves, one save after the other.

Rank 0 (`Leader`) announces the attempt of a save under the key `now`. Every rank makes its files
durable and publishes a receipt; the leader of a group of ranks (`Groups`) collects those of its
group and publishes one summary, and rank 0 collects the summaries and decides (`plan.receipts`).
The decision is a file of the run that can be created only once: rank 0's flusher creates it to
commit, and a rank that loses contact with rank 0 creates it to abort, or finds that the save is
committed. A checkpoint is therefore complete or absent, even if ranks die or stall meanwhile.

In each save, a rank waits for other ranks for at most one deadline in total; its own work does not
count. A rank that collects stops waiting earlier than the ranks that wait for it, so that it can
still tell them which ranks are missing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog.attempt import abort, unknown_decision
from laststep.codecs.digests import digest
from laststep.commit import differences
from laststep.commit.layouts import ABSENT, SAME_STEPS, CurrentRound, EndedRound, margin_s
from laststep.constants import listed
from laststep.errors import AbortedError, LaststepError, MismatchError, StorageError
from laststep.events import ReplicasDiffer
from laststep.flush.protocol import Begun, Decide
from laststep.format.manifest import Commit, WrittenIndexes
from laststep.plan import receipts
from laststep.plan.receipts import Differing, Groups, Receipt, Shared, Summary
from laststep.process.threads import ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.attempt import AttemptName
    from laststep.commit.differences import Parts, ReplicaDigests
    from laststep.commit.layouts import GlobalLayouts
    from laststep.events import Bus
    from laststep.flush.client import Client
    from laststep.flush.saves import Save
    from laststep.plan.layouts import GlobalLayout
    from laststep.ranks.group import Rank
    from laststep.ranks.key_value import KeyValueStore
    from laststep.storage.store import Store

log = logging.getLogger(__name__)

_BEGUN, _SUMMARISED, _GATHERED, _COMMITTED, _DECIDED = 0.5, 0.6, 0.8, 0.9, 1.0
"""The waits of a save, in order, each with the fraction of the margin that is added to the
deadline: until rank 0 has begun (it may itself have waited for local layouts of others), for the
receipts of a group, for the summaries of all groups, for the commit by rank 0's flusher, and for
the decision that rank 0 publishes."""
_SHOWN = 4
_PAST = 16
_STUCK = "it may be stopped or its disk may hang; the next save tries again"
_SEE_FIRST = "it may be stopped, slow or dead: check its log"


class GivenUp(Exception):
    """The save is aborted. The message, for all ranks, names the rank at fault and the remedy."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a save; an empty reason means committed. If `asks` is set, the save is not
    decided yet: rank 0 asks two ranks in what they differ."""

    reason: str = ""
    asks: Differing | None = None


@dataclass(slots=True)
class Round:
    """One save on this rank, until all ranks have its decision."""

    step: int
    save: Save | None
    global_layout: GlobalLayout | None
    trees: dict[str, bytes] = field(default_factory=dict)
    """The encoded plain values of each item; filled in when they are serialised."""
    receipt: Receipt = field(default_factory=Receipt)
    """This rank's receipt, except for the fields known only at the end; set with `trees`."""
    replicas: ReplicaDigests | None = None
    """This rank's replicas, if this save compares them."""
    problem: str = ""
    """The reason why this rank takes no part."""
    number: int = 0
    """Rank 0's number of this save; a member knows it together with `place`."""
    place: AttemptName | None = None
    began_s: float = 0.0
    """The time at which this rank started to take part (monotonic)."""
    own_s: float = 0.0
    """Seconds of this rank's own work since then, which do not count as waiting for others."""
    has_answered: bool = False
    has_refused: bool = False
    """True if this rank has refused a save of rank 0 because it was at another step."""

    def seal(self, trees: dict[str, bytes], rank: int) -> bytes:
        """Record the plain values; return the receipt without the written files and replicas."""
        assert self.save is not None  # noqa: S101 (a rank without a save seals nothing)
        assert self.global_layout is not None  # noqa: S101 (as above)
        plan = self.save.plan
        group = self.global_layout.layout_group_of[rank]
        shared = [item.name for item in plan.items if not item.per_rank]
        self.trees.update(trees)
        self.receipt = Receipt(
            global_layout=self.global_layout.digest,
            layout_group=group,
            items=plan.item_records,
            contents={Shared(group, name): digest(trees[name]) for name in shared},
        )
        return msgspec.msgpack.encode(self.receipt)

    def key(self, name: str) -> str:
        return f"s/{self.number}/{name}"

    def answer_to(self, asked: Shared) -> Parts:
        if asked.item:
            return differences.values_of(asked.item, self.trees[asked.item])
        return {} if self.replicas is None else self.replicas.parts(asked.number)


@dataclass(eq=False)
class Participant:
    """This rank's part in the job's saves, one after the other; for one thread at a time."""

    rank: Rank
    kv: KeyValueStore
    client: Client
    global_layouts: GlobalLayouts
    store: Store
    deadline_s: float
    groups: Groups
    known: int = field(default=0, init=False)
    """The number of the last save of rank 0 that this rank led, joined or refused."""
    _left: tuple[str, ...] = field(default=(), init=False)
    """Keys of the previous save that this rank removes."""

    def go_through(self, round_: Round) -> None:
        """Take part in a save; it is over when this returns, committed or not."""
        self.settle(round_, self._outcome(round_))
        # Free this memory now: the next save may be far away.
        round_.trees.clear()
        round_.replicas = None

    def settle(self, round_: Round, error: LaststepError | None) -> LaststepError | None:
        """End this rank's save and return its error; None if it is committed.

        Usually the flusher has already reported the outcome. If it has died or hangs, this rank
        aborts the save in the run itself, or finds there that it is decided. `error` is the failure
        to report otherwise; None if another rank has reported the commit.
        """
        save = round_.save
        if save is None or save.over:
            return None if save is None else save.error
        failure = error or save.lost
        if failure is not None and round_.place is not None:
            failure = self._abort(round_.place, failure)
        if failure is None and round_.place is not None:
            save.decided(round_.place)
        else:
            save.failed(failure or StorageError("a commit failed", found="no answer"))
        return save.error

    def _abort(self, place: AttemptName, failure: LaststepError) -> LaststepError | None:
        """Abort the save in the run too, so that a flusher that resumes later cannot commit it.
        Return the reason; None if the save turns out to be committed."""
        try:
            stands = abort(self.store, place.folder, str(failure))
        except LaststepError as second:
            return unknown_decision(place, f"{failure}; then {second}")
        if isinstance(stands, Commit):
            return None
        if stands.reason == str(failure) or not isinstance(failure, AbortedError):
            return failure
        return AbortedError(stands.reason)  # the reason of the rank that aborted first

    def _outcome(self, round_: Round) -> LaststepError | None:
        """Take part in a save; return the error if it is aborted."""
        round_.began_s = self.kv.now_s()
        # Other ranks name this step if they miss this rank. The reason for not taking part is left
        # out: it may itself be about missing ranks, which would nest these messages.
        seen = f"step {round_.step}{', which it did not take part in' if round_.problem else ''}"
        error: LaststepError
        try:
            try:
                self.kv.put(f"last/{self.rank.number}", seen.encode())
            except LaststepError as lost:
                log.warning("other ranks may not hear from this rank at %s: %s", seen, lost)
            self._take_part(round_)
        except GivenUp as over:
            error, reason = AbortedError(str(over)), str(over)
        except LaststepError as raised:
            error, reason = raised, self._trouble(raised.without_remedy())
        except Exception as raised:
            log.exception("the commit of step %d failed", round_.step)
            error = StorageError("a commit failed", found=repr(raised))
            reason = self._trouble(str(error))
        else:
            return None
        with contextlib.suppress(LaststepError):
            self._warn(round_, reason)
        save = round_.save
        if save is not None and save.handle.durable.done():
            # The flusher finds out whether the save is committed after all.
            self.client.send(Decide(save=save.number, reason=reason))
            self._await_flusher(save)
        elif save is not None:
            save.failed(error)
        return error

    # Differs between rank 0 and the others

    def _take_part(self, round_: Round) -> None:
        """Go through a save; raise `GivenUp` if it is aborted."""
        raise NotImplementedError

    def _warn(self, round_: Round, reason: str) -> None:
        """Notify the other ranks that this rank aborts a save."""

    def _listen(self, round_: Round) -> None:
        """Raise `GivenUp` if another rank has failed or has decided the save."""

    # Shared by both

    def _until_s(self, round_: Round, margin: float) -> float:
        """Return when (monotonic) this rank stops waiting for others, with part of the margin."""
        return round_.began_s + round_.own_s + self.deadline_s + margin * margin_s(self.deadline_s)

    def _trouble(self, problem: str) -> str:
        """Return a problem for other ranks to read, with the rank that has it."""
        if problem.startswith("rank "):
            return problem
        return f"rank {self.rank.number}: {problem}; see its log"

    def _absent(self, round_: Round, who: Sequence[str]) -> GivenUp:
        late = f"did not save step {round_.step} within {self.deadline_s:g} s"
        return GivenUp(f"{listed(who)} {late}; {ABSENT}")

    def _join_layouts(self) -> None:
        """Agree on a new global layout if called to; raise `GivenUp` if the ranks cannot agree."""
        try:
            self.global_layouts.join()
        except MismatchError as error:
            differences = "; ".join(error.problems.lines()[:_SHOWN])
            raise GivenUp(f"{error.what}: {differences}; {error.remedy}") from error

    def _own_receipt(self, round_: Round) -> Receipt:
        """Wait until this rank's files are durable or have failed, and return its receipt."""
        if round_.save is None or round_.global_layout is None:
            return Receipt(problem=round_.problem)
        began_s, durable = self.kv.now_s(), round_.save.handle.durable

        def look() -> bool:
            if not durable.over():
                self._join_layouts()
                self._listen(round_)
            return durable.over()

        self.kv.until(look, rest=durable.over_within)
        round_.own_s += self.kv.now_s() - began_s
        error = round_.save.error or round_.save.lost
        if error is not None:
            return Receipt(problem=error.without_remedy())
        contents = dict(round_.receipt.contents)
        if round_.replicas is not None:
            contents |= round_.replicas.contents()
        written = round_.save.written
        return msgspec.structs.replace(round_.receipt, written=written, contents=contents)

    def _gather(self, round_: Round, names: Sequence[str], until_s: float) -> dict[str, bytes]:
        """Wait for other ranks' keys. Raise the first problem, or `GivenUp` with who is late."""

        def meanwhile() -> None:
            self._join_layouts()
            self._listen(round_)
            if round_.save is not None and (error := round_.save.error or round_.save.lost):
                raise error

        keys = {round_.key(name): name for name in names}
        notes = self.kv.wait_all(keys, until_s, meanwhile=meanwhile)
        late = [name for key, name in keys.items() if key not in notes]
        if late:
            self._listen(round_)
            raise self._absent(round_, [self._reporter(name) for name in late])
        return {keys[key]: note for key, note in notes.items()}

    def _summary(self, round_: Round, own_receipt: Receipt, global_layout: GlobalLayout) -> Summary:
        """Collect the receipts of this rank's group and sum them up."""
        me = self.rank.number
        names = {f"r/{rank}": rank for rank in self.groups.group_of(me) if rank != me}
        notes = self._gather(round_, list(names), self._until_s(round_, _SUMMARISED))
        decode = msgspec.msgpack.Decoder(ready(Receipt)).decode
        received = {rank: decode(notes[name]) for name, rank in names.items()}
        return receipts.summarise({me: own_receipt, **received}, global_layout)

    def _reporter(self, name: str) -> str:
        """Return the rank, and the group for which it speaks, that should have left this key."""
        kind, _, number = name.partition("/")
        group, rank = self.groups.group_of(int(number)), self.global_layouts.last_of(int(number))
        return rank if kind == "r" else f"{rank}, which speaks for ranks {group[0]} to {group[-1]},"

    def _tidy(self, round_: Round, names: Sequence[str] = ()) -> None:
        """Remove the keys of the previous save; remember these and those of receipts."""
        left, group = self._left, self.groups.group_of(self.rank.number)
        self._left = tuple(map(round_.key, (*names, *(f"r/{rank}" for rank in group))))
        self.kv.remove(left)

    def _await_flusher(self, save: Save, until_s: float | None = None) -> None:
        """Wait until the flusher has reported a decided save's outcome or has died."""
        if until_s is None:
            until_s = self.kv.now_s() + self.deadline_s
        self.kv.until(lambda: save.over or save.lost is not None, until_s, rest=save.rest)


@dataclass(eq=False)
class Leader(Participant):
    """Rank 0 in the commit of saves: it numbers them, collects the receipts and decides."""

    bus: Bus
    _number: int = field(default_factory=lambda: time.time_ns() // 1_000_000, init=False)
    """The number of the last save that this rank led. Starts at the time in ms, above the numbers
    that a dead job instance may have left in the same key-value store."""
    _posted: int = field(default=0, init=False)
    """The number of the last save that was published to the other ranks."""
    _past: deque[EndedRound] = field(default_factory=lambda: deque(maxlen=_PAST), init=False)

    def _take_part(self, round_: Round) -> None:
        """Lead a save until it is committed or aborted, and publish the outcome."""
        self._number += 1
        round_.number = self.known = self._number
        round_.place = self._begun(round_)
        save, global_layout = round_.save, round_.global_layout
        if round_.place is None or save is None or global_layout is None:
            self._tell(round_, self._trouble(self._own_receipt(round_).problem))
            return
        self._post(round_)
        own_receipt = self._own_receipt(round_)
        if own_receipt.problem:
            self._tell(round_, self._trouble(own_receipt.problem))
            return
        summaries = self._summaries(round_, own_receipt, global_layout)
        objection = receipts.objection_to(summaries, global_layout)
        if isinstance(objection, Differing):  # the ranks publish their values only on request
            objection = differences.describe(objection, self._ask(round_, objection))
        if objection:
            raise GivenUp(objection)
        self._tell_of_replicas(round_, summaries)
        self._commit(save, global_layout, summaries)
        self._await_flusher(save, self._until_s(round_, _COMMITTED))
        late = f"did not commit step {round_.step} within {self.deadline_s:g} s"
        failure = AbortedError(f"the flusher of rank 0 {late}", remedy=_STUCK)
        error = self.settle(round_, save.lost or failure)
        reason = "" if error is None else self._trouble(error.without_remedy())
        with contextlib.suppress(LaststepError):  # the others find the outcome in the run
            self._tell(round_, reason)

    def _summaries(
        self, round_: Round, own_receipt: Receipt, global_layout: GlobalLayout
    ) -> list[Summary]:
        own = self._summary(round_, own_receipt, global_layout)
        names = [f"g/{leader}" for leader in self.groups.leaders[1:]]
        notes = self._gather(round_, names, self._until_s(round_, _GATHERED))
        decode = msgspec.msgpack.Decoder(ready(Summary)).decode
        return [own, *(decode(notes[name]) for name in names)]

    def _warn(self, round_: Round, reason: str) -> None:
        self._tell(round_, reason)

    def _listen(self, round_: Round) -> None:
        note = self.kv.look(round_.key("failed"))
        if note is not None:
            raise GivenUp(note.decode())

    def _begun(self, round_: Round) -> AttemptName | None:
        """Wait until this rank's flusher has begun the attempt and return its name; None if the
        save has failed or this rank takes no part. Raise `AbortedError` at the deadline."""
        save = round_.save
        if save is None:
            return None
        until_s = round_.began_s + self.deadline_s + margin_s(self.deadline_s)
        if not self.kv.until(lambda: save.at is not None or save.over, until_s, rest=save.rest):
            late = f"the flusher did not start within {self.deadline_s:g} s"
            raise AbortedError(late, remedy=_STUCK)
        round_.own_s = self.kv.now_s() - round_.began_s
        return save.at

    def _post(self, round_: Round, *, problem: str = "") -> None:
        now = CurrentRound(
            number=round_.number,
            step=round_.step,
            place=None if problem else round_.place,
            problem=problem,
            past=tuple(self._past),
        )
        self.kv.put("now", msgspec.msgpack.encode(now))
        self._posted = round_.number

    def _commit(self, save: Save, global_layout: GlobalLayout, summaries: list[Summary]) -> None:
        written = WrittenIndexes()
        for summary in summaries:
            written = written.plus(summary.written)
        self.client.send(
            Decide(
                save=save.number,
                items=receipts.items_of(summaries, global_layout),
                written=written,
                layout_groups=receipts.layout_groups_of(global_layout),
                ranks=self.rank.ranks,
            )
        )

    def _tell_of_replicas(self, round_: Round, summaries: list[Summary]) -> None:
        """Emit an event if replicas differ; those of the lowest rank that holds them are stored."""
        differing = receipts.diverged(summaries)
        if differing is not None:
            names = tuple(self._ask(round_, differing))
            self.bus.emit(ReplicasDiffer(step=round_.step, tensors=names, ranks=differing.ranks))

    def _ask(self, round_: Round, asked: Differing) -> list[str]:
        """Ask the two ranks in what they differ; return the names if both answer in time."""
        self.kv.put(round_.key("decision"), msgspec.msgpack.encode(Decision(asks=asked)))
        names = {round_.key(f"v/{rank}"): rank for rank in asked.ranks if rank != 0}
        # These ranks have just reported, so a short wait is enough: one that does not answer died.
        soon_s = self.kv.now_s() + margin_s(self.deadline_s)
        notes = self.kv.wait_all(names, min(soon_s, self._until_s(round_, _COMMITTED)))
        self.kv.remove(names)
        decode = msgspec.msgpack.Decoder(dict[str, bytes]).decode
        answers = {names[name]: decode(note) for name, note in notes.items()}
        if 0 in asked.ranks:
            answers[0] = round_.answer_to(asked.shared)
        return differences.names_that_differ(asked, answers)

    def _tell(self, round_: Round, reason: str) -> None:
        if self._posted != round_.number:  # publish it now, together with its outcome
            self._post(round_, problem=reason)
        self._past.append(EndedRound(number=round_.number, step=round_.step, reason=reason))
        self.kv.put(round_.key("decision"), msgspec.msgpack.encode(Decision(reason=reason)))
        names = ["decision", "failed", *(f"g/{leader}" for leader in self.groups.leaders[1:])]
        self._tidy(round_, names)


class Member(Participant):
    """A rank other than 0: it joins a save, writes, reports and waits for the decision.

    It finds the save of its own step under `now`; if several saves have that step, it takes the
    first that it has not joined. If ranks save different steps, the save of the lower step fails at
    once: a rank that skipped a save is back in sync at the higher step.
    """

    _passed = 0
    """The number of the last save of a higher step for which this rank gave up its own."""

    def _take_part(self, round_: Round) -> None:
        save, me = round_.save, self.rank.number
        self._join(round_)
        if save is not None and round_.place is not None:
            self._listen(round_)  # this rank may be late: the save may be decided
            save.begin()  # the flusher must know the save before it gets its attempt
            self.client.send(Begun(save=save.number, at=round_.place))
        own_receipt = self._own_receipt(round_)
        if own_receipt.problem or save is None or round_.global_layout is None:
            self.kv.put(round_.key("failed"), self._trouble(own_receipt.problem).encode())
            return
        self.kv.put(round_.key(f"r/{me}"), msgspec.msgpack.encode(own_receipt))
        if self.groups.leader_of(me) == me:
            summary = self._summary(round_, own_receipt, round_.global_layout)
            self.kv.put(round_.key(f"g/{me}"), msgspec.msgpack.encode(summary))
            self._tidy(round_)

        def look() -> Decision | None:
            decision = self._heard(round_)
            if decision is None:
                self._join_layouts()
            return decision

        decision = self.kv.until(look, self._until_s(round_, _DECIDED))
        if decision is None:
            why = f"rank 0 did not commit step {round_.step} within {self.deadline_s:g} s"
            raise GivenUp(f"rank {me} gave it up: {why}; {_SEE_FIRST}")
        if decision.reason:
            raise GivenUp(decision.reason)
        self.client.send(Decide(save=save.number))
        self._await_flusher(save)

    def _warn(self, round_: Round, reason: str) -> None:
        if round_.number:
            own_name = f"rank {self.rank.number}"
            reason = reason if reason.startswith(own_name) else f"{own_name} gave it up: {reason}"
            self.kv.put(round_.key("failed"), reason.encode())

    def _join(self, round_: Round) -> None:
        """Wait for rank 0's save of this step; raise `GivenUp` if there will be none."""

        def look() -> CurrentRound | None:
            now = self._now()
            if now is not None and now.number > self.known:
                self._check_missed(round_, now)
                if self._fits(round_, now):
                    return now
            if round_.problem:
                why = self._trouble(round_.problem)
                self.global_layouts.refuse(round_.step, self.known, why)
            self._join_layouts()
            return None

        now = self.kv.until(look, self._until_s(round_, _BEGUN))
        if now is None:
            raise self._absent(round_, [self.global_layouts.last_of(0)])
        self.known = round_.number = now.number
        round_.place = now.place
        if now.place is None:
            raise GivenUp(now.problem)

    def _fits(self, round_: Round, now: CurrentRound) -> bool:
        """Return whether rank 0's save is this rank's. Raise `GivenUp` if this rank's save has to
        fail, and refuse rank 0's if this rank will not join it."""
        is_passed = now.number == self._passed
        is_over = now.place is None or self.kv.look(f"s/{now.number}/decision") is not None
        if now.step == round_.step and not (is_passed and is_over):
            return True
        apart = f"rank 0 is saving step {now.step} instead of step {round_.step}; {SAME_STEPS}"
        if now.step > round_.step and not is_passed:
            # Rank 0 may have skipped this step; this rank's next save may then match.
            self._passed = now.number
            raise GivenUp(apart)
        if now.step < round_.step and round_.has_refused:
            raise GivenUp(apart)  # rank 0 has gone on, and is not at this step yet
        self.known = now.number
        if not is_over:
            round_.has_refused = True
            reason = f"is saving step {round_.step} instead of step {now.step}; {SAME_STEPS}"
            log.warning("the save of step %d fails on rank 0: this rank %s", now.step, reason)
            told = f"rank {self.rank.number} {reason}"
            self.kv.put(f"s/{now.number}/failed", told.encode())
        return False

    def _now(self) -> CurrentRound | None:
        note = self.kv.look("now")
        return None if note is None else msgspec.msgpack.decode(note, type=ready(CurrentRound))

    def _check_missed(self, round_: Round, now: CurrentRound) -> None:
        """Raise `GivenUp` with the reason if rank 0 has finished this save without this rank."""
        # A save that this rank has refused or given way to does not count as missed.
        known = max(self.known, self._passed)
        for past in now.past:
            if past.step == round_.step and past.number > known:
                self.known = past.number
                late = f"rank {self.rank.number} did not take part and was late"
                raise GivenUp(past.reason or f"{late}; {SAME_STEPS}")

    def _listen(self, round_: Round) -> None:
        decision = self._heard(round_)
        if decision is not None:
            raise GivenUp(decision.reason)

    def _heard(self, round_: Round) -> Decision | None:
        """Return a joined save's outcome, None if not published; answer rank 0's question, once."""
        if (note := self.kv.look(round_.key("decision"))) is not None:
            decision = msgspec.msgpack.decode(note, type=ready(Decision))
            if (asked := decision.asks) is None:
                return decision
            if self.rank.number in asked.ranks and not round_.has_answered:
                round_.has_answered = True
                answer = msgspec.msgpack.encode(round_.answer_to(asked.shared))
                self.kv.put(round_.key(f"v/{self.rank.number}"), answer)
        now = self._now()
        if now is None or now.number <= round_.number:
            return None
        # This rank stalled so long that the keys have been removed.
        for past in now.past:
            if past.number == round_.number:
                return Decision(reason=past.reason)
        return Decision(reason=f"rank {self.rank.number} was not told its outcome in time")
