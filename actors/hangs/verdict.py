"""Why a job hangs (sans-I/O): the host's judgement over what its ranks' watchdogs say.

A rank that says that something of it is stuck, or that says nothing any more, opens a case. All ranks are
asked where they stand, those that do not answer are looked at from outside, and then each trouble is followed
to its root: an operation to the members that never entered it, a handler that waits for an answer to the
actor that owes it. A ring of waits is a deadlock. Each root is reported once, and once more when it is
over.

While a rank is in a debugger, which its host says at each look, nobody hangs, and all ranks are asked to
extend their time-outs. What was known before counts no more once that is over.

Time counts from tick to tick, as in `progress`, so a host that was suspended accuses nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from zbmd.actors.hangs.progress import LATE_LOOKS, look_ns
from zbmd.actors.hangs.root_cause import Finding, RankFacts, Trigger, find_roots, triggers_of
from zbmd.actors.hangs.wire import Standing
from zbmd.transport.errors import LocalProtocolError

GATHER_NS_MAX = 2_000_000_000
"""For the answers of all ranks."""
GATHER_LOOKS = 4
LOOKS_FACTOR = 2
"""So many times the time for the answers is waited, with that for the looks from outside."""
DEBUGGED_LOOKS = 3
"""A rank counts as debugged for so many looks after its host has said so last."""
REPORTED_MAX = 256
"""Root causes that are reported and not over; further ones are not reported."""


class OnHang(Enum):
    """The reaction of a run to a hang."""

    REPORT = "report"
    REPLACE = "replace"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangNotice:
    """One hang, once as it is found and once, with `over`, when it has gone.

    culprits: (rank, incarnation) of those that the others wait for, none if all wait alike; stack: of the
    first of them, a line a frame; next_step: a sentence on what happens next; doing: see `Place`.
    """

    text: str
    culprits: tuple[tuple[int, int], ...]
    stack: tuple[str, ...]
    over: bool
    next_step: str
    doing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWatched:
    """The watchdog of this incarnation has said hello. host: where it runs, if there are several."""

    rank: int
    incarnation: int
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAlive:
    """It runs."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """It says where its process stands."""

    rank: int
    incarnation: int
    standing: Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """State of its process, as seen from outside: `is stopped (SIGSTOP)`."""

    rank: int
    incarnation: int
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGone:
    """The process has ended, or its watchdog has left."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDebugged:
    """It is in a debugger; said again at each look."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed; meant to come once a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStanding:
    """Ask its watchdog where it stands; answered by `RankPosition`, or not at all."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOutside:
    """Look at its process; answered by `RankSeen` or `RankGone`."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendTimeouts:
    """Have it wait on where a time-out would end its wait; said again at each look."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHang:
    """Tell whoever runs the host."""

    notice: HangNotice


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """End this incarnation, so that what the run does about a loss takes place."""

    rank: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun:
    """End the run."""

    reason: str


HangEvent = RankWatched | RankAlive | RankPosition | RankSeen | RankGone | RankDebugged | Ticked
RankAction = AskStanding | LookOutside | Replace | ExtendTimeouts
"""The host of the rank carries it out."""
HangAction = RankAction | ReportHang | StopRun


class CaseState(Enum):
    """The state of the machine."""

    QUIET = "quiet"
    GATHERING = "gathering"
    """All ranks are asked."""
    LOOKING = "looking"
    """Those that have not answered are looked at."""


@dataclass(slots=True)
class _Rank:
    facts: RankFacts
    answered: bool = False
    seen: bool = False


@dataclass(slots=True)
class _Reported:
    notice: HangNotice
    evidence: set[Trigger] = field(default_factory=set[Trigger])


