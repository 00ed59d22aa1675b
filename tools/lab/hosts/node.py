"""The node of one host in the demo of a job over hosts: a cluster's node with its jobs, as JSON lines.

    python -m zbmd.tools.lab.hosts.node ADDRESS --name NAME [--join ADDRESS] [--recovery-budget TIME]
                                        [--preload MODULE ...]

Standard input takes orders, JSON objects: the fields of a training job to submit, or `{"stop": REASON}` for
that job. Standard output reports views, ranks and steps, each with its time (CLOCK_MONOTONIC, one for all
hosts of the laboratory).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import structlog
import uvloop

from zbmd.actors.cluster.jobs.host_links import host_identity
from zbmd.actors.cluster.jobs.node_driver import JobHost
from zbmd.actors.cluster.jobs.rank_processes import PRELOAD
from zbmd.actors.cluster.jobs.reports import HostEvent, RankDown, RankReport, RankStarted
from zbmd.actors.cluster.node.incarnations import (
    IncarnationEnded,
    MemberSuspected,
    NodeConfig,
    NodeEvent,
    ViewEntered,
)
from zbmd.actors.cluster.node.node import ClusterNode
from zbmd.actors.cluster.node.persistent_state import NodeState
from zbmd.actors.cluster.state.job_table import JobSpec, Stop, Submit
from zbmd.actors.process.output import OutputLine, emit_plainly
from zbmd.tools.cli.options import script_parser
from zbmd.transport.capture.log import RingRecorder
from zbmd.transport.capture.recorder import Clocks, origin_of
from zbmd.transport.clock.deadlines import parse_recovery_budget
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.tcp.address import parse_address

ARENA_BYTES: Final = 64 << 20
MODULES: Final = (*PRELOAD, "zbmd.collectives.group.group", "zbmd.training.sharded.run")


def say(kind: str, **fields: Any) -> None:
    """One line, in one piece: the node's thread says things, too."""
    emit_plainly("stdout", json.dumps({"kind": kind, "at_ns": time.monotonic_ns(), **fields}))


class LabNode:
    """A node and its jobs."""

    def __init__(
        self,
        address: str,
        join: str | None,
        name: str,
        recovery_budget_ns: int | None,
        preload: Sequence[str] = (),
    ) -> None:
        config = NodeConfig(
            name=name,
            listen=parse_address(address),
            joins=() if join is None else (parse_address(join),),
            cookie=load_or_create_cookie(),
            recovery_budget_ns=recovery_budget_ns,
        )
        clock = HybridClock()
        self._job = secrets.randbits(62) | 1
        self.node = ClusterNode(config, NodeState.open(), self._hear)
        self.jobs = JobHost(
            self.node,
            recorder=RingRecorder(origin_of(host_identity(0)), Clocks(hybrid=clock)),
            clock=clock,
            output=self,
            listen_host=config.listen.host,
            preload=(*MODULES, *preload),
            on_event=self._on_event,
        )

    async def write_line(self, line: OutputLine) -> None:
        """Report a rank's line."""
        say("line", rank=line.rank, text=line.text.decode(errors="replace"))

    def _hear(self, event: NodeEvent) -> None:
        match event:
            case ViewEntered(view=view):
                say("view", epoch=view.epoch, members=sorted(node.name for node in view.nodes))
                for job in view.jobs.jobs:
                    say("job", phase=str(job.phase.value), reason=job.reason)
            case MemberSuspected(reason=reason):
                say("suspects", node=event.key.id, reason=reason)
            case IncarnationEnded(reason=reason):
                say("stopped", reason=reason)
            case _:
                pass

    def _on_event(self, job: int, event: HostEvent) -> None:
        match event:
            case RankReport(payload=payload):
                say("report", payload=payload)
            case RankStarted():
                say("started", rank=event.rank, incarnation=event.incarnation, pid=event.pid)
            case RankDown():
                say("down", rank=event.rank, reason=event.reason, tail=event.tail[-3:])
            case _:
                pass

    def submit(self, order: dict[str, Any]) -> None:
        """Have the cluster run a job."""
        order["arguments"] = tuple(order.get("arguments", ()))
        order["environment"] = tuple(map(tuple, order.get("environment", ())))
        spec = JobSpec(job=self._job, arena_bytes=ARENA_BYTES, **order)
        self.node.command(Submit(spec=spec))

    def stop(self, reason: str) -> None:
        """Have the cluster end that job."""
        self.node.command(Stop(job=self._job, reason=reason))


async def run(place: LabNode) -> None:
    """Until the process is killed."""
    await place.jobs.open()
    living = asyncio.ensure_future(place.node.run())
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if "stop" in order:
            place.stop(order["stop"])
        else:
            place.submit(order)
    await living


async def started(arguments: argparse.Namespace) -> None:
    """Make the node of a command line, in the loop that it belongs to, and run it."""
    join, budget_ns = arguments.join, arguments.recovery_budget
    await run(LabNode(arguments.address, join, arguments.name, budget_ns, arguments.preload))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.hosts.node", __doc__)
    parser.add_argument("address")
    parser.add_argument("--join")
    parser.add_argument("--name", required=True)
    parser.add_argument("--recovery-budget", metavar="TIME", type=parse_recovery_budget)
    parser.add_argument(
        "--preload", nargs="*", default=[], metavar="MODULE", help="imported before ranks begin"
    )
    arguments = parser.parse_args(argv)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    uvloop.run(started(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
