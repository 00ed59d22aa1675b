"""Judge the evidence: one root cause, what followed from it, and what was found besides. Pure.

The root is what came first among what nothing else explains. In this order: a launch that was refused; a hang
(what it ends is its consequence); a launcher or host that is gone; the deaths since the last view that no
other death explains; what a rank left undone; a request to stop; and of a run that goes on, deaths that it
has survived and ranks that are slow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from zbmd.actors.hangs.wire import RUNS
from zbmd.tools.telemetry.diagnosis import deaths as of_deaths
from zbmd.tools.telemetry.diagnosis.evidence import (
    Death,
    Evidence,
    Hang,
    Launcher,
    Missing,
    Slow,
    users_place,
)
from zbmd.tools.telemetry.diagnosis.findings import Cause, Diagnosis, Finding

_FUTEX: Final = re.compile(r"futex")
_LOST_NODE: Final = re.compile(r"\b([\w.-]+) is lost\b|\bleft: ([\w., -]+)|\bwithout ([\w.-]+)")
_TEMPLATE: Final = re.compile(r"template", re.IGNORECASE)
_ASKED: Final = re.compile(r"^(SIG\w+) received")
FOLLOWED_MAX: Final = 32
OTHERS_MAX: Final = 16

_LINK: Final = re.compile(
    r"the link between [^()]{1,256} \(rank (\d{1,9})\) and [^()]{1,256} \(rank (\d{1,9})\) is "
)

_SLOW: Final = {
    "data": (
        Cause.SLOW_DATA,
        "look at its storage and its loader: prefetch more, cache the data on the host, add workers",
    ),
    "compute": (
        Cause.SLOW_COMPUTE,
        "look for another process on its processors, a limit of its cgroup, heat; --on-straggler rebalance "
        "or replace relieves the run",
    ),
    "link": (Cause.SLOW_LINK, "look at its cable, port and switch: ss -ti, ethtool -S, another port"),
    "runtime": (Cause.SLOW_RUNTIME, "look at what its event loop and garbage collector do: zbmd-node top"),
    "checkpoint": (Cause.SLOW_CHECKPOINT, "write checkpoints less often, or to faster storage"),
}


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis of a run."""
    launcher = evidence.launchers[-1] if evidence.launchers else None
    state = _state(evidence)
    root = _root(evidence, state)
    slow = [_slow(one) for one in _still_slow(evidence.slow)]
    survived = _survived(evidence) if state in ("done", "running") else []
    besides = [*survived, *slow]
    if root is None and besides:
        root = besides.pop(0)
    if root is not None and root.ranks:
        hosts = tuple(evidence.host_of(rank, root.at_ns) for rank in root.ranks)
        root = msgspec.structs.replace(root, hosts=hosts)
    return Diagnosis(
        state=state,
        command="" if launcher is None else launcher.command,
        job="" if launcher is None else launcher.job,
        root=root,
        followed=_followed(evidence, root),
        others=tuple(one for one in besides if one is not root)[:OTHERS_MAX],
        sources=evidence.sources,
    )


def _state(evidence: Evidence) -> str:
    ended = [one for one in evidence.launchers if one.outcome]
    if any(one.alive for one in evidence.launchers):
        return "running"
    if ended:
        return next((one.outcome for one in ended if one.outcome != "stopped"), ended[-1].outcome)
    if evidence.launchers and evidence.launchers[-1].alive is False:
        return "killed"
    return "failed" if evidence.deaths or evidence.hangs else "unknown"


def _root(evidence: Evidence, state: str) -> Finding | None:
    if state == "refused":
        return _refused(evidence.launchers)
    batch = _last_batch(evidence.deaths)
    own = of_deaths.primary(batch)
    hang = _hang_of(evidence, own)
    if hang is not None and state != "done":
        return _hung(hang, evidence)
    if (gone := _launcher_gone(evidence)) is not None:
        return gone
    if state not in ("done", "running") and own:
        return of_deaths.finding_of(own[0], batch)
    if state in ("done", "running"):
        return None
    return _unexplained(evidence, state, batch)


