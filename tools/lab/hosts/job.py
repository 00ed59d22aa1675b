"""The training job over three hosts: one's cable is pulled and plugged in, one is killed; the bits stay.

    python -m zbmd.tools.lab.hosts.job [--steps N] [--spare] [--delay TIME] [--loss FRACTION] [--rate MBPS]
                                        [--netem] [--calm] [--recovery-budget TIME] [--json]

Each host is a network namespace with a node and one rank of the job (`node`), reached over
TCP. One host's cable is pulled: the others go on with its shards. It is plugged in, comes back with its
next life, and takes work again. Then it is killed with all that it runs, and started again. At the end
the job is stopped, and its weights are compared with those of as many steps of one plain process. Wants root
and iproute2.

With `--spare` two of the hosts run two ranks each and the third runs none: it takes the place of the one that
is killed. With `--calm` nothing is done to a host: what the network does is all. With `--netem` the kernel
delays, loses and slows down, where it can.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

from zbmd.tools.bench.stats import median
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.tools.lab.hosts.netns import Lab, LabHost
from zbmd.tools.train.command import recipe_of
from zbmd.training.checkpoint.sharded import load_trained
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.task import weights_sha256
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_NS_DEFAULT, parse_duration, parse_recovery_budget
from zbmd.transport.errors import ZbmdError

HOSTS: Final = 3
PATIENCE_BUDGETS: Final = 90
"""Recovery budgets without a commit after which the demo gives up."""
PORT: Final = 29400
STEPS_MOST: Final = 1_000_000
"""Of the job, which is stopped before: a host may take many steps' time to come back."""
STEPS_BETWEEN: Final = 20
"""Committed before each thing that is done to the last host."""
NODE: Final = (sys.executable, "-m", "zbmd.tools.lab.hosts.node")
MODEL: Final = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--evaluate-every", "0")
CONSTANT: Final = ("--curve", "constant")
"""A learning rate that does not depend on the number of steps."""
ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}
Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The job's ranks on a host, and on how many hosts it runs."""

    ranks_per_node: int
    nodes_min: int
    nodes_max: int

    def ranks(self, hosts: int) -> int:
        """Return the number of ranks while so many hosts live."""
        return self.ranks_per_node * min(hosts, self.nodes_max)


