"""Three hosts, one cluster: a cable is pulled and plugged in again, a host is killed and comes back.

    python -m zbmd.tools.lab.hosts.kill_hosts [--hosts N] [--rounds N] [--delay TIME] [--loss FRACTION]
        [--json]

Each host is a network namespace with a node (`zbmd-node up`) of its own, reached over TCP; the first founds
the cluster, the others join by its token, as a user would. In each round the last host's cable is pulled:
the others agree on a view without it, and it stops itself. The cable is plugged in: it comes back with its
next life. Then it is killed, with all that runs on it, and started again. Times count from the moment in
which the cable or the process went to the line in which the last of the others says that it acts on the new
view. With `--delay` or `--loss` the network is a bad one all along. Wants root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from zbmd.tools.bench.stats import median
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.tools.lab.hosts.netns import Lab, LabHost
from zbmd.transport.clock.deadlines import (
    RECOVERY_BUDGET_NS_DEFAULT,
    derive,
    format_duration,
    parse_duration,
    parse_recovery_budget,
)
from zbmd.transport.errors import ZbmdError

PATIENCE_S: Final = 180.0
LINES_KEPT_MAX: Final = 1000
SUSPICIONS_GOAL: Final = 3
"""Cable pull to new view, in heartbeat deadlines."""
NODE: Final = (sys.executable, "-m", "zbmd.tools.node.cli")
PORT: Final = 29400

_VIEW: Final = re.compile(r"view (\d+): ([^(]*) \(")
_STOPS: Final = re.compile(r" stops: (.*)")


class DemoFailed(ZbmdError):
    """Something did not come about in time, or came about that must not."""


class HostNode:
    """The node of one host, its lines read as they come."""

    def __init__(self, host: LabHost, budget: str) -> None:
        self.host = host
        self.name = host.name
        self.members: tuple[str, ...] = ()
        self.stopped = ""
        self.said_ns = 0
        """When the last line was read."""
        self.lines: list[str] = []
        self._budget = budget
        self._process: subprocess.Popen[bytes] | None = None
        self._text = b""

    @property
    def environment(self) -> dict[str, str]:
        """Of its commands."""
        return {"ZBMD_STATE_DIR": str(self.host.home / "node"), "ZBMD_RECOVERY_BUDGET": self._budget}

    @property
    def fd(self) -> int:
        """Return the descriptor of its lines; -1 if it does not run."""
        if self._process is None or self._process.stderr is None or self._process.stderr.closed:
            return -1
        return self._process.stderr.fileno()

    def up(self, *arguments: str) -> None:
        """Start it."""
        command = [*NODE, "up", "--listen", f"{self.host.address}:{PORT}", *arguments]
        self._process = self.host.popen(
            command, environment=self.environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self.members, self.stopped = (), ""

    def command(self, *arguments: str) -> str:
        """Return what a command of `zbmd-node` prints on this host. Raises `DemoFailed`."""
        running = self.host.popen(
            [*NODE, *arguments], environment=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, errors = running.communicate(timeout=PATIENCE_S)
        if running.returncode != 0:
            raise DemoFailed(f"zbmd-node {' '.join(arguments)} on {self.name}: {errors.decode().strip()}")
        return str(out.decode().strip())

    def kill(self) -> int:
        """End it by SIGKILL; when that was."""
        assert self._process is not None and self._process.stderr is not None
        self._process.kill()
        at_ns = time.monotonic_ns()
        self._process.wait()
        self._process.stderr.close()
        self.members = ()
        return at_ns

    def read(self) -> None:
        """Take what it says now."""
        data = os.read(self.fd, 1 << 16)
        if not data:
            raise DemoFailed(f"the node of {self.name} has ended: {' / '.join(self.lines[-3:])}")
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))

    def _take(self, line: str) -> None:
        self.said_ns = time.monotonic_ns()
        self.lines = [*self.lines, line][-LINES_KEPT_MAX:]
        view, stops = _VIEW.search(line), _STOPS.search(line)
        if view is not None:
            self.members = tuple(sorted(name.strip() for name in view[2].split(",")))
            self.stopped = ""
        elif stops is not None:
            self.members, self.stopped = (), stops[1]


class Demo:
    """The nodes, and what is done to them."""

    def __init__(self, lab: Lab, budget: str) -> None:
        self.lab = lab
        self.nodes = [HostNode(host, budget) for host in lab.hosts]
        self.figures: dict[str, list[float]] = {}

    def form(self) -> None:
        """The first founds the cluster, the others join by its token."""
        first, *others = self.nodes
        first.up("--new")
        self._until(lambda: first.members == (first.name,), "the first node founds a cluster")
        token = first.command("token").split("--token ")[1].split()[0]
        for node in others:
            node.up("--token", token)
        self._agree(self.nodes)

    def pull_and_plug(self) -> None:
        """The last host is cut off, and comes back."""
        *others, last = self.nodes
        begin_ns = time.monotonic_ns()
        last.host.pull_cable()
        self._note("cable pulled to new view", self._agree(others) - begin_ns)
        self._until(lambda: bool(last.stopped), f"{last.name} stops itself")
        self._note("cable pulled to the end of the cut-off", last.said_ns - begin_ns)
        begin_ns = time.monotonic_ns()
        last.host.plug_cable()
        self._note("cable plugged in to view of all", self._agree(self.nodes) - begin_ns)

    def kill_and_start(self) -> None:
        """The last host's processes are killed, and it is started again."""
        *others, last = self.nodes
        begin_ns = last.kill()
        self._note("host killed to new view", self._agree(others) - begin_ns)
        begin_ns = time.monotonic_ns()
        last.up()
        self._note("host started to view of all", self._agree(self.nodes) - begin_ns)

    def close(self) -> None:
        """Kill what runs."""
        for node in self.nodes:
            if node.fd >= 0:
                node.kill()

    def _note(self, what: str, took_ns: int) -> None:
        self.figures.setdefault(what, []).append(took_ns / 1e6)

    def _agree(self, nodes: Sequence[HostNode]) -> int:
        """Wait until these act on a view of just them; when the last of them said so."""
        names = tuple(sorted(node.name for node in nodes))
        self._until(lambda: all(node.members == names for node in nodes), f"a view of {', '.join(names)}")
        return max(node.said_ns for node in nodes)

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not reached():
            left_s = max(0.0, deadline_s - time.monotonic())
            by_fd = {node.fd: node for node in self.nodes if node.fd >= 0}
            ready = select.select(list(by_fd), [], [], left_s)[0]
            if not ready:
                told = "; ".join(f"{n.name}: {n.lines[-1] if n.lines else 'nothing'}" for n in self.nodes)
                raise DemoFailed(f"not within {PATIENCE_S:g} s: {what}. Last said: {told}")
            for fd in ready:
                by_fd[fd].read()


