"""`zbmd-node submit`, `jobs` and `stop`: give a job to the cluster, follow it, list what runs, and end it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import rich.console
import rich.table

from zbmd.actors.bootstrap.environments import NodeRange
from zbmd.actors.cluster.jobs.code_digest import code_of
from zbmd.actors.cluster.node.client import ASK_S, AdminConnection, connect_admin
from zbmd.actors.cluster.node.contracts import (
    JobInfo,
    JobsReply,
    JobsRequest,
    OrderReply,
    OrderRequest,
    OutputReply,
    OutputRequest,
    PrintedLine,
)
from zbmd.actors.cluster.state.job_table import JobPhase, JobSpec, Stop, Submit
from zbmd.actors.process.output import OutputLine, StreamName
from zbmd.actors.rank.environment import SPARE_RANKS_VARIABLE
from zbmd.actors.view import Outcome
from zbmd.tools.cli.console import Console
from zbmd.tools.cli.launch import add_setting
from zbmd.tools.cli.launch_settings import Settings, spares_of
from zbmd.tools.cli.options import add_at, by_names
from zbmd.tools.cli.settings import SETTINGS, merge
from zbmd.transport.clock.deadlines import SECOND_NS
from zbmd.transport.errors import DeadlineExceeded, UserError, ZbmdError

# Following a job: its state changes and the output of its ranks, requested from each node in turn.

FOLLOW_LOOK_S: Final = 0.1
SILENT_LOOKS_MAX: Final = 50
"""So often a node that cannot be reached is tried again; what it has kept is then given up."""


class _Host:
    """Follows what the ranks on one node print."""

    def __init__(self, job: int, name: str, address: str, console: Console) -> None:
        self.name = name
        self.seen = 0
        self._job = job
        self._address = address
        self._console = console
        self.ended = asyncio.Event()
        """Once the job has: what is there now is all."""
        self.task = asyncio.create_task(self._run(), name=f"output of {name}")

    async def _run(self) -> None:
        reason = ""
        for _ in range(SILENT_LOOKS_MAX):
            try:
                async with connect_admin(self._address) as admin:
                    await self._read(admin)
                return
            except (ZbmdError, TimeoutError) as error:
                reason = str(error)
                if self.ended.is_set():
                    break
                await asyncio.sleep(FOLLOW_LOOK_S)
        await self._console.note(f"what ranks on {self.name} still print is not shown: {reason}")

    async def _read(self, admin: AdminConnection) -> None:
        while True:  # until the job has ended, and all of it is shown
            last = self.ended.is_set()
            request = OutputRequest(job=self._job, number=self.seen)
            found = await admin.actor.ask(request, reply=OutputReply, timeout=10.0)
            if found.lines and found.first > self.seen:
                lost = found.first - self.seen
                await self._console.note(f"{lost} lines of ranks on {self.name} were dropped")
            for printed in found.lines:
                await self._console.write_line(_line(printed))
            self.seen = max(self.seen, found.first) + len(found.lines)
            if not found.lines:
                if last:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FOLLOW_LOOK_S):
                        await self.ended.wait()


def _line(printed: PrintedLine) -> OutputLine:
    stream: StreamName = "stderr" if printed.is_error else "stdout"
    return OutputLine(rank=printed.rank, incarnation=0, stream=stream, text=printed.text)


async def follow(admin: AdminConnection, job: int) -> int:
    """Show a job until it ends; the exit code that it stands for."""
    hosts: dict[str, _Host] = {}
    told = ""
    async with Console() as console:
        try:
            while True:  # until the job has ended
                found = await ask_jobs(admin, job=job)
                if not found.jobs:
                    raise UserError(f"job {job_name(job)} is not in the cluster's table any more.")
                now = found.jobs[0]
                if (words := _words(now)) != told:
                    told = words
                    await console.note(words)
                for rank in now.ranks:
                    if rank.address and rank.address not in hosts:
                        hosts[rank.address] = _Host(job, rank.node, rank.address, console)
                if now.phase == JobPhase.ENDED.value:
                    break
                await asyncio.sleep(FOLLOW_LOOK_S)
            for host in hosts.values():
                host.ended.set()
            if hosts:
                await asyncio.wait([host.task for host in hosts.values()])
        finally:
            for host in hosts.values():
                host.task.cancel()
            if hosts:
                await asyncio.wait([host.task for host in hosts.values()])
    return 0 if now.outcome == Outcome.SUCCEEDED.value else 1


def _words(job: JobInfo) -> str:
    up = sum(1 for rank in job.ranks if rank.state == "up")
    phase = f"{job.phase}, {job.outcome}" if job.outcome else job.phase
    reason = f": {job.reason}" if job.reason else ""
    return f"job {job_name(job.job)} is {phase}, {up} of {len(job.ranks)} ranks are up{reason}"


LOOK_S: Final = 0.05
"""From one look at what has become of an order to the next."""
LOOKS_MAX: Final = 600


def job_name(job: int) -> str:
    """Return a job's id as it is shown."""
    return f"{job:x}"


