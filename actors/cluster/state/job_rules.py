"""Derives the job table from a change of view (sans-I/O): pure functions, the same on every node.

    - A rank that runs stays where it runs. A slot whose node is gone goes to a node that has no slot of this
    job: the one with the fewest slots of all jobs, then the lowest id; without one it stays vacant until a
    node joins.
    - With fewer nodes than `nodes_min` the job waits: none of its ranks runs. It starts again, with the next
      incarnation of each rank, once there are enough nodes.
    - A rank that fails follows `on_loss`, as on one host: REPLACE restarts it on the same node, SHRINK goes
    on without it for good, STOP ends the job. Under SHRINK the ranks of a lost node are lost too, unless too
    few nodes are left for the job. More than `max_restarts` restarts within the window end the job, and so
    does a failure that repeats, as below. The loss of a node is not a failure of its ranks and costs no
    restart.
    - With `preflight` a node that holds no slot gets one only while its check holds (`HostsChecked`): it was
    measured since the job's ranks were last stopped together, not too long ago, and was found fit. A rank
    that is restarted where it ran needs no check, so its recovery takes no longer.
    - A job's view changes once no rank of it is starting, so that failures that come together cost one view.

Commands are applied one after the other, and the table is put in order after each: how commands are batched
into changes makes no difference except to the epochs.

A rank that fails reports a **cause**: the kind, place and shape of its error, or that the kernel ended it for
want of memory. A cause that comes again, without progress in between, comes a third time: the job ends after
the second. Progress is a step that no rank had committed before (`Progressed`), or, in jobs that report no
steps, a view that lasted for a restart window.

    - An error counts whichever rank has it: what one rank raises in this round, another may in the next.
    - Until all ranks are together again only the first error counts, and none after a rank was killed: the
    others may follow from that. Ranks report no cause for errors that say so themselves (`process.exit`).
    - Memory counts for one rank: the kernel's choice among several says nothing about the rank it chose.
"""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import assert_never

from zbmd.actors.cluster.state.job_table import (
    GRACE_OVER,
    JOBS_MAX,
    MEMORY_ADVICE,
    MEMORY_CAUSE,
    REFUSALS_KEPT,
    STILL_RUNNING,
    TABLE_BYTES_MAX,
    TABLE_RANKS_MAX,
    Command,
    CommandRefusal,
    HostCheck,
    HostsChecked,
    Job,
    JobPhase,
    JobTable,
    Origin,
    Progressed,
    RankCause,
    RankDown,
    RankEntry,
    RankUp,
    Relink,
    SlotState,
    Stop,
    Submit,
    order_bytes,
    problem_of,
)
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.process.exit import CAUSE_MARK, USAGE_EXIT_CODE, describe_exit
from zbmd.actors.view import OnLoss, Outcome, rank_name
from zbmd.transport.clock.deadlines import SECOND_NS


def noted(job: Job, entry: RankEntry, order: RankDown, age_ns: int) -> tuple[Job, str]:
    """Return the job with the cause of a failure noted, and why it ends by that; empty if it does not."""
    cause = entry.failing
    follows = entry.state is SlotState.UP and job.origin and cause != MEMORY_CAUSE
    if cause or order.code is None or order.code < 0:
        job = dataclasses.replace(job, origin=True)
    if not cause or follows:
        return job, ""
    if _lasted(job, entry, age_ns):
        job = without_causes(job)
    before = {e.cause for e in job.ranks if e.cause and (e.rank == entry.rank or cause != MEMORY_CAUSE)}
    if cause in before:
        return job, _why(entry, order.reason)
    ranks = [dataclasses.replace(e, cause=cause) if e.rank == entry.rank else e for e in job.ranks]
    return dataclasses.replace(job, ranks=tuple(ranks)), ""


def noted_late(job: Job, entry: RankEntry, cause: str) -> tuple[Job, str]:
    """Return as `noted` for a failure that was reported before its cause. entry: of the replacement."""
    failed_ns = job.restarts_ns[-1] if job.restarts_ns else 0
    if failed_ns - job.together_ns >= job.spec.restart_window_ns:
        job = without_causes(job)
    late = dataclasses.replace(entry, failing=cause)
    if cause in {e.cause for e in job.ranks}:
        return job, _why(late, "its end was proven before its exit code was known")
    ranks = [dataclasses.replace(e, cause=cause) if e.rank == entry.rank else e for e in job.ranks]
    return dataclasses.replace(job, ranks=tuple(ranks)), ""


