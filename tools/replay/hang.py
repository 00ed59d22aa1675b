"""Analyse a hang: which rank waits at the end of the log, for whom, for what and since when.

Each machine is played to the end of the log, and then asked what it waits for. Asks without an answer are
read off the links' frames. A process that others wait for and that waits for none is where to look first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zbmd.actors.cluster.jobs.node_machine import LocalJobs, ProcessState
from zbmd.actors.rank.host_contracts import NODE_NAME
from zbmd.actors.supervision.machine import ChildState, SupervisionMachine
from zbmd.actors.view import rank_name
from zbmd.collectives.group.operation_log import OperationLog
from zbmd.tools.replay.players import OpenAsk, Played, ProcessAtEnd, play_to_end
from zbmd.tools.replay.story import clock_time
from zbmd.training.redundancy.machine import Mirror, State
from zbmd.training.redundancy.resizing import ResizingMirror
from zbmd.transport.capture import ClockSkew, ProcessLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A process waits: for `what` of the processes `whom`, since `since_ns`, ns since 1970.

    Without `whom` it waits for nobody: it was at work, or about to be. hint: what the logs say beyond that.
    lost: the logs say that what is waited for was sent, or asked for, and is gone.
    """

    process: str
    stream: str
    what: str
    whom: tuple[str, ...]
    since_ns: int
    hint: str = ""
    lost: bool = False

    def __str__(self) -> str:
        whom = f" of {', '.join(self.whom)}" if self.whom else ""
        return f"{self.what}{whom}{f'; {self.hint}' if self.hint else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A process that is waited for and waits for nobody: when it was heard last, and what that was."""

    process: str
    last_ns: int
    last: str


@dataclass(slots=True, kw_only=True)
class Hang:
    """Analysis of a hang. moved_ns: when each process last made progress; step: its last one."""

    waits: list[Wait]
    roots: list[Wait]
    """Processes to look at first, besides idle ones."""
    idle: list[Idle]
    since_ns: int
    moved_ns: dict[str, int] = field(default_factory=dict[str, int])
    steps: dict[str, int] = field(default_factory=dict[str, int])

    def lines(self) -> list[str]:
        """The findings in words."""
        if not self.waits:
            return ["no hang: at the end of the log nobody waits for anybody"]
        told = [f"up to {clock_time(self.since_ns)} everyone involved made progress{self._at_step()}"]
        for wait in self.waits:
            verb = "waits for" if wait.whom else "is at"
            told.append(f"  {wait.process:8} since {clock_time(wait.since_ns)} {verb} {wait}")
        for idle in self.idle:
            said = f"since {clock_time(idle.last_ns)} says nothing; last: {idle.last}"
            told.append(f"  {idle.process:8} {said if idle.last else 'has written nothing at all'}")
        for root in self.roots:
            told.append(f"look first at {', '.join(root.whom) or root.process}: {root.process} {_asks(root)}")
        if not self.roots:
            for idle in self.idle:
                told.append(
                    f"look first at {idle.process}: it is waited for and says nothing: it is stopped "
                    "(kill -CONT), starved, or stuck where no event is taken (py-spy dump)"
                )
        return told

    def _at_step(self) -> str:
        if not self.steps:
            return ""
        low, high = min(self.steps.values()), max(self.steps.values())
        return f"; they stand at step {low}" if low == high else f"; they stand at steps {low} to {high}"


def _asks(root: Wait) -> str:
    return f"waits for {root}" if root.whom else f"is at {root}"


def find_hang(
    logs: Sequence[ProcessLog], offsets: Mapping[str, ClockSkew], secrets: Mapping[str, bytes]
) -> tuple[Hang, int]:
    """The hang at the end of these logs, and the time up to which they were played, ns since 1970.

    Records after the host was asked to stop are no part of it: ending a job moves everything once more.
    """
    latest: dict[str, ProcessLog] = {}
    for log in logs:
        known = latest.get(log.origin.process)
        if known is None or log.origin.incarnation > known.origin.incarnation:
            latest[log.origin.process] = log
    until_ns = _asked_to_stop_ns(latest.get(NODE_NAME), offsets)
    ends = [
        play_to_end(log, offset_ns=_offset_ns(offsets, log), until_ns=until_ns, secrets=secrets)
        for log in latest.values()
    ]
    by_name = {end.process: end for end in ends}
    now_ns = until_ns or max((end.last_ns for end in ends), default=0)
    waits = [wait for end in ends for wait in _waits_of(end, by_name, now_ns)]
    return _judge(waits, by_name), now_ns


def _offset_ns(offsets: Mapping[str, ClockSkew], log: ProcessLog) -> int:
    skew = offsets.get(log.name)
    return 0 if skew is None else skew.offset_ns


def _asked_to_stop_ns(node: ProcessLog | None, offsets: Mapping[str, ClockSkew]) -> int | None:
    if node is None:
        return None
    host = play_to_end(node, offset_ns=_offset_ns(offsets, node), until_ns=None, secrets={})
    return next((p.stopped_ns for p in host.machines if p.stopped_ns is not None), None)