def _unexplained(evidence: Evidence, state: str, batch: Sequence[Death]) -> Finding | None:
    """Return the root of an end that no death explains by itself."""
    if (left := of_deaths.left_early(batch)) is not None:
        return left
    if evidence.missing:
        return _missing(evidence.missing[0])
    if evidence.waits is not None and evidence.waits.first:
        return _waits(evidence)
    if evidence.not_finite is not None:
        found = evidence.not_finite
        return Finding(
            cause=Cause.NOT_FINITE,
            summary=f"{found.metric} was no finite number at step {found.step}",
            step=found.step,
            confidence=0.8,
            evidence=(f"the first such value of metrics.jsonl: {found.metric} of step {found.step}",),
            do=of_deaths.DO[Cause.NOT_FINITE],
            proof=of_deaths.PROOF[Cause.NOT_FINITE],
        )
    ends = [one for one in evidence.launchers if one.outcome == state] or list(evidence.launchers)
    return None if not ends else _by_reason(ends[-1], batch)


def _by_reason(end: Launcher, batch: Sequence[Death]) -> Finding | None:
    evidence = tuple(filter(None, (end.reason, *(of_deaths.describe(one) for one in batch))))
    if (asked := _ASKED.match(end.reason)) is not None:
        return Finding(
            cause=Cause.ASKED,
            summary=f"the launcher was asked to end ({asked[1]})",
            at_ns=end.last_ns,
            confidence=0.9,
            evidence=evidence,
            do="nothing, if that was meant: a scheduler's time limit sends SIGTERM too",
        )
    if _TEMPLATE.search(f"{end.cause} {end.reason}"):
        return Finding(
            cause=Cause.TEMPLATE,
            summary=f"the process that ranks are forked from is gone: {end.reason}",
            at_ns=end.last_ns,
            confidence=0.9,
            evidence=evidence,
            do="start the run again; if nobody killed it, see dmesg for the out-of-memory killer",
        )
    if end.outcome in ("done", ""):
        return None
    cause, sure = of_deaths.refusal(end.cause, end.reason) if end.cause else (Cause.UNKNOWN, 0.2)
    return Finding(
        cause=cause,
        summary=end.reason or "the run ended for an unknown reason",
        at_ns=end.last_ns,
        confidence=sure,
        evidence=evidence,
        do=of_deaths.DO.get(cause, "run it again with --capture DIR and --log-dir DIR, and diagnose that"),
    )


def _refused(launchers: Sequence[Launcher]) -> Finding:
    end = next(one for one in reversed(launchers) if one.outcome == "refused")
    cause, sure = of_deaths.refusal(end.cause, end.reason)
    return Finding(
        cause=cause,
        summary=f"nothing was started: {end.reason}",
        at_ns=end.last_ns,
        confidence=sure,
        evidence=(f"the launcher on {end.host} ended with exit code {end.exit_code}",),
        do=of_deaths.DO.get(cause, "do what the message says"),
    )


# ---- hangs


def _hang_of(evidence: Evidence, own: Sequence[Death]) -> Hang | None:
    """Return the first hang that is not over and explains the end: its rank has not failed by itself."""
    failed = {death.rank: death.at_ns for death in own if not death.expected and death.failure is not None}
    over = {hang.text.removeprefix("over: ") for hang in evidence.hangs if hang.over}
    for hang in evidence.hangs:
        if hang.over or hang.text in over:
            continue
        if any(failed.get(rank, 0) > hang.at_ns for rank in hang.ranks):
            continue
        if own and own[0].at_ns < hang.at_ns and not own[0].expected:
            continue  # a death came first
        return hang
    return None