def without_causes(job: Job) -> Job:
    """Return the job after progress: what failed before may fail again."""
    return dataclasses.replace(job, ranks=tuple(dataclasses.replace(e, cause="") for e in job.ranks))


def _lasted(job: Job, entry: RankEntry, age_ns: int) -> bool:
    """Whether the ranks were together, with this one, for a restart window."""
    began_ns = max(job.together_ns, entry.up_ns)
    return entry.state is SlotState.UP and age_ns - began_ns >= job.spec.restart_window_ns


def _why(entry: RankEntry, reason: str) -> str:
    child, cause = rank_name(entry.rank), entry.failing
    if cause == MEMORY_CAUSE:
        return f"{child} was lost twice, with no progress in between: {reason}. {MEMORY_ADVICE}"
    what = cause.partition(CAUSE_MARK)[0]
    return f"{child} failed again as a rank did before, with no progress in between: {what} ({reason})"


def after_change(
    table: JobTable,
    *,
    epoch: int,
    members: Sequence[NodeKey],
    removed: Collection[NodeKey] = (),
    commands: Iterable[Command] = (),
    elapsed_ns: int = 0,
) -> JobTable:
    """The table of the view of `epoch`, whose members are `members`, by id.

    removed: who was a member of the view before; commands: in the order that was agreed on; elapsed_ns: how
    long the view before has lasted.
    """
    origins = table.origins
    if removed:
        origins = tuple(origin for origin in origins if origin.node not in removed)
    table = JobTable(jobs=table.jobs, origins=origins, age_ns=table.age_ns + elapsed_ns)
    if table.jobs:
        table = _with_jobs(
            table, [_without_checks_of(_without_nodes(job, removed), removed) for job in table.jobs]
        )
        table = _in_order(table, members)
    present = frozenset(members) if commands else frozenset[NodeKey]()
    for command in commands:
        if command.origin in present and command.number == table.applied(command.origin) + 1:
            table = _in_order(_apply(table, command, present), members)
    return _with_jobs(table, [_settled(job, epoch) for job in table.jobs])


def _with_jobs(table: JobTable, jobs: Iterable[Job]) -> JobTable:
    return dataclasses.replace(table, jobs=tuple(jobs))


def _with_job(table: JobTable, changed: Job) -> JobTable:
    return _with_jobs(table, [changed if job.id == changed.id else job for job in table.jobs])


# --- nodes that go --------------------------------------------------------------------------------------


def _without_nodes(job: Job, removed: Collection[NodeKey]) -> Job:
    """Return the job without these nodes and the ranks that they ran."""
    if not any(entry.lives and entry.node in removed for entry in job.ranks):
        return job
    gone = SlotState.VACANT
    if job.phase is JobPhase.STOPPING or (job.spec.on_loss is OnLoss.SHRINK and _goes_on(job, removed)):
        gone = SlotState.LOST
    lost = [entry for entry in job.ranks if entry.lives and entry.node in removed]
    job = _with_ranks(job, [_ended(entry, gone) if entry in lost else entry for entry in job.ranks])
    if job.phase is not JobPhase.RUNNING or job.spec.on_loss is OnLoss.REPLACE:
        return job
    nodes = ", ".join(sorted({str(entry.node) for entry in lost}))
    reason = f"{nodes} went, and with it {', '.join(rank_name(entry.rank) for entry in lost)}"
    if job.spec.on_loss is OnLoss.STOP:
        return _failed(job, f"{reason}; on-loss is stop", hosts_fault=True)
    return dataclasses.replace(job, reason=reason)


def _without_checks_of(job: Job, removed: Collection[NodeKey]) -> Job:
    if not any(check.node in removed for check in job.checks):
        return job
    return dataclasses.replace(job, checks=tuple(one for one in job.checks if one.node not in removed))


def _goes_on(job: Job, removed: Collection[NodeKey]) -> bool:
    """Whether enough nodes are left for a job under SHRINK; else it waits for others in their place."""
    slots = [job.slot(number) for number in range(job.spec.nodes_max)]
    left = sum(any(entry.lives and entry.node not in removed for entry in slot) for slot in slots)
    return left >= job.spec.nodes_min or any(entry.state is SlotState.FINISHED for entry in job.ranks)


