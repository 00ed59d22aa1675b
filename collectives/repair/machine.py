"""Sans-I/O repair: the members of a group bring an operation to one end when a member dies in it.

An operation is a program followed by a *commit*: a barrier that a member enters with the result, and that
withholds the result from its caller until all members have it. Local completion is not global success: an
operation that some members have completed and others have not is resolved here, before any caller sees it.

After a loss every member enters the next view, and all exchange reports. They reach the same verdict: return,
fail, run again, or copy the result. If a further loss interrupts a repair, the next epoch decides again, from
the state that was reached.

The verdict is a pure function of the reports of all members. They are at most one operation apart, because an
operation returns only after a barrier that every member enters with the result. For the operation `k` of the
member that is furthest behind:

- a member that is ahead has finished it: then all others hold its result (they return it), or it has failed
  (they fail, too);
- a member that has not called it proves that none of its data has moved: the members of the new epoch run it;
- a member that holds the result has it from a run in which all took part, so there is only one: it is copied,
  never computed again;
- if each member has a different result there is nothing to copy: results that some hold, and no caller has
  seen, are computed again by all, from one set of contributors;
- otherwise it is computed again from the inputs of the survivors, and of those dead members whose input can
  still be read.

Every member reaches the same verdict in an epoch, since the reports are equal. A member that misses the
verdict, because yet another member is lost, learns the outcome in the next epoch. This is virtual synchrony's
flush (Birman & Joseph 1987) for one operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, assert_never

from zbmd.actors.view import MemberId
from zbmd.collectives.repair import events as rm
from zbmd.collectives.repair.events import (
    Adoption,
    Call,
    Failed,
    Failure,
    Inputs,
    OnLoss,
    Outcome,
    Phase,
    Report,
)
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError


class VerdictKind(Enum):
    """The decision about operation `sequence`."""

    COMPLETE = "complete"
    FAIL = "fail"
    RUN = "run"
    RERUN = "rerun"
    COPY = "copy"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision, and its reason. `born`: the founding epoch of the group.

    `runners`: the members that compute it again, or that get a copy from `source`.
    """

    kind: VerdictKind
    reason: str
    born: int
    sequence: int
    runners: tuple[int, ...] = ()
    adopted: tuple[Adoption, ...] = ()
    contributors: tuple[MemberId, ...] = ()
    source: int = -1
    failed: Failed | None = None


def decide(
    epoch: int, members: tuple[MemberId, ...], reports: Mapping[int, Report], gone: frozenset[int]
) -> Verdict:
    """Return the verdict of `epoch`, from one report of each of `members`; `gone`: ranks that will not come
    back.

    Raises `RemoteProtocolError` for reports that no history of the protocol produces.
    """
    old = {rank: report for rank, report in sorted(reports.items()) if report.born}
    if not old:
        return Verdict(kind=VerdictKind.RUN, reason="the group is new", born=epoch, sequence=1)
    first = next(iter(old.values()))
    sequence = min(report.sequence for report in old.values())
    at = {rank: report for rank, report in old.items() if report.sequence == sequence}
    ahead = {rank: report for rank, report in old.items() if report.sequence != sequence}
    if any(r.born != first.born for r in old.values()) or any(
        r.sequence != sequence + 1 for r in ahead.values()
    ):
        where = {rank: (r.born, r.sequence) for rank, r in old.items()}
        raise RemoteProtocolError(f"epoch {epoch}: members cannot be so far apart: (born, operation) {where}")
    if ahead:
        return _behind(epoch, first.born, sequence, at, ahead)
    idle = [rank for rank, report in at.items() if report.phase is Phase.IDLE]
    if idle:
        reason = f"ranks {idle} had not called it: nothing of it has moved"
        return Verdict(kind=VerdictKind.RUN, reason=reason, born=first.born, sequence=sequence)
    return _Case(members, at, gone, first.born, sequence).verdict()


