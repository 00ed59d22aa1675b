"""Measure how membership scales: members join in batches, then 1 % of them fail at once.

    python -m zbmd.tools.lab.proofs.membership_scale [--sizes 1000,3000,10000]

Simulated (`zbmd.actors.simulated.membership_scenario`), with heartbeats, observers and detectors. `s` is the
virtual time until all members act on one view; `views` those acted on; `messages` what one member has sent on
average apart from heartbeats, `most` what the one that sent most has; `KB` what one member has sent on
average, views in full counted as such; `cpu_s` what the simulation took.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from zbmd.actors.cluster.contracts import HostLinked
from zbmd.actors.cluster.messages import Beat, Learn, Message
from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.simulated.membership_scenario import (
    SECOND_NS,
    Cluster,
    Packet,
    SimulatedNode,
    name_of,
    node_at,
    populate,
)
from zbmd.tools.cli.options import script_parser
from zbmd.transport import sim

SIZES_DEFAULT = "1000,3000,10000"
SLICE_NS = SECOND_NS // 20
CONVERGES_NS_MAX = 20 * SECOND_NS
FAIL_PERCENT = 1
DOORS = 8
"""Nodes at which the others knock: the first ones to be members."""
EVENTS_MAX = 50_000_000
FIELD_BYTES = 24
"""Roughly what one member of a view takes in a message."""


class Counted(Cluster):
    """A cluster that counts what its members send."""

    def __init__(self, size: int) -> None:
        super().__init__(size=size, protected=frozenset())
        self.begun = True
        self.by_node: Counter[int] = Counter()
        self.beats = 0
        self.nbytes = 0

    def doors(self, node_id: int, lives: int) -> tuple[Node, ...]:
        """The first nodes."""
        return tuple(node_at((node_id + lives + step) % DOORS, 0) for step in range(DOORS))

    def count(self, node_id: int, message: Message | HostLinked) -> None:
        """A member sends something."""
        if isinstance(message, Beat):
            self.beats += 1
            return
        self.by_node[node_id] += 1
        if isinstance(message, Learn):
            self.nbytes += FIELD_BYTES * len(message.view.nodes)
        else:
            self.nbytes += len(msgspec.msgpack.encode(message))

    def reset(self) -> None:
        """Reset the counts."""
        self.by_node.clear()
        self.beats = self.nbytes = 0


class CountedNode(SimulatedNode):
    """A node whose messages are counted."""

    def _send(self, to: Node, message: Message | HostLinked) -> None:
        assert isinstance(self.cluster, Counted)
        self.cluster.count(self.me.id, message)
        super()._send(to, message)


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """Cost of one phase."""

    size: int
    what: str
    virtual_s: float
    views: int
    messages: float
    most: int
    kilobytes: float
    cpu_s: float

    def __str__(self) -> str:
        return (
            f"{self.size:>7} {self.what:<12} {self.virtual_s:>6.2f} {self.views:>6} {self.messages:>9.1f} "
            f"{self.most:>6} {self.kilobytes:>8.1f} {self.cpu_s:>7.1f}"
        )


HEADER = "members what              s  views  messages   most       KB   cpu_s"


def agreed(cluster: Counted, names: Sequence[str]) -> bool:
    """Whether exactly these act on one view."""
    first = cluster.nodes[names[0]].acts_on
    if first is None or len(first.nodes) != len(names):
        return False
    views = (cluster.nodes[name].acts_on for name in names)
    return all(view is not None and view.epoch == first.epoch for view in views)


def converge(
    simulation: sim.Simulation[Packet], cluster: Counted, names: Sequence[str], what: str
) -> ScaleRow:
    """Run until these agree, and tell what it cost. Raises `TimeoutError`."""
    cluster.reset()
    began_ns, began_s, epoch = simulation.now_ns, time.process_time(), cluster.acted_on
    while not agreed(cluster, names):
        if simulation.now_ns - began_ns > CONVERGES_NS_MAX:
            raise TimeoutError(f"{len(names)} members have not agreed after {CONVERGES_NS_MAX / 1e9:g} s")
        simulation.run(for_ns=SLICE_NS, max_events=EVENTS_MAX)
        simulation.history.raw.clear()
        gc.collect(1)
    sent = cluster.by_node
    return ScaleRow(
        size=cluster.size,
        what=what,
        virtual_s=(simulation.now_ns - began_ns) / 1e9,
        views=cluster.acted_on - epoch,
        messages=sum(sent.values()) / len(names),
        most=max(sent.values(), default=0),
        kilobytes=cluster.nbytes / len(names) / 1000,
        cpu_s=time.process_time() - began_s,
    )


def measure(size: int) -> list[ScaleRow]:
    """Both phases of one size."""
    simulation = sim.Simulation[Packet](f"scale/{size}")
    cluster = Counted(size)
    populate(simulation, size, partial(CountedNode, cluster))
    names = [name_of(node_id) for node_id in range(size)]
    rows = [converge(simulation, cluster, names, "join")]
    step = 100 // FAIL_PERCENT
    for name in names[step // 2 :: step]:
        simulation.crash(name)
    left = [name for name in names if simulation.lives(name)]
    rows.append(converge(simulation, cluster, left, f"{FAIL_PERCENT} % fail"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = script_parser("lab.proofs.membership_scale", __doc__)
    parser.add_argument("--sizes", default=SIZES_DEFAULT, help="numbers of members (default: %(default)s)")
    given = parser.parse_args(argv)
    print(HEADER)
    for text in given.sizes.split(","):
        for row in measure(int(text)):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