async def ask_jobs(admin: AdminConnection, *, job: int = 0, number: int = 0) -> JobsReply:
    """The jobs as the node has them."""
    return await admin.actor.ask(JobsRequest(job=job, number=number), reply=JobsReply, timeout=ASK_S)


async def give_order(admin: AdminConnection, order: Submit | Stop) -> None:
    """Have the cluster agree on an order. Raises `UserError` if it is refused, `DeadlineExceeded`."""
    given = await admin.actor.ask(OrderRequest(order=order), reply=OrderReply, timeout=ASK_S)
    if given.refused:
        raise UserError(f"the cluster does not take this order: {given.refused}.")
    for _ in range(LOOKS_MAX):
        found = await ask_jobs(admin, number=given.number)
        if found.refused:
            raise UserError(f"the cluster does not take this order: {found.refused}.")
        if found.applied:
            return
        await asyncio.sleep(LOOK_S)
    raise DeadlineExceeded(
        f"the members have not agreed on the order within {LOOKS_MAX * LOOK_S:g} s: `zbmd-node members` "
        "shows how the cluster stands"
    )


def find_job(found: JobsReply, name: str) -> JobInfo:
    """The job whose name begins so. Raises `UserError` unless there is exactly one."""
    fitting = [job for job in found.jobs if job_name(job.job).startswith(name.lower())]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(job_name(job.job) for job in found.jobs) or "none"
    what = "more than one job" if fitting else "no job"
    raise UserError(f"{what} begins with {name!r}. There are: {known}.")


async def stop(at: str | None, name: str, *, kill: bool) -> str:
    """Stop a job; what to tell."""
    async with connect_admin(at) as admin:
        job = find_job(await ask_jobs(admin), name)
        await give_order(admin, Stop(job=job.job, reason="zbmd-node stop", kill=kill))
    return f"job {job_name(job.job)} is being stopped"


async def jobs(at: str | None) -> JobsReply:
    """All jobs, as a node has them."""
    async with connect_admin(at) as admin:
        return await ask_jobs(admin)


def as_json(reply: JobsReply) -> str:
    """One JSON object, by the fields' names (on the wire they are arrays)."""
    found = [by_names(job, "ranks") | {"job": job_name(job.job)} for job in reply.jobs]
    return msgspec.json.encode({"view": reply.view, "jobs": found}).decode()


def show(reply: JobsReply, screen: rich.console.Console) -> None:
    """Print the table of jobs."""
    if not reply.jobs:
        screen.print("no job; give one with: zbmd-node submit SCRIPT")
        return
    table = rich.table.Table(title=f"jobs in view {reply.view}", title_justify="left")
    for column in ("job", "target", "phase", "nodes", "ranks", "restarts", "from"):
        table.add_column(column, justify="right" if column == "restarts" else "left")
    for job in reply.jobs:
        table.add_row(*_row(job))
    screen.print(table)
    for job in reply.jobs:
        if job.reason:
            screen.print(f"{job_name(job.job)}: {job.reason}", soft_wrap=True)