def _behind(
    epoch: int, born: int, sequence: int, at: Mapping[int, Report], ahead: Mapping[int, Report]
) -> Verdict:
    """Some members have finished the operation: the others follow."""
    failures = {r.failed for r in ahead.values() if r.failed and r.failed.sequence == sequence}
    who = f"ranks {sorted(ahead)} have finished it"
    if failures:
        failed = min(failures, key=lambda f: (f.failure.value, f.reason))
        return Verdict(kind=VerdictKind.FAIL, reason=who, born=born, sequence=sequence, failed=failed)
    without = [rank for rank, report in at.items() if report.phase is not Phase.HELD]
    if without:
        raise RemoteProtocolError(
            f"epoch {epoch}: ranks {sorted(ahead)} have finished operation {sequence}, but ranks {without} "
            "have no result of it"
        )
    return Verdict(kind=VerdictKind.COMPLETE, reason=who, born=born, sequence=sequence)


class _Case:
    """An operation that all survivors have called and none has finished."""

    def __init__(
        self,
        members: tuple[MemberId, ...],
        at: Mapping[int, Report],
        gone: frozenset[int],
        born: int,
        sequence: int,
    ) -> None:
        self.members = members
        self.at = at
        self.gone = gone
        self.born = born
        self.sequence = sequence
        living = set(members)
        self.dead = sorted(
            {m for report in at.values() for m in report.attempted} - living,
            key=lambda m: (m.rank, m.incarnation),
        )

    def verdict(self) -> Verdict:
        calls = {rank: report.call for rank, report in self.at.items()}
        call = next(iter(calls.values()))
        if call is None or any(other != call for other in calls.values()):
            called = "; ".join(
                f"rank {rank} called {c.text if c else 'nothing'}" for rank, c in calls.items()
            )
            return self._fail(Failure.DESYNCHRONISED, called)
        held = [rank for rank, report in self.at.items() if report.phase is Phase.HELD]
        if len(held) == len(self.at):
            return self._make(VerdictKind.COMPLETE, "all who live hold the result")
        if call.on_loss is OnLoss.ABORT and self.dead:
            return self._fail(Failure.LOST, f"on_loss is abort, and {self._why()}")
        if held and not call.own:
            return self._copy(held)
        spoiled = [rank for rank, report in self.at.items() if report.phase is Phase.SPOILED]
        if spoiled:
            reason = f"{self._why()}; the inputs of ranks {spoiled} are overwritten: compute them again"
            return self._fail(Failure.SPOILED, reason)
        return self._again(call)

    def _copy(self, held: list[int]) -> Verdict:
        contributors = {self.at[rank].contributors for rank in held}
        if len(contributors) != 1:
            raise RemoteProtocolError(
                f"operation {self.sequence}: ranks {held} hold results of different contributors"
            )
        source = held[0]
        return self._make(
            VerdictKind.COPY,
            f"rank {source} holds the result",
            source=source,
            runners=tuple(rank for rank in self.at if rank not in held),
            contributors=contributors.pop(),
        )

    def _again(self, call: Call) -> Verdict:
        adopted: list[Adoption] = []
        if call.inputs is Inputs.ADOPT:
            for member in self.dead:
                carriers = [rank for rank, report in self.at.items() if member in report.readable]
                if carriers:
                    adopted.append(Adoption(member=member, carrier=carriers[0]))
        if call.on_loss is OnLoss.WAIT_FOR_REPLACEMENT and len(adopted) < len(self.dead):
            return self._wait()
        if call.needs >= 0 and call.needs not in self.at:
            return self._fail(Failure.LOST, f"{self._why()}, and the operation was rank {call.needs}'s")
        living = [member for member in self.members if member.rank in self.at]
        contributors = sorted([*living, *(a.member for a in adopted)], key=lambda m: (m.rank, m.incarnation))
        return self._make(
            VerdictKind.RERUN,
            self._why(),
            runners=tuple(self.at),
            adopted=tuple(adopted),
            contributors=tuple(contributors),
        )

    def _wait(self) -> Verdict:
        present = {member.rank for member in self.members}
        missing = sorted({member.rank for member in self.dead} - present)
        never = sorted(set(missing) & self.gone)
        if never:
            reason = f"ranks {never} are gone for good: this job does not replace them (--on-loss)"
            return self._fail(Failure.NO_REPLACEMENT, reason)
        if missing:
            return self._make(VerdictKind.WAIT, f"replacements of ranks {missing} are awaited")
        return self._make(VerdictKind.RUN, f"{self._why()} and is back")

    def _fail(self, failure: Failure, reason: str) -> Verdict:
        ranks = tuple(member.rank for member in self.dead)
        failed = Failed(sequence=self.sequence, failure=failure, reason=reason, ranks=ranks)
        return self._make(VerdictKind.FAIL, reason, failed=failed)

    def _make(self, kind: VerdictKind, reason: str, **parts: Any) -> Verdict:
        return Verdict(kind=kind, reason=reason, born=self.born, sequence=self.sequence, **parts)

    def _why(self) -> str:
        """Say what interrupted the operation: deaths, or a link that ended between survivors."""
        ranks = [member.rank for member in self.dead]
        if not ranks:
            return "a link between its members was lost in it"
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
        return f"{who} died in it"