def _ended(entry: RankEntry, state: SlotState) -> RankEntry:
    node = None if state is SlotState.VACANT else entry.node
    return dataclasses.replace(entry, state=state, node=node, address="", host="", tcp_address="", failing="")


def _with_ranks(job: Job, ranks: Iterable[RankEntry], *, unsettled: bool = True) -> Job:
    return dataclasses.replace(job, ranks=tuple(ranks), unsettled=unsettled)


def _with_rank(job: Job, changed: RankEntry, *, unsettled: bool = True) -> Job:
    ranks = [changed if entry.rank == changed.rank else entry for entry in job.ranks]
    return _with_ranks(job, ranks, unsettled=unsettled)


# --- placement ------------------------------------------------------------------------------------------


def _in_order(table: JobTable, members: Sequence[NodeKey]) -> JobTable:
    """Assign vacant slots, make jobs wait or continue, and end jobs with nothing left to run."""
    for job in table.jobs:
        if job.phase in (JobPhase.WAITING, JobPhase.RUNNING):
            placed = _judged(_placed(job, table, members))
        else:
            placed = job
        if placed.phase is JobPhase.STOPPING and not any(entry.lives for entry in placed.ranks):
            placed = dataclasses.replace(placed, phase=JobPhase.ENDED)
        if placed is not job:
            table = _with_job(table, placed)
    return table


def _placed(job: Job, table: JobTable, members: Sequence[NodeKey]) -> Job:
    slots = range(job.spec.nodes_max)
    finished = any(entry.state is SlotState.FINISHED for entry in job.ranks)
    wanted = [number for number in slots if _wants_node(job.slot(number), finished=finished)]
    taken = [number for number in slots if _counts(job.slot(number), wants_node=number in wanted)]
    if job.phase is JobPhase.RUNNING and not wanted and not taken:
        return job  # every rank is lost for good: `_judged` ends it
    may = members
    if job.preflight and wanted:
        fit = job.fit(table.age_ns)
        may = [node for node in members if node in fit]
    free = _free_nodes(job, table, may, len(wanted)) if wanted else []
    here, needed = len(taken) + len(free), job.spec.nodes_min
    shrinks = job.spec.on_loss is OnLoss.SHRINK
    if here < needed and not (shrinks and finished):
        if len(taken) + len(wanted) < needed:
            return _failed(job, f"{needed} nodes are needed; all but {here} slots are lost for good")
        return _waiting(job, _missing(job, members, here))
    for number, node in zip(wanted, free, strict=False):
        job = _start_in_slot(job, number, node)
    if job.phase is JobPhase.WAITING:
        job = dataclasses.replace(job, phase=JobPhase.RUNNING, reason=f"{here} nodes are here")
    return job


def _missing(job: Job, members: Sequence[NodeKey], here: int) -> str:
    """Return why a job waits that has `here` nodes for its slots."""
    needed = job.spec.nodes_min
    if not job.preflight:
        return f"{needed} nodes are needed, {here} are here"
    bad = sum(bool(check.problem) for check in job.checks)
    if len(members) - bad < needed:
        quarantined = f", and {bad} {'is' if bad == 1 else 'are'} quarantined" if bad else ""
        return f"{needed} nodes are needed, {len(members) - bad} are here{quarantined}"
    return f"{needed} nodes are needed; those that are here are being checked (--preflight)"


def _wants_node(slot: tuple[RankEntry, ...], *, finished: bool) -> bool:
    """Whether a slot needs a node. Once ranks have finished, ranks that never ran are not started."""
    return any(e.state is SlotState.VACANT and (e.incarnation or not finished) for e in slot)


def _counts(slot: tuple[RankEntry, ...], *, wants_node: bool) -> bool:
    """Whether a slot counts as one of the job's nodes: it runs, or has finished.

    A slot of which some ranks have finished and others need a node counts once it has that node. Counted
    twice, the job would start with too few nodes, stop at the next change, and start again, for ever.
    """
    if any(e.lives for e in slot):
        return True
    return not wants_node and any(e.state is SlotState.FINISHED for e in slot)