class HangMachine:
    """Judges the ranks of one host, or of one job's hosts, each held to `deadline_ns`."""

    def __init__(self, *, deadline_ns: int, on_hang: OnHang = OnHang.REPORT) -> None:
        if deadline_ns <= 0:
            raise LocalProtocolError(f"a deadline of {deadline_ns} ns watches nothing")
        self.deadline_ns = deadline_ns
        self.look_ns = look_ns(deadline_ns)
        self.on_hang = on_hang
        self.gather_ns = min(GATHER_NS_MAX, max(GATHER_LOOKS * self.look_ns, deadline_ns // 4))
        self.state = CaseState.QUIET
        self._ranks: dict[int, _Rank] = {}
        self._known: set[Trigger] = set()
        self._reported: dict[object, _Reported] = {}
        self._gathered_ns = 0
        self._ticked_ns: int | None = None
        self._debugged: dict[int, int] = {}
        """Ranks in a debugger, and for how many looks they count as such."""
        self._recheck_ns = 0
        """Until all ranks are asked again, since one was in a debugger."""

    @property
    def notices(self) -> tuple[HangNotice, ...]:
        """Return the hangs that are reported and not over."""
        return tuple(case.notice for case in self._reported.values())

    def handle(self, event: HangEvent, *, now_ns: int) -> list[HangAction]:
        """Take one event; what to do about it, in order."""
        match event:
            case RankWatched():
                known = self._ranks.get(event.rank)
                if known is None or known.facts.incarnation < event.incarnation:
                    self._ranks[event.rank] = _Rank(RankFacts(event.rank, event.incarnation))
                current = self._current(event.rank, event.incarnation)
                if current is not None:
                    current.facts.host = event.host
                return []
            case RankAlive():
                rank = self._current(event.rank, event.incarnation)
                if rank is not None:
                    rank.facts.silent_ns, rank.facts.outside = 0, ""
                return []
            case RankPosition():
                rank = self._current(event.rank, event.incarnation)
                if rank is None:
                    return []
                rank.facts.silent_ns, rank.facts.outside = 0, ""
                rank.facts.standing, rank.answered = event.standing, True
                return self._go_on()
            case RankSeen():
                rank = self._current(event.rank, event.incarnation)
                if rank is None:
                    return []
                rank.seen, rank.facts.outside = True, event.words
                return self._go_on()
            case RankGone():
                if self._current(event.rank, event.incarnation) is not None:
                    self._forget(event.rank)
                return []
            case RankDebugged():
                began = not self._debugged
                if self._current(event.rank, event.incarnation) is not None:
                    self._debugged[event.rank] = DEBUGGED_LOOKS
                return self._extend() if began else []
            case Ticked():
                return self._tick(now_ns)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` on a state that no events may lead to."""
        assert len(self._reported) <= REPORTED_MAX, f"{len(self._reported)} hangs are reported"
        for rank, known in self._ranks.items():
            assert known.facts.rank == rank, f"rank {known.facts.rank} is kept as {rank}"
            assert known.facts.silent_ns >= 0, f"rank {rank} has been silent for {known.facts.silent_ns} ns"
        assert self._debugged.keys() <= self._ranks.keys(), "a rank that is not known is in a debugger"
        if self.state is CaseState.LOOKING:
            assert self._unseen(), "nobody is left to look at"
        for case in self._reported.values():
            assert case.evidence, f"told without evidence: {case.notice.text}"
            assert case.evidence <= self._known, f"told for what is not known: {case.notice.text}"

    def _current(self, rank: int, incarnation: int) -> _Rank | None:
        known = self._ranks.get(rank)
        return known if known is not None and known.facts.incarnation == incarnation else None

    def _forget(self, rank: int) -> None:
        """A rank is gone: its end is reported elsewhere, and ends its troubles.

        A case that is open begins again: the others may be about to learn of that end.
        """
        del self._ranks[rank]
        if self._debugged.pop(rank, 0) and not self._debugged:
            self._begin_again()
        self.state = CaseState.QUIET
        self._known = {trigger for trigger in self._known if trigger[0] != rank}
        for key, case in list(self._reported.items()):
            case.evidence &= self._known
            if not case.evidence:
                del self._reported[key]

    def _tick(self, now_ns: int) -> list[HangAction]:
        passed_ns = min(now_ns - (self._ticked_ns or now_ns), LATE_LOOKS * self.look_ns)
        if passed_ns < 0:
            raise LocalProtocolError(f"a tick at {now_ns} ns, behind one at {self._ticked_ns} ns")
        self._ticked_ns = now_ns
        if self._debugged:
            return self._tick_of_debugger()
        for rank in self._ranks.values():
            rank.facts.silent_ns += passed_ns
            rank.facts.silent = rank.facts.silent_ns >= self.deadline_ns
        self._gathered_ns += passed_ns
        if self._recheck_ns:
            self._recheck_ns = max(0, self._recheck_ns - passed_ns)
            if not self._recheck_ns and self.state is CaseState.QUIET:
                return self._gather()
        return self._go_on()

    def _tick_of_debugger(self) -> list[HangAction]:
        self._debugged = {rank: looks - 1 for rank, looks in self._debugged.items() if looks > 1}
        if not self._debugged:
            self._begin_again()
        return self._extend()

    def _extend(self) -> list[HangAction]:
        """Nobody hangs meanwhile."""
        if not self._debugged:
            return []
        self.state = CaseState.QUIET
        return [
            ExtendTimeouts(rank=r, incarnation=known.facts.incarnation) for r, known in self._ranks.items()
        ]

    def _begin_again(self) -> None:
        """Forget the positions of the ranks: they are of the time when one was in a debugger.

        A rank says only once that it is stuck: all are asked again when they have had time to go on.
        """
        self._recheck_ns = self.deadline_ns
        for rank, known in self._ranks.items():
            facts = known.facts
            self._ranks[rank] = _Rank(RankFacts(rank, facts.incarnation, host=facts.host))

    def _go_on(self) -> list[HangAction]:
        """From state to state, as far as what is known allows."""
        if self._debugged:
            return []
        if self.state is CaseState.QUIET:
            triggers = self._triggers()
            actions = self._close(triggers)
            return actions + self._gather() if triggers - self._known else actions
        if self.state is CaseState.GATHERING:
            waiting = [r for r in self._ranks.values() if not r.answered and not r.facts.silent]
            if waiting and self._gathered_ns < self.gather_ns:
                return []
            self.state = CaseState.LOOKING
            unseen = self._unseen()
            if unseen:
                return [
                    LookOutside(rank=r.facts.rank, incarnation=r.facts.incarnation) for r in self._unseen()
                ]
        # What is asked of another host, or its answer, may be lost.
        waits = self._unseen() and self._gathered_ns < LOOKS_FACTOR * self.gather_ns
        return [] if waits else self._judge()

    def _gather(self) -> list[HangAction]:
        self.state, self._gathered_ns = CaseState.GATHERING, 0
        for rank in self._ranks.values():
            rank.answered = rank.seen = False
        return [
            AskStanding(rank=rank.facts.rank, incarnation=rank.facts.incarnation)
            for rank in self._ranks.values()
        ]

    def _unseen(self) -> list[_Rank]:
        return [rank for rank in self._ranks.values() if not rank.answered and not rank.seen]

    def _triggers(self) -> set[Trigger]:
        return {trigger for rank in self._ranks.values() for trigger in triggers_of(rank.facts)}

    def _judge(self) -> list[HangAction]:
        self.state = CaseState.QUIET
        triggers = self._triggers()
        actions = self._close(triggers)
        facts = {rank: known.facts for rank, known in self._ranks.items()}
        self._known = triggers
        for finding in find_roots(facts, triggers):
            case = self._reported.get(finding.key)
            if case is not None:
                case.evidence |= finding.evidence
            elif len(self._reported) < REPORTED_MAX:
                actions += self._tell(finding)
        return actions

    def _close(self, triggers: set[Trigger]) -> list[HangAction]:
        """Tell of what is over, and forget it."""
        actions: list[HangAction] = []
        self._known &= triggers
        for key, case in list(self._reported.items()):
            case.evidence &= triggers
            if case.evidence:
                continue
            del self._reported[key]
            notice = HangNotice(
                text=f"over: {case.notice.text}",
                culprits=case.notice.culprits,
                stack=(),
                over=True,
                next_step="it goes on",
            )
            actions.append(ReportHang(notice=notice))
        return actions

    def _tell(self, finding: Finding) -> list[HangAction]:
        next_step, acts = self._consequence(finding)
        notice = HangNotice(
            text=finding.text,
            culprits=finding.culprits,
            stack=finding.stack,
            over=False,
            next_step=next_step,
            doing=finding.doing,
        )
        self._reported[finding.key] = _Reported(notice, set(finding.evidence))
        return [ReportHang(notice=notice), *acts]

    def _consequence(self, finding: Finding) -> tuple[str, list[HangAction]]:
        match self.on_hang:
            case OnHang.REPORT:
                return "nothing is done about it (--on-hang replace or stop would)", []
            case OnHang.STOP:
                return "the run ends", [StopRun(reason=finding.text)]
            case OnHang.REPLACE:
                if not finding.culprits:
                    return "nothing is done about it: there is no one to replace for it", []
                # A ring is broken by the end of one of its members.
                ended = finding.culprits[-1:] if finding.ring else finding.culprits
                acts: list[HangAction] = [
                    Replace(rank=rank, incarnation=incarnation, reason=finding.text)
                    for rank, incarnation in ended
                ]
                names = " and ".join(f"rank {rank}" for rank, _ in ended)
                return f"{names} is ended, as if it had died", acts
            case _:
                assert_never(self.on_hang)