ONE_EACH: Final = Layout(ranks_per_node=1, nodes_min=HOSTS - 1, nodes_max=HOSTS)
WITH_SPARE: Final = Layout(ranks_per_node=2, nodes_min=1, nodes_max=HOSTS - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A commit. members: how many; at_ns: when it was reported (CLOCK_MONOTONIC)."""

    version: int
    epoch: int
    members: int
    at_ns: int


class DemoFailed(ZbmdError):
    """Something did not come about in time."""


class Host(Protocol):
    """The host of a node: one of the laboratory, or one like it."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def address(self) -> str:
        """Return the address at which others reach it."""
        ...

    @property
    def home(self) -> Path:
        """A folder for all that it keeps."""
        ...

    def popen(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on it."""
        ...


class HostNode:
    """One host's node, and what it tells."""

    def __init__(self, host: Host, cookie: str, budget_ns: int) -> None:
        self.host = host
        self._budget = f"{budget_ns}ns"
        self.process: subprocess.Popen[bytes] | None = None
        self.options: Sequence[str] = ()
        """More of its command."""
        self._text = b""
        path = host.home / "cookie"
        path.touch(mode=0o600)
        path.write_text(cookie)

    @property
    def fd(self) -> int:
        """Return the descriptor of its reports; -1 if it does not run."""
        process = self.process
        return -1 if process is None or process.stdout is None else process.stdout.fileno()

    def start(self, join: str | None) -> None:
        """Start its node."""
        command = [*NODE, f"{self.host.address}:{PORT}", "--name", self.host.name]
        command += ["--recovery-budget", self._budget, *self.options]
        command += [] if join is None else ["--join", join]
        environment = {**ENVIRONMENT, "ZBMD_STATE_DIR": str(self.host.home / "node")}
        self._text = b""
        with (self.host.home / "errors").open("ab") as errors:
            self.process = self.host.popen(
                command, environment=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )

    def order(self, order: Event) -> None:
        """Have it submit a job."""
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """End it and all that it runs, by SIGKILL of the node."""
        if self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process = None

    def read(self) -> list[Event]:
        """Yield its reports so far; its ranks' and its own plain lines are left out."""
        data = os.read(self.fd, 1 << 16)
        if not data:
            raise DemoFailed(f"{self.host.name} has ended: {(self.host.home / 'errors').read_text()[-500:]}")
        *lines, self._text = (self._text + data).split(b"\n")
        return [json.loads(line) for line in lines if line.startswith(b'{"kind"')]


class JobDemo:
    """The hosts, the job, and what is done to them. model: arguments of the job; ranks: of its recipe."""

    def __init__(
        self,
        hosts: Sequence[Host],
        layout: Layout,
        budget_ns: int,
        model: Sequence[str] = MODEL,
        ranks: int = 1,
    ) -> None:
        cookie = secrets.token_hex()
        self._ranks = ranks
        self.places = [HostNode(host, cookie, budget_ns) for host in hosts]
        self._patience_s = PATIENCE_BUDGETS * budget_ns / 1e9
        self._model = model
        self.victim = self.places[-1]
        self.layout = layout
        self.steps: list[Step] = []
        self.views: dict[str, tuple[str, ...]] = {}
        self.working: set[str] = set()
        """The hosts that have started ranks."""
        self.noticed_ns: int | None = None
        """When one of the others first no longer heard the victim, since something was done to that."""
        self.phase = ""
        """Of the job, by the table of the cluster."""
        self.figures: dict[str, float] = {}

    def start(self, out: Path) -> None:
        """Form the cluster, and submit the job."""
        first, *others = self.places
        first.start(None)
        self._until(lambda: self.views.get(first.host.name) == (first.host.name,), "a cluster of one")
        for place in others:
            place.start(f"{first.host.address}:{PORT}")
        self._all_agree(self.places)
        layout = self.layout
        nodes = {"nodes_min": layout.nodes_min, "nodes_max": layout.nodes_max}
        first.order(
            {"is_module": True, "ranks_per_node": layout.ranks_per_node, **nodes, **self.program(out)}
        )
        self._commits(self.layout.ranks(len(self.places)))
        self.victim = next(place for place in reversed(self.places) if place.host.name in self.working)

    def program(self, out: Path) -> Event:
        """Return what the ranks run: fields of `JobSpec`."""
        recipe = recipe_by(out, STEPS_MOST, self._model, ranks=self._ranks)
        return {"target": "zbmd.training.sharded", "arguments": [recipe.encode()]}

    def kill_and_start(self) -> None:
        """The victim's processes."""
        begin_ns, epoch = self._begin()
        self.victim.kill()
        self._next_step(begin_ns, epoch, "host killed")
        self._commits(self.layout.ranks(len(self.places) - 1))
        self.victim.start(f"{self.places[0].host.address}:{PORT}")
        if self.layout.nodes_max == len(self.places):
            self._joined("as the killed host joins: the longest time between two steps, ms")
        else:
            self._all_agree(self.places)

    def finish(self, steps: int) -> None:
        """Stop the job, which writes a checkpoint, once it has committed so many."""
        self._until(lambda: self.steps[-1].version >= steps, f"{steps} steps")
        self.places[0].order({"stop": "all was done to its hosts"})
        self._until(lambda: self.phase == "ended", "the end of the job")
        gaps = [(b.at_ns - a.at_ns) / 1e6 for a, b in pairwise(self.steps)]
        self.figures["an ordinary step, ms"] = median(gaps)
        self.figures["the longest time between two steps of the whole run, ms"] = max(gaps)

    def close(self) -> None:
        """Kill what runs."""
        for place in self.places:
            place.kill()

    def _begin(self) -> tuple[int, int]:
        """Before something is done to the victim: the time, and the epoch of the job's ranks."""
        self.noticed_ns = None
        return time.monotonic_ns(), self.steps[-1].epoch

    def _joined(self, what: str) -> None:
        begin = len(self.steps) - 1
        self._commits(self.layout.ranks(len(self.places)))
        times_ns = [step.at_ns for step in self.steps[begin:]]
        self.figures[what] = max(b - a for a, b in pairwise(times_ns)) / 1e6

    def _next_step(self, begin_ns: int, epoch: int, what: str) -> None:
        self._until(lambda: self.steps[-1].epoch > epoch, "a step without it")
        at_ns = next(step.at_ns for step in self.steps if step.epoch > epoch)
        if self.noticed_ns is not None:
            self.figures[f"{what} to the notice of it, ms"] = (self.noticed_ns - begin_ns) / 1e6
            self.figures[f"{what}: the next committed step beyond the notice, ms"] = (
                at_ns - self.noticed_ns
            ) / 1e6
        self.figures[f"{what} to the next committed step, ms"] = (at_ns - begin_ns) / 1e6

    def _note(self, what: str, begin_ns: int) -> None:
        self.figures[what] = (time.monotonic_ns() - begin_ns) / 1e6

    def _commits(self, members: int) -> None:
        """Wait for `STEPS_BETWEEN` steps in a row of so many members."""

        def reached() -> bool:
            latest = self.steps[-STEPS_BETWEEN:]
            return len(latest) == STEPS_BETWEEN and all(step.members == members for step in latest)

        self._until(reached, f"{STEPS_BETWEEN} steps of {members} ranks")

    def _all_agree(self, places: Sequence[HostNode]) -> None:
        names = tuple(sorted(place.host.name for place in places))
        self._until(lambda: all(self.views.get(name) == names for name in names), f"a view of {names}")

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        """As long as there are commits: a slow network is not one that stands."""
        deadline_s, steps = time.monotonic() + self._patience_s, len(self.steps)
        while not reached():
            if len(self.steps) > steps:
                deadline_s, steps = time.monotonic() + self._patience_s, len(self.steps)
            running = {p.fd: p for p in self.places if p.fd >= 0}
            ready = select.select(list(running), [], [], max(0.0, deadline_s - time.monotonic()))[0]
            if not ready or (self.phase == "ended" and not reached()):
                now_ns = time.monotonic_ns()
                ages = [f"{(now_ns - step.at_ns) / 1e6:.0f} ms ago {step}" for step in self.steps[-3:]]
                raise DemoFailed(
                    f"not within {self._patience_s:g} s of a commit, or before the job's end: {what}. "
                    f"Last commits: {'; '.join(ages)}. Views: {self.views}"
                )
            for fd in ready:
                for event in running[fd].read():
                    self._take(running[fd], event)

    def _take(self, place: HostNode, event: Event) -> None:
        match event["kind"]:
            case "view":
                self.views[place.host.name] = tuple(event["members"])
            case "started":
                self.working.add(place.host.name)
            case "suspects" if place is not self.victim and self.noticed_ns is None:
                self.noticed_ns = event["at_ns"]
            case "report" if event["payload"]["kind"] == "step":
                payload = event["payload"]
                self.steps.append(
                    Step(
                        version=payload["version"],
                        epoch=payload["epoch"],
                        members=len(payload["members"]),
                        at_ns=event["at_ns"],
                    )
                )
            case "job":
                self.phase = event["phase"]
            case _:
                pass


class CableDemo(JobDemo):
    """With hosts of a laboratory, whose cables can be pulled."""

    def __init__(self, hosts: Sequence[LabHost], layout: Layout, budget_ns: int) -> None:
        super().__init__(hosts, layout, budget_ns)
        self._lab_hosts = {host.name: host for host in hosts}

    def pull_and_plug(self) -> None:
        """The victim's cable."""
        begin_ns, epoch = self._begin()
        self._lab_hosts[self.victim.host.name].pull_cable()
        self._all_agree([place for place in self.places if place is not self.victim])
        self._note("cable pulled to new view, ms", begin_ns)
        self._next_step(begin_ns, epoch, "cable pulled")
        self._commits(self.layout.ranks(len(self.places) - 1))
        self._lab_hosts[self.victim.host.name].plug_cable()
        self._joined("as the cut-off host joins: the longest time between two steps, ms")


def recipe_by(out: Path, steps: int, model: Sequence[str] = MODEL, *own: str, ranks: int = 1) -> TrainOptions:
    """The job's recipe; model, own: options of `zbmd train`."""
    words = ["--out", str(out), "--steps", str(steps), "--checkpoint-every", "1000"]
    words += [*CONSTANT, *model, *own]
    return recipe_of(words, ranks=ranks)


def plain_digest(out: Path, steps: int, model: Sequence[str] = MODEL) -> str:
    """The weights of the same job in one plain process."""
    recipe = recipe_by(out, steps, model, "--plain", "on")
    command = [sys.executable, "-m", "zbmd.training.sharded", recipe.encode()]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **ENVIRONMENT}
    )
    return str(json.loads(done.stdout.splitlines()[-1])["weights_sha256"])