def run(hosts: int, rounds: int, budget: str, *, delay_ms: float, loss: float) -> dict[str, list[float]]:
    """All of it; milliseconds of each round. Raises `DemoFailed`."""
    with contextlib.ExitStack() as stack:
        shaped = bool(delay_ms or loss)
        lab = stack.enter_context(Lab(hosts, shaped=shaped))
        for host in lab.hosts if shaped else ():
            host.shape(delay_ms=delay_ms, loss=loss)
        demo = Demo(lab, budget)
        stack.callback(demo.close)
        demo.form()
        for _ in range(rounds):
            demo.pull_and_plug()
            demo.kill_and_start()
        return demo.figures


def table(figures: dict[str, list[float]], budget_ns: int) -> str:
    """The figures as a person reads them."""
    deadline_ns = derive(budget_ns).suspicion_ns
    lines = [f"{'':44}{'p50 ms':>10}{'most':>10}"]
    lines += [f"{what:44}{median(ms):>10,.0f}{max(ms):>10,.0f}" for what, ms in figures.items()]
    lines.append(
        f"goal: cable pulled to new view within {SUSPICIONS_GOAL} heartbeat deadlines of "
        f"{format_duration(deadline_ns)}, {format_duration(SUSPICIONS_GOAL * deadline_ns)}"
    )
    return "\n".join(lines)


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.hosts.kill_hosts", __doc__)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recovery-budget", default=format_duration(RECOVERY_BUDGET_NS_DEFAULT))
    parser.add_argument("--delay", metavar="TIME", help="of what each host sends")
    parser.add_argument("--loss", type=float, default=0.0, metavar="FRACTION")
    add_json(parser)
    arguments = parser.parse_args(argv)
    budget_ns = parse_recovery_budget(arguments.recovery_budget)
    delay_ms = 0.0 if arguments.delay is None else parse_duration(arguments.delay) * 1e3
    figures = run(
        arguments.hosts,
        arguments.rounds,
        arguments.recovery_budget,
        delay_ms=delay_ms,
        loss=arguments.loss,
    )
    print(json.dumps(figures) if arguments.json else table(figures, budget_ns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