def _hung(hang: Hang, evidence: Evidence) -> Finding:
    place = users_place(hang.stack)
    cause, sure, what, do = _kind_of_hang(hang)
    ranks = hang.ranks
    named = of_deaths.named(ranks) if ranks else "a rank"
    where = f" at {place}" if place is not None else ""
    facts = [hang.text]
    if hang.process:
        facts.append(f"its process {hang.process if hang.process == RUNS else f'waits in {hang.process}'}")
    if evidence.waits is not None:
        facts += evidence.waits.lines
    return Finding(
        cause=cause,
        summary=f"{named} {what}{where}",
        ranks=ranks,
        place="" if place is None else str(place),
        step=hang.step,
        at_ns=hang.at_ns,
        confidence=sure,
        evidence=tuple(facts),
        do=do,
        proof="" if cause is Cause.STOPPED else "py-spy dump of the rank's process shows the same line twice",
    )


def _kind_of_hang(hang: Hang) -> tuple[Cause, float, str, str]:
    if "is stopped" in hang.text and "SIGSTOP" in hang.text:
        return (
            Cause.STOPPED,
            0.98,
            "is stopped (SIGSTOP)",
            "kill -CONT its process, and find who stopped it: a debugger, Ctrl-Z, a freezer of a cgroup",
        )
    if hang.text.startswith("a deadlock"):
        do = "break the ring: one of these must not wait for the next while it owes an answer"
        return Cause.DEADLOCK, 0.95, "wait for each other", do
    if hang.process == RUNS:
        do = "correct the loop at this line, or declare the work: worker.progress.doing(…) (GUIDE_HANGS)"
        return Cause.BUSY, 0.92, "computes and never comes back to its loop,", do
    if _FUTEX.search(hang.process):
        do = "find who holds the lock: it is never released, or its holder waits for this rank"
        return Cause.LOCK, 0.9, "waits for a lock or another thread,", do
    do = "see what it waits for at this line: a file, a socket, another process, an answer"
    return Cause.WAIT, 0.75 if hang.ranks else 0.5, "waits and makes no progress,", do


def _missing(missing: Missing) -> Finding:
    named = ", ".join(map(str, missing.ranks))
    return Finding(
        cause=Cause.LEFT,
        summary=f"rank {named} never entered {missing.operation}",
        ranks=missing.ranks,
        confidence=0.7,
        evidence=(f"flight recorders: ranks {', '.join(map(str, missing.waiting))} wait in it",),
        do="look at where that rank stood: zbmd flights, py-spy dump; the others only wait for it",
        proof="--progress-deadline 60s names the line",
    )


def _waits(evidence: Evidence) -> Finding:
    waits = evidence.waits
    assert waits is not None
    ranks = tuple(int(name[4:]) for name in waits.first if name.startswith("rank") and name[4:].isdigit())
    return Finding(
        cause=Cause.WAIT,
        summary=f"look first at {', '.join(waits.first)}",
        ranks=ranks,
        confidence=0.7,
        evidence=waits.lines,
        do="zbmd replay DIR --until hang --show has what led there",
    )


# ---- launchers and hosts


def _launcher_gone(evidence: Evidence) -> Finding | None:
    gone = [one for one in evidence.launchers if not one.outcome and one.alive is False]
    if not gone:
        return _node_lost(evidence)
    first = min(gone, key=lambda one: one.last_ns)
    if first.rebooted:
        cause, summary = Cause.HOST, f"host {first.host} was restarted while the run was under way"
        do = "start the same command again: it resumes from its last checkpoint"
    elif first.nodes > 1 or first.job:
        cause, summary = Cause.NODE, f"the node on {first.host} (pid {first.pid}) was killed, with its ranks"
        do = "look at that host; the others go on without it, or start the same command there again"
    else:
        cause, summary = Cause.LAUNCHER, f"the launcher (pid {first.pid} on {first.host}) was killed"
        do = "find who killed it (dmesg, the scheduler), and start the same command again: its state waits"
    return Finding(
        cause=cause,
        summary=summary,
        step=first.step,
        at_ns=first.last_ns,
        confidence=0.9,
        evidence=(
            f"the record of the launcher has no end, and its process {first.pid} is gone",
            *([f"its host has booted since: {first.host}"] if first.rebooted else ()),
        ),
        do=do,
        proof="dmesg and the scheduler's log at that time",
    )