def _free_nodes(job: Job, table: JobTable, members: Sequence[NodeKey], count: int) -> list[NodeKey]:
    """Return up to `count` of `members` for slots of this job, the best first."""
    load: Counter[NodeKey] = Counter()
    for other in table.jobs:
        load.update(other.nodes())
    idle = list(islice((node for node in members if node not in load), count))
    if len(idle) == count:
        return idle
    may = frozenset(members) - job.nodes()
    busy = sorted((load[node], node) for node in load if node in may)
    return (idle + [node for _, node in busy])[:count]


def _start_in_slot(job: Job, number: int, node: NodeKey) -> Job:
    """Start the vacant ranks of a slot on a node."""
    slot = job.slot(number)
    started = {e.rank: _started(e, node) for e in slot if e.state is SlotState.VACANT}
    return _with_ranks(job, [started.get(entry.rank, entry) for entry in job.ranks], unsettled=job.unsettled)


def _started(entry: RankEntry, node: NodeKey) -> RankEntry:
    return RankEntry(
        rank=entry.rank,
        node=node,
        incarnation=entry.incarnation + 1,
        state=SlotState.STARTING,
        cause=entry.cause,
    )


def _waiting(job: Job, reason: str) -> Job:
    """Stop all ranks until there are enough nodes."""
    if job.phase is JobPhase.WAITING and job.reason == reason:
        return job
    ranks = [_ended(entry, SlotState.VACANT) if entry.lives else entry for entry in job.ranks]
    changed = job.unsettled or any(entry.lives for entry in job.ranks)
    if job.phase is JobPhase.RUNNING:  # a host may have become slow since it was found fit
        checks = tuple(check for check in job.checks if check.problem)
        job = dataclasses.replace(job, checks=checks, stops=job.stops + 1)
    return dataclasses.replace(
        _with_ranks(job, ranks, unsettled=changed), phase=JobPhase.WAITING, reason=reason
    )


# --- ends -----------------------------------------------------------------------------------------------


def _judged(job: Job) -> Job:
    """Return the job as ended if nothing of it runs or will run."""
    if job.phase is not JobPhase.RUNNING or any(entry.lives for entry in job.ranks):
        return job
    missing = [entry for entry in job.ranks if entry.state is not SlotState.FINISHED and entry.incarnation]
    names = ", ".join(rank_name(entry.rank) for entry in missing)
    if not any(entry.state is SlotState.FINISHED for entry in job.ranks):
        return _over(job, Outcome.FAILED, f"every rank was lost; the last reason: {job.reason}")
    return _over(job, Outcome.SUCCEEDED, f"finished without {names}" if names else "every rank finished")


def _over(job: Job, outcome: Outcome, reason: str) -> Job:
    return dataclasses.replace(job, phase=JobPhase.ENDED, outcome=outcome, reason=reason)


def _failed(job: Job, reason: str, *, hosts_fault: bool = False) -> Job:
    if hosts_fault and job.phase is not JobPhase.STOPPING:
        job = dataclasses.replace(job, hosts_fault=True)
    return _stopping(job, Outcome.FAILED, reason, kill=False)


def _stopping(job: Job, outcome: Outcome, reason: str, *, kill: bool) -> Job:
    """End the job's ranks; the job is over once they have ended. The first reason is kept."""
    if job.phase is JobPhase.STOPPING:
        return dataclasses.replace(job, kill=job.kill or kill)
    return dataclasses.replace(job, phase=JobPhase.STOPPING, outcome=outcome, reason=reason, kill=kill)


# --- commands -------------------------------------------------------------------------------------------


def _apply(table: JobTable, command: Command, members: Collection[NodeKey]) -> JobTable:
    origin, order = command.origin, command.order
    refused = problem_of(order)
    if not refused:
        match order:
            case Submit():
                table, refused = _submit(table, origin, order)
            case Stop():
                table, refused = _stop(table, order)
            case RankUp() | RankDown() | RankCause():
                table = _with_news(table, origin, order)
            case Relink(job=job_id, epoch=epoch):
                job = table.job(job_id)
                # A view that is due for another reason, or has come meanwhile, gives new links as well.
                if job is not None and job.epoch == epoch and origin in job.nodes():
                    table = _with_job(table, dataclasses.replace(job, unsettled=True))
            case Progressed(job=job_id):
                job = table.job(job_id)
                if job is not None and origin in job.nodes():
                    table = _with_job(table, without_causes(job))
            case HostsChecked(job=job_id, stops=stops):
                job = table.job(job_id)
                if job is not None and job.preflight and job.stops == stops:
                    table = _with_job(table, _checked(job, order, members, table.age_ns))
            case _:
                assert_never(order)
    return _noted(table, command, refused)