def _row(job: JobInfo) -> tuple[str, ...]:
    counts = Counter(rank.state for rank in job.ranks)
    holders = sorted({rank.node for rank in job.ranks if rank.node and rank.state in ("up", "starting")})
    phase = f"{job.phase}: {job.outcome}" if job.outcome else job.phase
    wanted = f"{job.nodes_min}" if job.nodes_min == job.nodes_max else f"{job.nodes_min}:{job.nodes_max}"
    return (
        job_name(job.job),
        job.target,
        phase,
        f"{', '.join(holders) or 'none'} (of {wanted})",
        ", ".join(f"{count} {state}" for state, count in sorted(counts.items())),
        str(job.restarts),
        job.submitter,
    )


NAMES: Final = (
    "nnodes",
    "nproc_per_node",
    "on_loss",
    "max_restarts",
    "restart_window",
    "recovery_budget",
    "stop_grace",
    "start_timeout",
    "arena",
    "data",
    "spare_ranks",
)
"""The settings of a run that a job of a cluster has too."""
EXAMPLES = """\
examples:
  zbmd-node submit --nnodes 2:4 -n 8 train.py --lr 3e-4   on two to four hosts, 8 ranks on each
  zbmd-node submit --no-follow -m package.module          a module; print the job's name and end
  zbmd-node jobs                                          what runs where
  zbmd-node stop JOB                                      end a job in order
"""


def add_arguments(submit: argparse.ArgumentParser) -> None:
    """The options of `zbmd-node submit`."""
    for setting in SETTINGS:
        if setting.name in NAMES:
            add_setting(submit, setting)
    submit.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML, by the options' names")
    submit.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the ranks; repeatable",
    )
    submit.add_argument(
        "--follow",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show the output of the ranks until the job ends (default: on a terminal)",
    )
    add_at(submit)
    submit.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    submit.add_argument("target", metavar="SCRIPT", help="a Python script, or with -m a module")
    submit.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )


def job_spec(arguments: argparse.Namespace) -> JobSpec:
    """Return the job that was asked for. Raises `UserError`."""
    on_line = {name: getattr(arguments, name) for name in NAMES}
    settings = merge(on_line, os.environ, arguments.config)
    target = arguments.target if arguments.module else str(Path(arguments.target).absolute())
    nodes = settings["nnodes"] or NodeRange(least=1, most=1)
    spec = JobSpec(
        job=secrets.randbits(62) + 1,
        target=target,
        is_module=arguments.module,
        arguments=tuple(arguments.arguments),
        environment=_environment(arguments.env, settings),
        code=code_of(target, is_module=arguments.module),
        ranks_per_node=_ranks(settings),
        nodes_min=nodes.least,
        nodes_max=nodes.most,
        on_loss=settings["on_loss"],
        max_restarts=settings["max_restarts"],
        restart_window_ns=round(settings["restart_window"] * SECOND_NS),
        arena_bytes=settings["arena"],
        recovery_budget_ns=round(settings["recovery_budget"] * SECOND_NS),
        stop_grace_ns=round(settings["stop_grace"] * SECOND_NS),
        start_timeout_ns=round(settings["start_timeout"] * SECOND_NS),
    )
    if problem := spec.problem():
        raise UserError(f"no cluster would take this job: {problem}.")
    return spec


def _ranks(settings: Settings) -> int:
    ranks = settings["nproc_per_node"]
    if not isinstance(ranks, int):
        raise UserError(
            "--nproc-per-node: give a number: the hosts of a job have the same number of ranks each."
        )
    return ranks


def _environment(given: list[str], settings: Settings) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {} if settings["data"] is None else {"ZBMD_DATA": settings["data"]}
    if spares := spares_of(settings):
        found[SPARE_RANKS_VARIABLE] = str(spares)
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--env {text}: write NAME=VALUE.")
        found[name] = value
    return tuple(sorted(found.items()))


async def submit(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    spec = job_spec(arguments)
    async with connect_admin(arguments.at) as admin:
        await give_order(admin, Submit(spec=spec))
        print(job_name(spec.job), flush=True)
        following = sys.stderr.isatty() if arguments.follow is None else arguments.follow
        if not following:
            return 0
        return await _follow(admin, spec.job)


async def _follow(admin: AdminConnection, job: int) -> int:
    try:
        return await follow(admin, job)
    except KeyboardInterrupt:
        print(
            f"[zbmd]: job {job_name(job)} goes on; to end it: zbmd-node stop {job_name(job)}", file=sys.stderr
        )
        raise