def _judge(waits: list[Wait], ends: Mapping[str, ProcessAtEnd]) -> Hang:
    waiting = {wait.process for wait in waits if wait.whom}
    blamed = {whom for wait in waits for whom in wait.whom}
    idle = [
        Idle(process=name, last_ns=ends[name].last_ns, last=ends[name].last)
        for name in sorted(blamed - {wait.process for wait in waits})
        if name in ends
    ]
    # What is lost explains all; else who is at work; else, in a circle of waiting, where it began.
    roots = [wait for wait in waits if wait.lost]
    roots = roots or [wait for wait in waits if not wait.whom and wait.process in blamed]
    if not roots and not idle:
        roots = sorted(waits, key=lambda wait: wait.since_ns)[:1]
    involved = [ends[name] for name in sorted(waiting | blamed) if name in ends]
    moved = {end.process: end.moved_ns for end in involved if end.moved_ns}
    shown = [wait for wait in waits if wait.whom or wait.process in blamed]
    return Hang(
        waits=sorted(shown, key=lambda wait: wait.since_ns),
        roots=roots,
        idle=idle,
        since_ns=min(moved.values(), default=0),
        moved_ns=moved,
        steps={end.process: end.step for end in involved if end.step is not None},
    )


# ---- what each kind of machine waits for


def _waits_of(end: ProcessAtEnd, ends: Mapping[str, ProcessAtEnd], now_ns: int) -> list[Wait]:
    waits: list[Wait] = []
    for played in end.machines:
        if played.ended:
            continue
        match played.machine:
            case Mirror():
                waits += _mirror_waits(end, played, played.machine)
            case ResizingMirror():
                waits += _mirror_waits(end, played, played.machine.mirror)
            case OperationLog():
                waits += _operation_waits(end, played, played.machine, ends)
            case LocalJobs():
                waits += _jobs_waits(end, played, played.machine)
            case SupervisionMachine():
                waits += _supervision_waits(end, played, played.machine)
            case _:
                pass
    for (peer, call), ask in end.asks.items():
        if ask.deadline_ns <= now_ns:
            continue
        hint, lost = _answer(end, peer, call, ask, ends.get(peer))
        waits.append(
            Wait(
                process=end.process,
                stream=f"link {peer}",
                what=f"the answer to {ask.text}",
                whom=(peer,),
                since_ns=ask.at_ns,
                hint=hint,
                lost=lost,
            )
        )
    return waits


def _answer(
    end: ProcessAtEnd, peer: str, call: int, ask: OpenAsk, other: ProcessAtEnd | None
) -> tuple[str, bool]:
    """Return what the log of the asked process says, and whether that explains the missing answer."""
    if other is None:
        return f"{peer} has no log", False
    came_ns = other.owed.get((end.process, call))
    if came_ns is not None:
        return f"it came to {peer}/{ask.to} at {clock_time(came_ns)}, and is not answered", True
    if other.last_ns <= ask.at_ns:
        return f"{peer}'s log ends before it", False
    return f"by {peer}'s log it has not come there, or its answer was lost", True


def _mirror_waits(end: ProcessAtEnd, played: Played, machine: Mirror) -> list[Wait]:
    if machine.state is not State.WAITING or not played.taken:
        return []
    return [
        Wait(
            process=end.process,
            stream=played.name,
            what="the next view",
            whom=(NODE_NAME,),
            since_ns=played.changed_ns,
        )
    ]


def _operation_waits(
    end: ProcessAtEnd, played: Played, machine: OperationLog, ends: Mapping[str, ProcessAtEnd]
) -> list[Wait]:
    running = machine.running
    if running is None:
        return []
    what = (
        f"{running.operation} #{running.sequence} ({running.nbytes} bytes, {running.algorithm}) "
        f"of group {played.name}"
    )
    others = [f"rank{rank}" for rank in machine.members if f"rank{rank}" != end.process]
    known = {name: _operations_of(ends.get(name), played.name) for name in others}
    absent = [n for n, other in known.items() if other is None or other.begun < running.sequence]
    at_work = [n for n, other in known.items() if other is None or other.done < running.sequence]
    if absent:
        whom, hint = absent, f"not begun there, by {'its log' if len(absent) == 1 else 'their logs'}"
    elif at_work:
        whom, hint = at_work, "begun by all"
    else:
        whom, hint = [], "all others have ended it"
    return [
        Wait(
            process=end.process,
            stream=played.name,
            what=what,
            whom=tuple(whom),
            since_ns=played.changed_ns,
            hint=hint,
        )
    ]


def _operations_of(end: ProcessAtEnd | None, group: str) -> Played | None:
    if end is None:
        return None
    return next((p for p in end.machines if p.name == group and isinstance(p.machine, OperationLog)), None)


def _jobs_waits(end: ProcessAtEnd, played: Played, machine: LocalJobs) -> list[Wait]:
    waits: list[Wait] = []
    for local in machine.jobs.values():
        members = {(member.rank, member.incarnation) for member in local.view.members}
        for (rank, incarnation), process in sorted(local.processes.items()):
            if process.told or process.condemned:
                continue
            if process.state is not ProcessState.JOINED:
                what = f"incarnation {incarnation} to join"
            elif (rank, incarnation) in members and process.linked < local.view.epoch:
                what = f"the word that it is linked for the view of epoch {local.view.epoch}"
            else:
                continue
            waits.append(
                Wait(
                    process=end.process,
                    stream=played.name,
                    what=what,
                    whom=(rank_name(rank),),
                    since_ns=played.changed_ns,
                )
            )
    return waits


_BUSY = frozenset({ChildState.STARTING, ChildState.STOPPING, ChildState.KILLING})


def _supervision_waits(end: ProcessAtEnd, played: Played, machine: SupervisionMachine) -> list[Wait]:
    return [
        Wait(
            process=end.process,
            stream=played.name,
            what=f"its child {child}, which is {state.value}",
            whom=(),
            since_ns=played.changed_ns,
            hint=f"{child} is {state.value} since then",
        )
        for child, state in machine.states.items()
        if state in _BUSY
    ]