def run(
    steps: int = 0,
    *,
    layout: Layout = ONE_EACH,
    delay_ms: float = 0.0,
    loss: float = 0.0,
    rate_mbps: float = 0.0,
    netem: bool = False,
    budget_ns: int = RECOVERY_BUDGET_NS_DEFAULT,
    pull: bool = True,
    kill: bool = True,
) -> tuple[dict[str, float], bool]:
    """All of it: the figures, and whether the weights are those of a plain run. Raises `DemoFailed`.

    steps: that are committed at least.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zbmd-demo-")))
        shaped = bool(delay_ms or loss or rate_mbps)
        lab = stack.enter_context(Lab(HOSTS, shaped=shaped, netem=netem))
        for host in lab.hosts if shaped else ():
            host.shape(delay_ms=delay_ms, loss=loss, rate_mbps=rate_mbps)
        demo = CableDemo(lab.hosts, layout, budget_ns)
        stack.callback(demo.close)
        demo.start(folder / "run")
        if pull:
            demo.pull_and_plug()
        if kill:
            demo.kill_and_start()
        demo.finish(steps)
        demo.close()
        weights, _, steps = load_trained(folder / "run")
        return demo.figures, weights_sha256(weights) == plain_digest(folder / "plain", steps)


def show(figures: Mapping[str, float], *, same: bool, as_json: bool) -> None:
    """Print the figures. same: whether the weights are those of a plain run."""
    if as_json:
        print(json.dumps({"figures": figures, "same_weights": same}))
        return
    for what, value in figures.items():
        print(f"{what:72}{value:>10,.0f}")
    print(f"the weights are {'those' if same else 'NOT those'} of one plain process, bit for bit")


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.hosts.job", __doc__)
    parser.add_argument("--steps", type=int, default=0, help="commit at least as many")
    parser.add_argument("--spare", action="store_true", help="two ranks on each of two hosts, one host idle")
    parser.add_argument("--delay", metavar="TIME", help="of what each host sends")
    parser.add_argument("--loss", type=float, default=0.0, metavar="FRACTION")
    parser.add_argument("--rate", type=float, default=0.0, metavar="MBPS", help="of each host's cable")
    parser.add_argument("--netem", action="store_true", help="by the kernel, not by a switch in user space")
    parser.add_argument("--calm", action="store_true", help="no cable is pulled, no host killed")
    parser.add_argument("--recovery-budget", metavar="TIME", default="1s", help="default: %(default)s")
    add_json(parser)
    arguments = parser.parse_args(argv)
    delay_ms = 0.0 if arguments.delay is None else parse_duration(arguments.delay) * 1e3
    figures, same = run(
        arguments.steps,
        layout=WITH_SPARE if arguments.spare else ONE_EACH,
        delay_ms=delay_ms,
        loss=arguments.loss,
        rate_mbps=arguments.rate,
        netem=arguments.netem,
        budget_ns=parse_recovery_budget(arguments.recovery_budget),
        pull=not arguments.spare and not arguments.calm,
        kill=not arguments.calm,
    )
    show(figures, same=same, as_json=arguments.json)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
