"""Hosts are killed at once, and spare ones take their places: the state is rebuilt by its erasure code.

    python -m zbmd.tools.lab.hosts.coded [--code 2+2] [--rounds N] [--recovery-budget TIME] [--json]

With the code K+M, K + M hosts run a rank each of a pipeline, and M more wait. Each host is a network
namespace with a node of its own, reached over TCP. In each round M of those that work are killed at once,
with all that runs on them; the time counts until the next step is committed, by the spare hosts. The killed
ones are started again, as spares. At the end the weights are compared with those of one plain process. Wants
root and iproute2.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.tools.lab.hosts.job import MODEL, PORT, Host, JobDemo, Layout, plain_digest, show
from zbmd.tools.lab.hosts.netns import Lab
from zbmd.training.checkpoint.sharded import load_trained
from zbmd.training.sharded.task import weights_sha256
from zbmd.transport.clock.deadlines import parse_recovery_budget
from zbmd.transport.errors import UserError

HOSTS_MAX: Final = 12


class CodedDemo(JobDemo):
    """A pipeline over so many hosts, of which as many as there are parities are killed at once."""

    def __init__(self, hosts: Sequence[Host], data: int, parities: int, budget_ns: int) -> None:
        ranks = data + parities
        model = model_of(ranks)
        layout = Layout(ranks_per_node=1, nodes_min=2, nodes_max=ranks)
        coded = [*model, "--mesh", f"pp={ranks}", "--redundancy", f"ec:{data}+{parities}"]
        super().__init__(hosts, layout, budget_ns, coded, ranks)
        self._parities = parities

    def kill_at_once(self, number: int) -> None:
        """Kill hosts that work, but not the first one, which has the job's orders."""
        victims = [place for place in self.places[1:] if place.host.name in self.working][-self._parities :]
        self.victim = victims[0]
        begin_ns, epoch = self._begin()
        for place in victims:
            place.kill()
        self.working -= {place.host.name for place in victims}
        self._next_step(begin_ns, epoch, f"{len(victims)} hosts killed, round {number}")
        self._commits(self.layout.ranks(len(self.places)))
        for place in victims:
            place.start(f"{self.places[0].host.address}:{PORT}")
        self._all_agree(self.places)


def model_of(stages: int) -> list[str]:
    """Return options of the model: a layer a stage."""
    options = list(MODEL)
    options[options.index("--layers") + 1] = str(stages)
    return options


def run(data: int, parities: int, rounds: int, budget_ns: int) -> tuple[dict[str, float], bool]:
    """Return the figures, and whether the weights are those of a plain run. Raises `DemoFailed`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zbmd-coded-")))
        lab = stack.enter_context(Lab(data + 2 * parities))
        demo = CodedDemo(lab.hosts, data, parities, budget_ns)
        stack.callback(demo.close)
        demo.start(folder / "run")
        for number in range(rounds):
            demo.kill_at_once(number + 1)
        demo.finish(0)
        demo.close()
        weights, _, steps = load_trained(folder / "run")
        plain = plain_digest(folder / "plain", steps, model_of(data + parities))
        return demo.figures, weights_sha256(weights) == plain


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.hosts.coded", __doc__)
    parser.add_argument("--code", default="2+2", metavar="K+M", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--recovery-budget", metavar="TIME", default="1s", help="default: %(default)s")
    add_json(parser)
    arguments = parser.parse_args(argv)
    match = re.fullmatch(r"([1-9])\+([1-9])", arguments.code)
    if match is None or int(match[1]) + 2 * int(match[2]) > HOSTS_MAX:
        raise UserError(f"--code {arguments.code}: expected K+M, with at most {HOSTS_MAX} hosts: K + 2 M")
    budget_ns = parse_recovery_budget(arguments.recovery_budget)
    figures, same = run(int(match[1]), int(match[2]), arguments.rounds, budget_ns)
    show(figures, same=same, as_json=arguments.json)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
