"""Measure the heartbeats of idle nodes: CPU time of idle clusters on this host.

    python -m zbmd.tools.lab.bench.actors.heartbeats [--nodes 2,3,5,9] [--seconds 60]

Each node is a process of its own. What is counted is the time that the kernel charged to all of its threads
(/proc/PID/task/*/schedstat), so the cost of the system calls is in it, and of what they do for the receiver.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import structlog
import uvloop

from zbmd.actors.cluster.heartbeats.detector import beat_ns
from zbmd.actors.cluster.node.incarnations import NodeConfig, NodeEvent, ViewEntered
from zbmd.actors.cluster.node.node import ClusterNode
from zbmd.actors.cluster.node.persistent_state import NodeState, read_running
from zbmd.tools.cli.options import add_json, script_parser
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_NS_DEFAULT, derive
from zbmd.transport.tcp.address import TcpAddress, parse_address

COOKIE = b"the cookie of the heartbeats' benchmark"
FORM_S = 60.0
GOAL_PERCENT = 0.1


def cpu_ns(pid: int) -> int:
    """Return the CPU time of the threads of a process."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())


def run_node(directory: Path, number: int, door: str | None, size: int, told: int) -> NoReturn:
    """A node, in a process of its own; writes a byte to `told` when it acts on a view of `size`."""

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

    async def main() -> None:
        def tell(event: NodeEvent) -> None:
            if isinstance(event, ViewEntered) and len(event.view.nodes) == size:
                os.write(told, b".")

        config = NodeConfig(
            name=f"n{number}",
            listen=TcpAddress(host="127.0.0.1", port=0),
            joins=() if door is None else (parse_address(door),),
            cookie=COOKIE,
        )
        await ClusterNode(config, NodeState.open(directory / str(number)), tell).run()

    uvloop.run(main())
    os._exit(0)


async def measure(size: int, seconds: float) -> dict[str, Any]:
    """The share of one core that each node of an idle cluster takes, in percent."""
    loop = asyncio.get_running_loop()
    told, tell = os.pipe()
    pids: list[int] = []
    with tempfile.TemporaryDirectory(prefix="zbmd-bench-") as made:
        try:
            door: str | None = None
            for number in range(size):
                pid = os.fork()
                if pid == 0:
                    run_node(Path(made), number, door, size, tell)
                pids.append(pid)
                while door is None:
                    running = read_running(Path(made) / "0") if (Path(made) / "0").exists() else None
                    door = running.address if running is not None else None
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(FORM_S):
                for _ in pids:
                    await loop.run_in_executor(None, os.read, told, 1)
            await asyncio.sleep(1)
            before = [cpu_ns(pid) for pid in pids]
            begun = loop.time()
            await asyncio.sleep(seconds)
            lasted_ns = (loop.time() - begun) * 1e9
            shares = [100 * (cpu_ns(p) - b) / lasted_ns for p, b in zip(pids, before, strict=True)]
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # noqa: ASYNC222 (it is dead already)
            os.close(told)
            os.close(tell)
    return {"nodes": size, "median": statistics.median(shares), "least": min(shares), "most": max(shares)}


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a cluster."""
    parser = script_parser("lab.bench.actors.heartbeats", __doc__)
    parser.add_argument("--nodes", default="2,3,5,9", help="sizes of clusters; default: 2,3,5,9")
    parser.add_argument("--seconds", type=float, default=60.0, help="to count for; default: 60")
    add_json(parser)
    arguments = parser.parse_args(argv)
    beat_ms = beat_ns(derive(RECOVERY_BUDGET_NS_DEFAULT), busy=False) / 1e6
    if not arguments.json:
        print(f"heartbeats every {beat_ms:g} ms; % of one core a node; the goal is {GOAL_PERCENT}")
        print(f"{'nodes':>6}{'median':>10}{'least':>10}{'most':>10}")
    for size in map(int, arguments.nodes.split(",")):
        found = asyncio.run(measure(size, arguments.seconds))
        if arguments.json:
            print(json.dumps(found), flush=True)
        else:
            print(
                f"{size:>6}{found['median']:>10.3f}{found['least']:>10.3f}{found['most']:>10.3f}", flush=True
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
