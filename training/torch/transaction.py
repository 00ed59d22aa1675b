"""Sans-I/O: the steps of a resilient loop as transactions, and what is done after a loss.

Version v is the state that v committed transactions have left. A transaction is prepared (its gradients are
whole, nothing of the state is written that cannot be restored), then each rank votes with its version. A rank
that sees all votes commits.

After a loss all meet, and report version, whether they have voted, and whether they are fresh. The target is
the highest version that somebody has.

- A rank one behind it has voted, and so holds whole gradients: the commit counts for it, too (`Promote`),
  once it has the votes that it has not seen (`Share`).
- A rank at the target has begun the next transaction: it repeats that (`Repeat`).
- A fresh rank takes the state from the first of those (`Take`, `Give`), who are where transactions begin.

Nobody ever undoes a committed transaction.

A rank that is lost in the last vote of a script may leave survivors of two kinds: those that have seen all
votes finish their scripts, and cannot be met again; the others learn only that (`Ended`). All ranks run one
script, so a rank that has finished has committed what this one has voted for: the commit counts (`Promote`).
If no rank was lost, nothing has kept the votes from this rank: the others have not voted, and scripts differ.

Where the state is sharded, the next rank is a rank's *buddy*: it keeps a copy of the shard, by making each
update of its ward as well. So a rank first gets its ward's gradients (`Deliver`), and its vote says that it
holds them. Delivery and vote are two operations: a delivery that has ended here may have failed at others.
After a loss, a rank that is behind promotes before any shard moves (the others `Meet` again): then all are
where transactions begin, and a fresh rank takes the rest of the state from the first, its shard from its
buddy, and the copy that it is to keep from its ward (`Move`). In a hybrid mesh several ranks have the same
shard: it is lost with all of them and with all buddies.

If no buddy can make an update, since the optimizer communicates in it, say, the transaction is prepared once
the update is made: then what a rank delivers is all of its part, and the part before stays beside the new
one, at the rank and at its buddy, until a commit or a repetition says which of them counts (`fsdp.slots`).

Each rank keeps its last committed steps in memory that outlives it (`durable.memory`), and reports which. If
no rank has the state, or none a part of it, and what fresh ranks hold makes up for that, they take it from
there (`Recall`), and all meet again: then they have it, as if they had never been lost. A rank whose ward is
alone on another node keeps the ward's copy there as well: the memory of such a node may be lost.

No buddy has copies where that memory has all parts: gradients are left there before a vote (`Deliver`).

If there are fewer or more ranks than before, the sharded state is divided again (`fsdp.division`): all
receive their parts (`Divide`), agree that they have (`Agree`), and adopt them (`Adopt`). In a hybrid mesh
whole replicas go on: ranks that are left over give what they have, and then `Wait`, as fresh ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from zbmd.training.torch.ballots import Ballot, difference_of
from zbmd.training.torch.fsdp.division import (
    Division,
    Held,
    Holder,
    Move,
    Plan,
    Report,
    apart_in_words,
    holders_of,
    lost_part,
    missing_held,
    newest_held,
    next_number,
    plan_of,
    settled,
)
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError


class Phase(Enum):
    """The phase of a rank."""

    OPEN = "open"
    """Between two votes."""
    DELIVERING = "delivering"
    VOTED = "voted"
    FRESH = "fresh"
    """It replaces another, and has not met the others."""
    MEETING = "meeting"
    SHARING = "sharing"
    TAKING = "taking"
    RECALLING = "recalling"
    DIVIDING = "dividing"
    WAITING = "waiting"
    """It has no part, and waits for ranks to be lost, or to come."""
    ENDED = "ended"
    """Others have finished their scripts: the last transaction is committed, and no further one can be."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The transaction can be committed on this rank.

    updates: whether gradients go with it. Others: see `Ballot`.
    """

    updates: bool = True
    digests: tuple[int, ...] = ()
    copy: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The ward's gradients are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllVoted:
    """The votes of all ranks, in their order."""

    ballots: tuple[Ballot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A rank is lost, or others have given up since one is. outlives: see `Report`."""

    outlives: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """All ranks have met again. reports: of all, in their order."""

    place: int
    reports: tuple[Report, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Others have finished their scripts. lost: whether a rank of the last vote is lost."""

    lost: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The votes of the version that others have seen committed are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The state of another rank is here. version: the one that came with it."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A copy of the ward's shard is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """The state that memory has held is this rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """This rank's part of the next division, and its ward's, are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """All ranks have theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Exchange gradients for `version`, or updated parts, with buddy and ward; or leave them in memory."""

    version: int
    leaves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Send this ballot to all, and collect theirs."""

    ballot: Ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """`version` is committed: update the state."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """Meet all others again, and exchange reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Take part in a broadcast of the votes for `version`, from rank `source`."""

    version: int
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """Others have seen `version` committed: update the state with the gradients that are held."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Go back to where the transaction under way began, which is `version`, and repeat it."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """Send the state of `version` to these ranks, one after the other."""

    version: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Receive the state of `version`."""

    version: int
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Take what this rank's memory holds, which is then its part of the state."""

    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Divide:
    """Exchange parts of the state of `version` with all, and keep what has come beside the own part.

    division: the part that this rank is to have, if it is to have one. holders: of the parts of the division
    before. source: the rank that says what the state consists of.
    """

    version: int
    division: Division
    holders: tuple[Holder, ...]
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agree:
    """Wait until all ranks have their parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Go on with the part that was received last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Have no part in the loop until there is another view, and meet in that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The loop cannot go on. lost: its state is gone; else ranks disagree.

    parameter: the number of the first one that they disagree on, in the order of their digests.
    """

    lost: bool
    reason: str
    parameter: int | None = None


Event: TypeAlias = (
    Prepared | Delivered | AllVoted | Cut | Met | Ended | Shared | Taken | Kept | Recalled | Divided | Agreed
)
AtMeetings: TypeAlias = (
    Meet | Share | Promote | Repeat | Give | Take | Recall | Move | Divide | Agree | Adopt | Wait
)
Action: TypeAlias = Deliver | Vote | Commit | Fail | AtMeetings


class Transactions:
    """The machine of one rank. fresh: it replaces another. sharded: each rank has a part of the state.

    place, size: of this rank among the first ones, for a sharded state. That begins with a meeting, which
    gives each rank the copy that it keeps. held: what memory holds for a fresh rank. distinct: see
    `division.holders_of`.
    """

    def __init__(
        self,
        *,
        version: int = 0,
        fresh: bool = False,
        sharded: bool = False,
        place: int = 0,
        size: int = 1,
        held: tuple[Held, ...] = (),
        distinct: int = 0,
        outlives: bool = False,
    ) -> None:
        self.version = version
        self.phase = Phase.FRESH if fresh else Phase.MEETING if sharded else Phase.OPEN
        self.voted = self.keeps = self.leaves = False
        """leaves: the memory of all ranks has their parts, for whoever replaces them: no buddy has copies."""
        self.outlives = outlives
        self.fresh, self.sharded, self.held, self.distinct = fresh, sharded, held, distinct
        self._recalls: tuple[Held, int] | None = None
        """The part that is being taken from memory, and the number of its division."""
        self._prepares = Prepared()
        """The transaction whose gradients are being delivered."""
        self._place = self._source = self._number = 0
        self._target = version
        self._fresh: tuple[int, ...] = ()
        self.first = (place, size)
        """Its place among the first ranks, and their number."""
        self.division: Division | None = None
        """The part that this rank has."""
        if sharded and not fresh:
            self.division = Division(number=0, size=size, place=place, distinct=distinct)
        self.ready: Division | None = None
        """A part that it has received, and that not all may have."""
        self._plan = Plan()
        """Of the meeting under way."""
        self._behind = self.meets_again = False
        """meets_again: once this rank has ended its step, it has to meet the others again in this view."""

    @property
    def report(self) -> Report:
        """This rank's account of itself for a meeting."""
        return Report(
            version=self.version,
            voted=self.voted,
            fresh=self.fresh,
            keeps=self.keeps,
            division=self.division,
            ready=self.ready,
            held=self.held if self.fresh else (),
            outlives=self.outlives and not self.fresh,
        )

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take `event` and return the actions. Raises `LocalProtocolError` for one out of place."""
        if self.phase is Phase.FAILED:
            return []
        match event:
            case Prepared():
                return self._prepared(event)
            case Delivered():
                self._expect(event, Phase.DELIVERING)
                return self._vote(self._prepares)
            case AllVoted():
                return self._all_voted(event)
            case Cut() if self.phase is Phase.ENDED:
                return self._fail(
                    "others have finished their scripts, and this rank's goes on: scripts differ"
                )
            case Cut():
                self.meets_again, self.leaves, self.outlives = False, False, event.outlives
                self.phase = Phase.FRESH if self.fresh else Phase.MEETING
                return [Meet()]
            case Met():
                return self._met(event)
            case Ended():
                return self._ended(event)
            case Shared():
                self._expect(event, Phase.SHARING)
                return self._go_on()
            case Taken():
                return self._taken(event)
            case Recalled():
                return self._recalled(event)
            case Divided():
                self._expect(event, Phase.DIVIDING)
                self.ready, self.version = self._plan.division, self._target
                return [Agree()]
            case Agreed():
                self._expect(event, Phase.DIVIDING)
                self.phase = Phase.OPEN
                self._adopt()
                return self._wait() if self.fresh else [Adopt()]
            case Kept():
                self._expect(event, Phase.OPEN)
                self.keeps = self.sharded
                return []

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of events may reach."""
        assert not (self.fresh and self.voted), "a fresh rank has voted"
        assert not (self.fresh and self.keeps), "a fresh rank has a copy"
        assert not (self.leaves and self.keeps), "a copy is kept that no update is made on"
        assert self.phase is not Phase.VOTED or self.voted
        takes = (Phase.FRESH, Phase.TAKING, Phase.RECALLING, Phase.WAITING)
        assert self.fresh or self.phase not in takes, "an old rank takes a state"
        computes = self.phase in (Phase.OPEN, Phase.VOTED, Phase.ENDED)
        assert not (self.fresh and computes), "a fresh rank computes"

    def _expect(self, event: Event, *phases: Phase) -> None:
        if self.phase not in phases:
            raise LocalProtocolError(f"{event} came in phase {self.phase.value} of version {self.version}")

    def _prepared(self, event: Prepared) -> list[Action]:
        self._expect(event, Phase.OPEN)
        if self.sharded and (event.updates or self.leaves):
            self.phase, self._prepares = Phase.DELIVERING, event
            return [Deliver(version=self.version + 1, leaves=self.leaves)]
        return self._vote(event)

    def _vote(self, event: Prepared) -> list[Action]:
        self.phase, self.voted = Phase.VOTED, True
        told = {"digests": event.digests, "copy": event.copy}
        return [Vote(ballot=Ballot(version=self.version, holds=self.sharded, **told))]

    def _all_voted(self, event: AllVoted) -> list[Action]:
        self._expect(event, Phase.VOTED)
        other = difference_of(self.version, event.ballots, sharded=self.sharded)
        if other is not None:
            return self._fail(other.reason, parameter=other.parameter)
        self._commit()
        return [Commit(version=self.version)]

    def _commit(self) -> None:
        self.version += 1
        self.phase, self.voted = Phase.OPEN, False

    def _adopt(self) -> None:
        """Have the part that is ready count; if that is none, be as a rank that has come late."""
        waits = self.ready is not None and self.ready.is_left_over
        self.division, self.ready = None if waits else self.ready, None
        self.keeps, self.fresh, self.leaves, self.outlives = not waits, waits, False, False
        if waits:
            self.voted, self.held = False, ()

    def _wait(self) -> list[Action]:
        self.phase = Phase.WAITING
        return [Wait()]

    def _met(self, event: Met) -> list[Action]:
        self._expect(event, Phase.MEETING, Phase.FRESH)
        if (own := event.reports[event.place]) != self.report:
            raise LocalProtocolError(f"{own} came as the own report, not {self.report}")
        if not self.sharded:
            return self._go_to(event.place, event.reports)
        reports, adopts = tuple(settled(event.reports)), list[Action]()
        if reports[event.place].division != self.division:
            # Another rank has seen that all had their parts, so this one has its own.
            self._adopt()
            self.phase = Phase.FRESH if self.fresh else Phase.MEETING
            adopts = [] if self.fresh else [Adopt()]
        self.ready, self._number = None, next_number(event.reports)
        return [*adopts, *self._go_to(event.place, reports)]

    def _go_to(self, own: int, reports: tuple[Report, ...]) -> list[Action]:
        """Bring all ranks to the same version, and each to its part of the state."""
        old = [place for place, report in enumerate(reports) if not report.fresh]
        if not old:
            newest = newest_held(reports)
            if newest is None:
                return self._fail("all ranks that had the state are lost", lost=True)
            every = (each for each in self.held if each.launch == newest.launch)
            return self._recall(every, newest.version, newest.size, range(newest.size), 0)
        target = max(reports[place].version for place in old)
        if apart := apart_in_words(reports, target):
            return self._fail(apart)
        self._place, self._target = own, target
        self._source = next(place for place in old if reports[place].version == target)
        self._fresh = tuple(place for place, report in enumerate(reports) if report.fresh)
        self._behind = any(reports[place].version < target for place in old)
        if self.sharded and (refused := self._divisions(reports)):
            return refused
        if self._behind:
            self.phase = Phase.SHARING
            return [Share(version=target, source=self._source)]
        return self._go_on()

    def _divisions(self, reports: tuple[Report, ...]) -> list[Action]:
        """Plan which parts go where. Returns the failure if a part is lost."""
        numbers = {each.division.number for each in reports if each.division is not None}
        if len(numbers) > 1:
            return self._fail(f"ranks have parts of several divisions: {[each.division for each in reports]}")
        if lost := lost_part(reports, self._target, self.distinct):
            missing = missing_held(reports, self._target, self.distinct)
            if not missing:
                return self._fail(lost, lost=True)
            return self._recall(self.held, self._target, len(holders_of(reports)), missing, max(numbers))
        part = Division(number=max(numbers), size=0, place=self._place, distinct=self.distinct)
        self._plan = plan_of(reports, self._target, self._source, part, self._number)
        self.leaves, self.keeps = self._plan.leaves, self.keeps and not self._plan.leaves
        return []

    def _go_on(self) -> list[Action]:
        target = self._target
        if self.version < target and not self.fresh:
            self._commit()
            self.meets_again = self.sharded and bool(self._plan.moves or self._plan.divides)
            return [Promote(version=target)]
        plan, part = self._plan, self._plan.division
        if self._behind and (plan.moves or plan.divides):
            # A rank that promotes is in the middle of a step: no shard can be of one version until it has
            # ended that. All that are to compute may be such ranks, so nobody else would tell them.
            self.phase = Phase.FRESH if self.fresh else Phase.MEETING
            return [Meet()]
        own = [move for move in plan.moves if self._place in (move.source, move.target)]
        if plan.divides and part is not None:
            self.phase, self.voted = Phase.DIVIDING, False
            divide = Divide(version=target, division=part, holders=plan.holders, source=self._source)
            return [*([] if self.fresh else [Repeat(version=target)]), *own, divide]
        if part is not None and part.is_left_over:
            return self._wait()
        if self.fresh:
            self.phase = Phase.TAKING
            return [*own] if self.sharded else [Take(version=target, source=self._source)]
        self.phase, self.voted = Phase.OPEN, False
        if self.sharded:
            return [Repeat(version=target), *own]
        gives = self._fresh and self._source == self._place
        return [Repeat(version=target), *([Give(version=target, to=self._fresh)] if gives else [])]

    def _ended(self, event: Ended) -> list[Action]:
        self._expect(event, Phase.MEETING, Phase.FRESH)
        if not (self.voted and event.lost):
            return self._fail(event.reason)
        self._commit()
        self.phase = Phase.ENDED
        return [Promote(version=self.version)]

    def _recall(
        self, held_here: Iterable[Held], version: int, size: int, places: Collection[int], number: int
    ) -> list[Action]:
        """Take one of these parts from memory, if it is there, and meet again. number: of the division."""
        own = (each for each in held_here if (each.version, each.size) == (version, size))
        held = next((each for each in own if self.fresh and each.place in places), None)
        if held is None:
            self.phase = Phase.FRESH if self.fresh else Phase.MEETING
            return [Meet()]
        self.phase, self._recalls = Phase.RECALLING, (held, number)
        return [Recall(held=held)]

    def _recalled(self, event: Recalled) -> list[Action]:
        self._expect(event, Phase.RECALLING)
        assert self._recalls is not None
        held, number = self._recalls
        self.version, self.fresh, self.phase = held.version, False, Phase.MEETING
        self.keeps = self.sharded and held.keeps
        if self.sharded:
            self.division = Division(number=number, size=held.size, place=held.place, distinct=self.distinct)
        return [Meet()]

    def _taken(self, event: Taken) -> list[Action]:
        self._expect(event, Phase.TAKING)
        self.version, self.fresh, self.phase = event.version, False, Phase.OPEN
        self.keeps, self.division = self.sharded and not self.leaves, self._plan.division
        return []

    def _fail(self, reason: str, *, lost: bool = False, parameter: int | None = None) -> list[Action]:
        self.phase = Phase.FAILED
        return [Fail(lost=lost, reason=reason, parameter=parameter)]


# ---- capture


def transaction_config(machine: Transactions) -> dict[str, Any]:
    """Return the configuration from which a new machine like this one is built."""
    place, size = machine.first
    return {
        "version": machine.version,
        "fresh": machine.fresh,
        "sharded": machine.sharded,
        "place": place,
        "size": size,
        "held": machine.held,
        "distinct": machine.distinct,
        "outlives": machine.outlives,
    }


def _build(config: Mapping[str, Any]) -> Transactions:
    return Transactions(**config)


TRANSACTION: MachineKind[Event, Action] = register(
    "transaction", 10, _build, events=Event, actions=Action, states=(Transactions,)
)
