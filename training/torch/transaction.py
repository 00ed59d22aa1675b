"""Sans-I/O: the steps of a resilient loop as transactions, and what is done after a loss.

Version v is the state that v committed transactions have left. A transaction is prepared (its gradients are
whole, nothing of the state is written), then each rank votes with its version. A rank that sees all votes
commits.

After a loss all meet, and report version, whether they have voted, and whether they are fresh. The target is
the highest version that somebody has.

- A rank one behind it has voted, and so holds whole gradients: the commit counts for it, too (`Promote`),
  once it has the votes that it has not seen (`Share`).
- A rank at the target has begun the next transaction: it repeats that (`Repeat`).
- A fresh rank takes the state from the first of those (`Take`, `Give`), who are where transactions begin.

Nobody ever undoes a committed transaction.

Where the state is sharded, the next rank is a rank's *buddy*: it keeps a copy of the shard, by making each
update of its ward as well. So a rank first gets its ward's gradients (`Deliver`), and its vote says that it
holds them. Delivery and vote are two operations: a delivery that has ended here may have failed at others.
After a loss, a rank that is behind promotes before any shard moves (the others `Meet` again): then all are
where transactions begin, and a fresh rank takes the rest of the state from the first, its shard from its
buddy, and the copy that it is to keep from its ward (`Move`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError

DIGEST_EVERY: Final = 64
"""Versions from one whose copies are compared to the next: to read them costs a fraction of one step."""


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
    FAILED = "failed"


class What(Enum):
    """A part of a sharded state that goes from one rank to another."""

    REST = "rest"
    """All that is not sharded."""
    SHARD = "shard"
    """Of the receiver, from its buddy."""
    COPY = "copy"
    """Of the sender's shard, to its buddy, which keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A rank's account of itself when all meet. keeps: whether it has a copy of its ward's shard."""

    version: int
    voted: bool
    fresh: bool
    keeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """A vote. holds: whether the rank can make its ward's update as well; only of a sharded state.

    digests: of the parts of the state before the transaction; of a sharded one, of each parameter with its
    moments. copy: the same, of the copy of the ward's shard. Empty: they are not compared.
    """

    version: int
    holds: bool = False
    digests: tuple[int, ...] = ()
    copy: tuple[int, ...] = ()


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
    """A rank is lost, or others have given up since one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """All ranks have met again. reports: of all, in their order."""

    place: int
    reports: tuple[Report, ...]


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
class Deliver:
    """Send the gradients for `version` to the buddy, and receive those of the ward."""

    version: int


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
class Move:
    """Send this of the state of `version` from `source` to `target`, of which this rank is one."""

    version: int
    what: What
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The loop cannot go on. lost: its state is gone; else ranks disagree.

    parameter: the number of the first one that they disagree on, in the order of their digests.
    """

    lost: bool
    reason: str
    parameter: int | None = None


Event: TypeAlias = Prepared | Delivered | AllVoted | Cut | Met | Shared | Taken | Kept
Action: TypeAlias = Deliver | Vote | Commit | Meet | Share | Promote | Repeat | Give | Take | Move | Fail