STORY_EVENTS_MAX = 8
"""Events kept for the message of a protocol error."""


class RepairState(Enum):
    """The state of the machine."""

    NEW = auto()
    IDLE = auto()
    RUNNING = auto()
    AWAITING_VIEW = auto()
    EXCHANGING = auto()
    MENDING = auto()
    """A copy, another run, or the commit of either is in progress."""
    OVER = auto()


class RepairMachine:
    """One member's side of the operations of a group, over all of its epochs."""

    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        self.state = RepairState.NEW
        self.epoch = 0
        self.members: tuple[MemberId, ...] = ()
        self.born = 0
        self.sequence = 1
        self.phase = Phase.IDLE
        self.call: rm.Call | None = None
        self.reason = ""
        """The reason of the last verdict."""
        self._gone: frozenset[int] = frozenset()
        self._readable: tuple[MemberId, ...] = ()
        self._attempted: tuple[MemberId, ...] = ()
        self._contributors: tuple[MemberId, ...] = ()
        self._failed: rm.Failed | None = None
        self._founding = 0
        self._story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)

    @property
    def contributors(self) -> tuple[MemberId, ...]:
        """Return the members whose inputs the result contains, once it is here."""
        return self._contributors

    def handle(self, event: rm.RepairEvent, *, now_ns: int) -> list[rm.RepairAction]:
        """Take one event, return the actions to perform in order; see `zbmd.transport.machine.Machine`."""
        self._story.append(f"{type(event).__name__}@{now_ns}/{self.state.name}")
        match event:
            case rm.EpochEntered():
                return self._enter(event)
            case rm.Called(call=call):
                self._require(RepairState.IDLE)
                self.call, self.phase = call, Phase.PENDING
                return self._run()
            case rm.FollowAsked():
                self._require(RepairState.IDLE)
                return self._await_view()
            case rm.Exchanged():
                self._require(RepairState.EXCHANGING, event.epoch)
                if len(event.reports) != len(self.members):
                    raise self._misuse(f"{len(event.reports)} reports of {len(self.members)} members")
                reports = {m.rank: r for m, r in zip(self.members, event.reports, strict=True)}
                verdict = decide(self.epoch, self.members, reports, self._gone)
                self.reason = verdict.reason
                return self._carry_out(verdict)
            case rm.ExchangeCut():
                self._require(RepairState.EXCHANGING, event.epoch)
                return self._await_view()
            case rm.Ended():
                return self._ended(event)
            case rm.NoView():
                self._require(RepairState.AWAITING_VIEW)
                self.state = RepairState.OVER
                return [rm.GaveUp(sequence=self.sequence)]
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` on a state that no sequence of events may reach."""
        assert self.sequence >= 1
        assert (self.call is None) == (self.phase is Phase.IDLE), (self.call, self.phase)
        match self.state:
            case RepairState.NEW:
                assert self.epoch == 0
            case RepairState.IDLE:
                assert self.phase is Phase.IDLE and 0 < self.born <= self.epoch
            case RepairState.RUNNING:
                assert self.phase is Phase.PENDING and self.born
            case RepairState.AWAITING_VIEW | RepairState.EXCHANGING | RepairState.MENDING:
                assert self.born or self.phase is Phase.IDLE, (
                    "a member that does not know the group calls nothing"
                )
            case RepairState.OVER:
                pass
        if self.phase is Phase.HELD:
            assert self._contributors

    # ---- epochs

    def _enter(self, event: rm.EpochEntered) -> list[rm.RepairAction]:
        ranks = [member.rank for member in event.members]
        expected = self.state in (RepairState.NEW, RepairState.AWAITING_VIEW)
        if not expected or event.epoch <= self.epoch or self.rank not in ranks or ranks != sorted(set(ranks)):
            raise self._misuse(f"epoch {event.epoch} of {ranks} cannot follow epoch {self.epoch}")
        self.epoch, self.members = event.epoch, event.members
        self._gone, self._readable = frozenset(event.gone), event.readable
        self.state = RepairState.EXCHANGING
        report = rm.Report(
            born=self.born,
            sequence=self.sequence,
            phase=self.phase,
            call=self.call,
            attempted=self._attempted if self.call else (),
            contributors=self._contributors if self.phase is Phase.HELD else (),
            readable=self._readable if self.call else (),
            failed=self._failed,
        )
        return [rm.Exchange(epoch=self.epoch, report=report)]

    def _await_view(self) -> list[rm.RepairAction]:
        self.state = RepairState.AWAITING_VIEW
        return [rm.AwaitView(after=self.epoch)]

    # ---- runs

    def _run(self) -> list[rm.RepairAction]:
        self._drop_result()
        self.state, self._attempted = RepairState.RUNNING, self.members
        self._contributors = self.members
        if self._root_is_absent():
            # All fail together: behind the commit nobody is left who could meet it with its root back.
            return [rm.Confirm(epoch=self.epoch, sequence=self.sequence)]
        return [rm.Run(epoch=self.epoch, sequence=self.sequence)]

    def _root_is_absent(self) -> bool:
        """Whether the operation was called in an epoch without its root."""
        needs = self.call.needs if self.call else -1
        return needs >= 0 and all(member.rank != needs for member in self.members)

    def _fail_without_root(self) -> list[rm.RepairAction]:
        assert self.call is not None
        root = self.call.needs
        reason = f"the operation was rank {root}'s, which is missing"
        self._failed = rm.Failed(
            sequence=self.sequence, failure=rm.Failure.LOST, reason=reason, ranks=(root,)
        )
        self._over()
        return [rm.Raise(failed=self._failed)]

    def _ended(self, event: rm.Ended) -> list[rm.RepairAction]:
        self._require(RepairState.RUNNING, RepairState.MENDING, event.epoch)
        if event.outcome is Outcome.BROKEN:
            self.state = RepairState.OVER
            return [rm.GaveUp(sequence=self.sequence)]
        rootless = self.state is RepairState.RUNNING and self._root_is_absent()
        if event.outcome is Outcome.COMMITTED and rootless:
            return self._fail_without_root()
        if event.outcome is Outcome.COMMITTED:
            return self._return() if self.call else self._settle(self.sequence + 1)
        if rootless:
            return self._await_view()  # there is no result to hold, and nothing has moved
        if self.call is not None and self.phase is not Phase.HELD:
            self.phase = Phase(event.outcome.value if event.outcome is not Outcome.INTACT else "pending")
        return self._await_view()

    def _return(self) -> list[rm.RepairAction]:
        done = rm.Return(sequence=self.sequence, contributors=self._contributors)
        self._over()
        return [done]

    def _over(self) -> None:
        self.state, self.phase, self.call = RepairState.IDLE, Phase.IDLE, None
        self.sequence += 1

    def _settle(self, sequence: int) -> list[rm.RepairAction]:
        self.state = RepairState.IDLE
        self.born, self.sequence = self.born or self._founding, sequence
        return [rm.Settled(epoch=self.epoch, sequence=sequence)]

    # ---- verdicts

    def _carry_out(self, verdict: Verdict) -> list[rm.RepairAction]:
        """Do this member's part: of the operation, of the next one, or as a new member."""
        self._founding = verdict.born
        if verdict.kind is VerdictKind.WAIT:
            return self._await_view()
        mends = verdict.kind in (VerdictKind.COPY, VerdictKind.RERUN)
        if not self.born:
            if mends:
                self.sequence = verdict.sequence
                return self._confirm()
            # Others may not hear this verdict: who has gone on must know in the next epoch how it ended.
            self._failed = verdict.failed
            return self._settle(verdict.sequence + (verdict.kind is not VerdictKind.RUN))
        if self.sequence > verdict.sequence or verdict.kind is VerdictKind.RUN:
            return self._run() if self.call else self._settle(self.sequence)
        match verdict.kind:
            case VerdictKind.COMPLETE:
                return self._return()
            case VerdictKind.FAIL:
                assert verdict.failed is not None
                self._failed = verdict.failed
                self._over()
                return [rm.Raise(failed=verdict.failed)]
            case VerdictKind.COPY:
                return self._copy(verdict)
            case VerdictKind.RERUN:
                return self._rerun(verdict)

    def _copy(self, verdict: Verdict) -> list[rm.RepairAction]:
        if self.rank != verdict.source and self.rank not in verdict.runners:
            return self._confirm()
        self.state = RepairState.MENDING
        self._contributors = verdict.contributors
        return [
            rm.CopyResult(epoch=self.epoch, sequence=self.sequence, source=verdict.source, to=verdict.runners)
        ]

    def _rerun(self, verdict: Verdict) -> list[rm.RepairAction]:
        self.state = RepairState.MENDING
        self._drop_result()
        self._contributors = verdict.contributors
        return [
            rm.Rerun(
                epoch=self.epoch,
                sequence=self.sequence,
                runners=verdict.runners,
                adopted=verdict.adopted,
            )
        ]

    def _drop_result(self) -> None:
        """Discard a result, because it is computed again in place, from other contributions."""
        if self.phase is Phase.HELD:
            self.phase = Phase.PENDING

    def _confirm(self) -> list[rm.RepairAction]:
        self.state = RepairState.MENDING
        return [rm.Confirm(epoch=self.epoch, sequence=self.sequence)]

    # ---- small parts

    def _require(self, *expected: RepairState | int) -> None:
        """Raise `LocalProtocolError` unless the state, and the epoch if one is given, are among these."""
        epochs = [value for value in expected if isinstance(value, int)]
        if self.state not in expected or (epochs and self.epoch not in epochs):
            raise self._misuse(f"it is {self.state.name} in epoch {self.epoch}")

    def _misuse(self, what: str) -> LocalProtocolError:
        return LocalProtocolError(f"rank {self.rank}: {what}", story=tuple(self._story))


# ---- capture


def repair_config(machine: RepairMachine) -> dict[str, Any]:
    """Return the configuration from which a new `RepairMachine` like this one is built."""
    return {"rank": machine.rank}


def _build_repair(config: Mapping[str, Any]) -> RepairMachine:
    return RepairMachine(**config)


REPAIR: MachineKind[rm.RepairEvent, rm.RepairAction] = register(
    "repair", 1, _build_repair, events=rm.RepairEvent, actions=rm.RepairAction, states=(RepairMachine,)
)