def _checked(job: Job, order: HostsChecked, members: Collection[NodeKey], age_ns: int) -> Job:
    """Return the job with checks of hosts. One that runs ranks keeps them: it was fit when it got them."""
    runs = job.nodes()
    found = {check.node: check for check in job.checks}
    for node, problem in order.hosts:
        if node in members and node not in runs:
            found[node] = HostCheck(node=node, at_ns=age_ns, problem=problem)
    return dataclasses.replace(job, checks=tuple(found[node] for node in sorted(found)))


def _with_news(table: JobTable, origin: NodeKey, order: RankUp | RankDown | RankCause) -> JobTable:
    """Return the table with news of a rank. What comes late, about one that has moved on, changes nothing."""
    job = table.job(order.job)
    entry = _entry_of(job, order, origin)
    if job is None or entry is None:
        return table
    match order:
        case RankUp():
            job = _up(job, entry, order, table.age_ns)
        case RankDown():
            job = _down(job, entry, order, table.age_ns)
        case RankCause(cause=cause) if entry.incarnation == order.incarnation:
            failing = dataclasses.replace(entry, failing=cause)
            job = _with_rank(job, failing, unsettled=job.unsettled)
        case RankCause(cause=cause):
            job, why = noted_late(job, entry, cause)
            job = _failed(job, why) if why else job
    return _with_job(table, job)


def _noted(table: JobTable, command: Command, refused: str) -> JobTable:
    """Return the table with the command recorded as processed."""
    before = next((o for o in table.origins if o.node == command.origin), None)
    kept = before.refused if before is not None else ()
    if refused:
        kept = (*kept, CommandRefusal(number=command.number, reason=refused))[-REFUSALS_KEPT:]
    others = [origin for origin in table.origins if origin.node != command.origin]
    now = Origin(node=command.origin, number=command.number, refused=kept)
    return dataclasses.replace(table, origins=tuple(sorted([*others, now], key=lambda o: o.node)))


def _submit(table: JobTable, origin: NodeKey, order: Submit) -> tuple[JobTable, str]:
    spec = order.spec
    if table.job(spec.job) is not None:
        return table, f"there is a job {spec.job:x} already"
    kept = list(table.jobs)
    over = [job for job in kept if job.phase is JobPhase.ENDED]
    nbytes = order_bytes(order) + sum(order_bytes(Submit(spec=job.spec)) for job in kept)
    ranks_total = spec.world_size + sum(job.spec.world_size for job in kept)
    while len(kept) >= JOBS_MAX or nbytes > TABLE_BYTES_MAX or ranks_total > TABLE_RANKS_MAX:
        if not over:
            return table, (
                f"the cluster has {len(kept)} jobs, and with this one their orders take {nbytes} bytes, and "
                f"they have {ranks_total} ranks: {JOBS_MAX}, {TABLE_BYTES_MAX} and {TABLE_RANKS_MAX} are the "
                "bounds. Stop one first"
            )
        forgotten = over.pop(0)
        kept.remove(forgotten)
        nbytes -= order_bytes(Submit(spec=forgotten.spec))
        ranks_total -= forgotten.spec.world_size
    ranks = tuple(RankEntry(rank=rank) for rank in range(spec.world_size))
    job = Job(spec=spec, submitter=origin, ranks=ranks, preflight=order.preflight)
    return _with_jobs(table, [*kept, job]), ""


def _stop(table: JobTable, order: Stop) -> tuple[JobTable, str]:
    job = table.job(order.job)
    if job is None:
        return table, f"there is no job {order.job:x}"
    if job.phase is JobPhase.ENDED:
        return table, f"job {order.job:x} has ended: {job.reason}"
    outcome = Outcome.FAILED if order.failed else Outcome.STOPPED
    return _with_job(table, _stopping(job, outcome, order.reason, kill=order.kill)), ""