class Transactions:
    """The machine of one rank. fresh: it replaces another. sharded: each rank has a part of the state.

    With a sharded state the first ranks begin with a meeting, which gives each the copy that it keeps.
    """

    def __init__(self, *, version: int = 0, fresh: bool = False, sharded: bool = False) -> None:
        self.version = version
        self.phase = Phase.FRESH if fresh else Phase.MEETING if sharded else Phase.OPEN
        self.voted = self.keeps = False
        self.fresh, self.sharded = fresh, sharded
        self._prepares = Prepared()
        """The transaction whose gradients are being delivered."""
        self._place = self._source = 0
        self._target = version
        self._fresh: tuple[int, ...] = ()
        self._moves: tuple[Move, ...] = ()
        """Of the meeting under way, of all ranks, in the order in which they are made."""
        self._behind = False

    @property
    def report(self) -> Report:
        """This rank's account of itself for a meeting."""
        return Report(version=self.version, voted=self.voted, fresh=self.fresh, keeps=self.keeps)

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
            case Cut():
                self.phase = Phase.FRESH if self.fresh else Phase.MEETING
                return [Meet()]
            case Met():
                return self._met(event)
            case Shared():
                self._expect(event, Phase.SHARING)
                return self._go_on()
            case Taken():
                return self._taken(event)
            case Kept():
                self._expect(event, Phase.OPEN)
                self.keeps = self.sharded
                return []

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of events may reach."""
        assert not (self.fresh and self.voted), "a fresh rank has voted"
        assert not (self.fresh and self.keeps), "a fresh rank has a copy"
        assert self.phase is not Phase.VOTED or self.voted
        assert self.fresh or self.phase not in (Phase.FRESH, Phase.TAKING), "an old rank takes a state"
        assert not self.fresh or self.phase not in (Phase.OPEN, Phase.VOTED), "a fresh rank computes"

    def _expect(self, event: Event, *phases: Phase) -> None:
        if self.phase not in phases:
            raise LocalProtocolError(f"{event} came in phase {self.phase.value} of version {self.version}")

    def _prepared(self, event: Prepared) -> list[Action]:
        self._expect(event, Phase.OPEN)
        if self.sharded and event.updates:
            self.phase, self._prepares = Phase.DELIVERING, event
            return [Deliver(version=self.version + 1)]
        return self._vote(event)

    def _vote(self, event: Prepared) -> list[Action]:
        self.phase, self.voted = Phase.VOTED, True
        ballot = Ballot(
            version=self.version,
            holds=self.sharded,
            digests=event.digests,
            copy=event.copy,
        )
        return [Vote(ballot=ballot)]

    def _all_voted(self, event: AllVoted) -> list[Action]:
        self._expect(event, Phase.VOTED)
        versions = [ballot.version for ballot in event.ballots]
        if set(versions) != {self.version}:
            return self._fail(f"ranks vote for versions {versions}: their scripts take different steps")
        without = [place for place, ballot in enumerate(event.ballots) if ballot.holds != self.sharded]
        if without:
            return self._fail(f"rank {without[0]} votes without its ward's gradients: others run other code")
        compare = _other_copy if self.sharded else _other_state
        other = compare(self.version, event.ballots)
        if other is not None:
            self.phase = Phase.FAILED
            return [other]
        self._commit()
        return [Commit(version=self.version)]

    def _commit(self) -> None:
        self.version += 1
        self.phase, self.voted = Phase.OPEN, False

    def _met(self, event: Met) -> list[Action]:
        self._expect(event, Phase.MEETING, Phase.FRESH)
        reports = event.reports
        if reports[event.place] != self.report:
            raise LocalProtocolError(f"{reports[event.place]} came as the own report, not {self.report}")
        old = [place for place, report in enumerate(reports) if not report.fresh]
        if not old:
            return self._fail("all ranks that had the state are lost", lost=True)
        target = max(reports[place].version for place in old)
        for place in old:
            report = reports[place]
            if report.version != target and not (report.version == target - 1 and report.voted):
                voted = "" if report.voted else ", has not voted"
                return self._fail(f"rank {place} is at version {report.version}{voted}; others at {target}")
        self._place, self._target = event.place, target
        self._source = next(place for place in old if reports[place].version == target)
        self._fresh = tuple(place for place, report in enumerate(reports) if report.fresh)
        self._behind = any(reports[place].version < target for place in old)
        if self.sharded:
            lost = _lost_shard(reports)
            if lost:
                return self._fail(lost, lost=True)
            self._moves = _moves(reports, target, self._source)
        if self._behind:
            self.phase = Phase.SHARING
            return [Share(version=target, source=self._source)]
        return self._go_on()

    def _go_on(self) -> list[Action]:
        target = self._target
        if self.version < target and not self.fresh:
            self._commit()
            return [Promote(version=target)]
        if self._behind and self._moves:
            # A rank that promotes is in the middle of a step: no shard can be of one version until it has
            # ended that, and finds that the others have given up their groups.
            self.phase = Phase.FRESH if self.fresh else Phase.MEETING
            return [Meet()]
        own = [move for move in self._moves if self._place in (move.source, move.target)]
        if self.fresh:
            self.phase = Phase.TAKING
            return [*own] if self.sharded else [Take(version=target, source=self._source)]
        self.phase, self.voted = Phase.OPEN, False
        if self.sharded:
            return [Repeat(version=target), *own]
        gives = self._fresh and self._source == self._place
        return [Repeat(version=target), *([Give(version=target, to=self._fresh)] if gives else [])]

    def _taken(self, event: Taken) -> list[Action]:
        self._expect(event, Phase.TAKING)
        self.version, self.fresh, self.phase = event.version, False, Phase.OPEN
        self.keeps = self.sharded
        return []

    def _fail(self, reason: str, *, lost: bool = False) -> list[Action]:
        self.phase = Phase.FAILED
        return [Fail(lost=lost, reason=reason)]


def buddy_of(place: int, size: int) -> int:
    """Return who keeps a copy of a rank's shard: the next one."""
    return (place + 1) % size