def _node_lost(evidence: Evidence) -> Finding | None:
    if all(one.nodes < 2 and not one.job for one in evidence.launchers) or of_deaths.primary(evidence.deaths):
        return None
    for launcher in evidence.launchers:
        for note in launcher.notes:
            if (found := _LOST_NODE.search(note)) is not None and launcher.outcome in ("failed", ""):
                name = next(filter(None, found.groups()))
                return Finding(
                    cause=Cause.NODE,
                    summary=f"node {name} was lost",
                    at_ns=launcher.last_ns,
                    confidence=0.85,
                    evidence=(note,),
                    do="look at that host and its network; its own record of the launch says whether it died",
                    proof=f"zbmd diagnose on {name}",
                )
    return None


# ---- runs that go on


def _last_batch(deaths: Sequence[Death]) -> list[Death]:
    with_any = [death.batch for death in deaths if not (death.normal and not death.expected)]
    last = max(with_any, default=-1)
    return [death for death in deaths if death.batch == last or (death.normal and death.batch <= last)]


def _survived(evidence: Evidence) -> list[Finding]:
    """Return the causes of deaths that the run has survived, the first first."""
    found: list[Finding] = []
    for number in sorted({death.batch for death in evidence.deaths}):
        batch = [death for death in evidence.deaths if death.batch == number]
        own = of_deaths.primary(batch)
        if own and not own[0].expected:
            found.append(of_deaths.finding_of(own[0], batch))
    return found[:OTHERS_MAX]


def _still_slow(slow: Sequence[Slow]) -> list[Slow]:
    """Return the latest report of each rank and cause: those that were never over first."""
    latest: dict[tuple[int, str, tuple[int, ...]], Slow] = {}
    over: set[tuple[int, str, tuple[int, ...]]] = set()
    for one in slow:
        key = (one.rank, one.cause, _ends(one))
        if one.over:
            over.add(key)
        else:
            latest.setdefault(key, one)
            over.discard(key)
    return [latest[key] for key in sorted(latest, key=lambda key: (key in over, latest[key].at_ns))]


def _ends(one: Slow) -> tuple[int, ...]:
    """Return the ranks at the ends of a link that is slow by itself, as its report says; none of a rank."""
    found = _LINK.match(one.text)
    return () if found is None else (int(found[1]), int(found[2]))


def _slow(one: Slow) -> Finding:
    default = (Cause.SLOW_COMPUTE, "look at the rank's host")
    cause, do = _SLOW.get(one.cause, default)
    if ends := _ends(one):
        do = (
            "look at what lies between these two hosts alone: ping, mtr, the switches' ports; others are well"
        )
    return Finding(
        cause=cause,
        summary=one.text or f"rank {one.rank} is slow (cause {one.cause})",
        ranks=ends or (one.rank,),
        step=one.step,
        at_ns=one.at_ns,
        confidence=0.9,
        evidence=(f"all ranks agreed on it after step {one.step} (training/job/stragglers)",),
        do=do,
        proof="ping between both" if ends else "zbmd profile RUN: the rank's time beside the others'",
    )


def _followed(evidence: Evidence, root: Finding | None) -> tuple[str, ...]:
    if root is None or not evidence.launchers:
        return ()
    lines: list[tuple[int, str]] = []
    for hang in evidence.hangs:
        if hang.text not in root.evidence:
            lines.append((hang.at_ns, f"{'over: ' if hang.over else 'no progress: '}{hang.text}"))
    for death in evidence.deaths:
        is_root = death.rank in root.ranks and death.at_ns == root.at_ns
        if not is_root and not death.normal:
            lines.append((death.at_ns, of_deaths.describe(death)))
    told = [text for _, text in sorted(lines)][:FOLLOWED_MAX]
    end = evidence.launchers[-1]
    if end.outcome and end.outcome != "refused":
        told.append(f"the run {'was ' * (end.outcome == 'stopped')}{end.outcome}, exit code {end.exit_code}")
    return tuple(told)
