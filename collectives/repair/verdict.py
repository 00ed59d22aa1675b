"""Decide on an operation in which a member was lost: a pure function of the reports of all members.

Members are at most one operation apart, because an operation returns only after a barrier that every member
enters with the result. For the operation `k` of the member that is furthest behind:

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

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zbmd.actors.view import MemberId
from zbmd.collectives.repair.events import Adoption, Call, Failed, Failure, Inputs, OnLoss, Phase, Report
from zbmd.transport.errors import RemoteProtocolError


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