def ward_of(place: int, size: int) -> int:
    """Return whose shard a rank keeps a copy of: that of the one before."""
    return (place - 1) % size


def _other_state(version: int, ballots: Sequence[Ballot]) -> Fail | None:
    """Return the failure of ranks whose state is not that of most others; None: all have the same."""
    rows = [ballot.digests for ballot in ballots]
    if len(set(rows)) <= 1:
        return None
    usual, count = Counter(rows).most_common(1)[0]
    odd = [place for place, row in enumerate(rows) if row != usual]
    pairs = enumerate(zip(rows[odd[0]], usual, strict=False))
    first = next((at for at, pair in pairs if pair[0] != pair[1]), min(len(rows[odd[0]]), len(usual)))
    told = ", ".join(f"{row[first]:016x}" if first < len(row) else "none" for row in rows)
    most = f"; most have those of rank {rows.index(usual)}, not of {odd}" if 2 * count > len(rows) else ""
    return Fail(
        lost=False,
        reason=f"the state of version {version} is not the same on all ranks (digests {told}){most}: memory "
        "or a processor has erred, or the script changes parameters on some ranks alone; start the run "
        "again, from its last checkpoint",
        parameter=first,
    )


def _other_copy(version: int, ballots: Sequence[Ballot]) -> Fail | None:
    """Return the failure of the first rank whose copy is not its ward's shard; None: all are the same."""
    for place, ballot in enumerate(ballots):
        ward = ward_of(place, len(ballots))
        shard = ballots[ward].digests
        if not ballot.copy or ballot.copy == shard:
            continue
        pairs = enumerate(zip(ballot.copy, shard, strict=False))
        first = next((at for at, pair in pairs if pair[0] != pair[1]), None)
        return Fail(
            lost=False,
            reason=f"the shard of rank {ward} and its copy on rank {place} are not the same in version "
            f"{version}: memory or a processor of one of them has erred, or the script changes parameters "
            "outside of optimizer.step(); start the run again, from its last checkpoint",
            parameter=first,
        )
    return None


def _lost_shard(reports: tuple[Report, ...]) -> str:
    """Return which shard nobody has any more; "": each is there."""
    for place, report in enumerate(reports):
        buddy = buddy_of(place, len(reports))
        if not report.fresh:
            continue
        if reports[buddy].fresh:
            return (
                f"ranks {place} and {buddy} are lost together, and rank {buddy} kept the copy of rank "
                f"{place}'s shard: a shard survives if its rank or the next one lives; start the run again, "
                "from its last checkpoint"
            )
        if not reports[buddy].keeps:
            return (
                f"rank {place} is lost before rank {buddy} had a copy of its shard: start the run again, "
                "from its last checkpoint"
            )
    return ""


def _moves(reports: tuple[Report, ...], version: int, source: int) -> tuple[Move, ...]:
    """Return what goes from whom to whom. All perform theirs in this order, so none waits in a circle."""
    size = len(reports)
    moves: list[Move] = []
    for place, report in enumerate(reports):
        if report.fresh:
            moves.append(Move(version=version, what=What.REST, source=source, target=place))
            buddy = buddy_of(place, size)
            moves.append(Move(version=version, what=What.SHARD, source=buddy, target=place))
    without = [place for place, report in enumerate(reports) if not report.keeps] if size > 1 else []
    wards = sorted((ward_of(place, size) for place in without), key=lambda ward: (ward % 2, ward))
    moves += [
        Move(version=version, what=What.COPY, source=ward, target=buddy_of(ward, size)) for ward in wards
    ]
    return tuple(moves)


# ---- capture


def transaction_config(machine: Transactions) -> dict[str, Any]:
    """Return the configuration from which a new machine like this one is built."""
    return {"version": machine.version, "fresh": machine.fresh, "sharded": machine.sharded}


def _build(config: Mapping[str, Any]) -> Transactions:
    return Transactions(version=config["version"], fresh=config["fresh"], sharded=config["sharded"])


TRANSACTION: MachineKind[Event, Action] = register(
    "transaction", 4, _build, events=Event, actions=Action, states=(Transactions,)
)
