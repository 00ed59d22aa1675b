"""Following a job: its changes, and what its ranks print on every host, asked of each node in turn."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from zbmd.actors.cluster.node.client import AdminConnection, connect_admin
from zbmd.actors.cluster.node.contracts import JobInfo, OutputReply, OutputRequest, PrintedLine
from zbmd.actors.cluster.state.job_table import JobPhase
from zbmd.actors.process.output import OutputLine, StreamName
from zbmd.actors.view import Outcome
from zbmd.tools.cli.console import Console
from zbmd.tools.node.jobs import ask_jobs, job_name
from zbmd.transport.errors import UserError, ZbmdError

LOOK_S: Final = 0.1
SILENT_LOOKS_MAX: Final = 50
"""So often a node that cannot be reached is tried again; what it has kept is then given up."""


class _Host:
    """What the ranks on one node print."""

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
        for _ in range(SILENT_LOOKS_MAX):
            try:
                async with connect_admin(self._address) as admin:
                    await self._read(admin)
                return
            except (ZbmdError, TimeoutError) as error:
                reason = str(error)
                if self.ended.is_set():
                    break
                await asyncio.sleep(LOOK_S)
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
                    await asyncio.wait_for(self.ended.wait(), LOOK_S)


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
                await asyncio.sleep(LOOK_S)
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