def _entry_of(job: Job | None, order: RankUp | RankDown | RankCause, origin: NodeKey) -> RankEntry | None:
    """Return the rank that the order is about, if `origin` runs that incarnation now.

    A cause may come when the replacement is being started.
    """
    if job is None or not 0 <= order.rank < len(job.ranks):
        return None
    entry = job.ranks[order.rank]
    late = isinstance(order, RankCause) and job.phase is JobPhase.RUNNING
    meant = (order.incarnation, order.incarnation + 1) if late else (order.incarnation,)
    current = entry.lives and entry.node == origin and entry.incarnation in meant
    return entry if current else None


def _up(job: Job, entry: RankEntry, order: RankUp, age_ns: int) -> Job:
    if entry.state is not SlotState.STARTING:
        return job
    up = dataclasses.replace(
        entry,
        state=SlotState.UP,
        address=order.address,
        host=order.host,
        tcp_address=order.tcp_address,
        up_ns=age_ns,
    )
    job = _with_rank(job, up)
    if any(entry.state is SlotState.STARTING for entry in job.ranks):
        return job
    return dataclasses.replace(job, together_ns=age_ns, origin=False)


def _down(job: Job, entry: RankEntry, order: RankDown, age_ns: int) -> Job:
    child, spec = rank_name(entry.rank), job.spec
    if order.code == 0:
        return _with_rank(job, _ended(entry, SlotState.FINISHED))
    lost = _with_rank(job, _ended(entry, SlotState.LOST))
    if job.phase is not JobPhase.RUNNING:
        return _naming(lost, child, order.reason) if order.reason in (GRACE_OVER, STILL_RUNNING) else lost
    if order.code == USAGE_EXIT_CODE:
        why = f"{child} failed with a usage error: {order.reason}"
        return dataclasses.replace(_failed(lost, why), users_own=True)
    if (order.code or 0) > 0 and entry.incarnation == 1 and entry.state is SlotState.STARTING:
        return _failed(lost, f"{child} failed before it joined: {order.reason}")
    # A script that is wrong raises, or is ended by another signal; a host that ends a rank itself says why.
    killed = order.code == -signal.SIGKILL and order.reason == describe_exit(order.code)
    if spec.on_loss is OnLoss.STOP:
        return _failed(lost, f"{child} failed: {order.reason}; on-loss is stop", hosts_fault=killed)
    if spec.on_loss is OnLoss.SHRINK:
        return dataclasses.replace(lost, reason=f"{child}: {order.reason}")
    job, why = noted(job, entry, order, age_ns)
    if why:
        return _failed(lost, why)
    recent = [at_ns for at_ns in job.restarts_ns if at_ns > age_ns - spec.restart_window_ns]
    if len(recent) >= spec.max_restarts:
        window_s = spec.restart_window_ns / SECOND_NS
        why = f"more than {spec.max_restarts} restarts within {window_s:g} s; the last: {child} failed"
        return _failed(lost, f"{why}: {order.reason}", hosts_fault=killed)
    assert entry.node is not None
    again = _with_rank(job, _started(job.ranks[entry.rank], entry.node))
    return dataclasses.replace(again, restarts_ns=(*recent, age_ns), restarts_total=job.restarts_total + 1)


def _naming(job: Job, child: str, how: str) -> Job:
    """Return a job whose reason says how `child` ended, or that it has not."""
    head, found, names = job.reason.partition(f"; {how}: ")
    if not found:
        return dataclasses.replace(job, reason=f"{job.reason}; {how}: {child}")
    names, semicolon, rest = names.partition(";")
    return dataclasses.replace(job, reason=f"{head}{found}{names}, {child}{semicolon}{rest}")


# --- views ----------------------------------------------------------------------------------------------


def _settled(job: Job, epoch: int) -> Job:
    """Return the job with a new view, if its members changed and none is starting."""
    starting = any(entry.state is SlotState.STARTING for entry in job.ranks)
    up = any(entry.state is SlotState.UP for entry in job.ranks)
    if job.phase is not JobPhase.RUNNING or not job.unsettled or starting or not up:
        return job
    return dataclasses.replace(job, epoch=epoch, unsettled=False)
