"""Measure a resilient loop of PyTorch over two hosts: a rank is killed, then a host, which a spare replaces.

    python -m zbmd.tools.lab.hosts.loop [--kinds ddp,fsdp2] [--width N] [--layers N] [--rounds N]

Each host is a network namespace with a node and a rank of the loop, reached over TCP; a third host waits. The
time counts from the kill to the next step that is committed. Wants root, iproute2 and PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from zbmd.tools.cli.options import exit_code_of, script_parser
from zbmd.tools.lab.bench.training.loops import KINDS, MODULE, PRELOAD, RANK_VARIABLE
from zbmd.tools.lab.hosts.job import PORT, Event, Host, HostNode, JobDemo, Layout, Step
from zbmd.tools.lab.hosts.netns import Lab
from zbmd.transport.clock.deadlines import parse_recovery_budget
from zbmd.transport.errors import UserError

HOSTS: Final = 2
SPARES: Final = 1


class LoopDemo(JobDemo):
    """A loop of a rank a host, as `loops recovery` runs it."""

    def __init__(self, hosts: Sequence[Host], numbers: Sequence[str], budget_ns: int) -> None:
        super().__init__(hosts, Layout(ranks_per_node=1, nodes_min=1, nodes_max=HOSTS), budget_ns)
        self._numbers = numbers
        self._pids: dict[str, int] = {}
        for place in self.places:
            place.options = ("--preload", *PRELOAD)

    def program(self, out: Path) -> Event:
        """Return what the ranks run."""
        return {
            "target": MODULE,
            "arguments": [*self._numbers],
            "environment": [(RANK_VARIABLE, "1")],
            "max_restarts": 99,
        }

    def kill_rank(self, number: int) -> None:
        """Kill the victim's rank."""
        begin_ns, epoch = self._begin()
        os.kill(self._pids[self.victim.host.name], signal.SIGKILL)
        self._next_step(begin_ns, epoch, f"rank killed, round {number}")
        self._commits(HOSTS)

    def kill_host(self, number: int) -> None:
        """Kill the victim; the spare host takes its place, and the victim comes back as a spare one."""
        begin_ns, epoch = self._begin()
        killed = self.victim
        killed.kill()
        self.working.discard(killed.host.name)
        self._next_step(begin_ns, epoch, f"host killed, round {number}")
        self._commits(HOSTS)
        killed.start(f"{self.places[0].host.address}:{PORT}")
        self._all_agree(self.places)
        self.victim = next(place for place in self.places[1:] if place.host.name in self.working)

    def _take(self, place: HostNode, event: Event) -> None:
        match event:
            case {"kind": "started", "pid": pid}:
                self._pids[place.host.name] = pid
            case {"kind": "line", "text": str(text)} if text.startswith("step "):
                version, epoch, at_ns = map(int, text.split()[1:])
                self.steps.append(Step(version=version, epoch=epoch, members=HOSTS, at_ns=at_ns))
            case _:
                pass
        super()._take(place, event)


def run(kind: str, width: int, layers: int, rounds: int, budget_ns: int) -> dict[str, float]:
    """Return the figures. Raises `DemoFailed`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zbmd-loop-")))
        lab = stack.enter_context(Lab(HOSTS + SPARES))
        numbers = (kind, "recovery", str(width), str(layers), "0", str(1 << 30))
        demo = LoopDemo(lab.hosts, numbers, budget_ns)
        stack.callback(demo.close)
        demo.start(folder / "run")
        for number in range(rounds):
            demo.kill_rank(number + 1)
        for number in range(rounds):
            demo.kill_host(number + 1)
        return demo.figures


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.hosts.loop", __doc__)
    parser.add_argument("--kinds", default="ddp,fsdp2", help="(%(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="of a layer (%(default)s)")
    parser.add_argument("--layers", type=int, default=10, help="of width × width (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each kill (%(default)s)")
    parser.add_argument("--recovery-budget", metavar="TIME", default="1s", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    kinds = arguments.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        raise UserError(f"--kinds {arguments.kinds}: expected some of {', '.join(KINDS)}")
    budget_ns = parse_recovery_budget(arguments.recovery_budget)
    for kind in kinds:
        figures = run(kind, arguments.width, arguments.layers, arguments.rounds, budget_ns)
        print(f"{kind}, {arguments.width**2 * arguments.layers / 1e6:.1f} M parameters")
        for what, value in figures.items():
            print(f"  {what:72}{value:>10,.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
