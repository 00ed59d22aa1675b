"""The network's effect on a message between two processes: when it arrives, or what delays it.

Both kinds of simulated world ask it. A path is one directed pair; it is stopped while a `Partition`, `Cut`
or `Clog` applies to it, and keeps what waits for it to open again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from zbmd.transport.errors import ZbmdError
from zbmd.transport.sim.faults import Clog, Cut, NetConditions, Partition
from zbmd.transport.sim.model import Conditions

HELD_MAX = 100_000
"""Messages that wait for one path to open; more means that a sender takes no notice of a dead link."""

RETRANSMIT_NS = 200_000
"""After how long a reliable channel sends again what was lost; twice as long each further time."""
RETRANSMISSIONS_MAX = 8

NetworkFault = Partition | Cut | Clog | NetConditions


class PathFlooded(ZbmdError):
    """`HELD_MAX` messages wait for a path to open: a sender does not notice that nothing is answered."""


@dataclass(slots=True, eq=False)
class NetworkPath:
    """From `source` to `target`."""

    source: str
    target: str
    free_ns: int = 0
    """When the last byte sent so far has left."""
    last_arrival_ns: int = 0
    cut: bool = False
    clogged: bool = False
    held: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque[tuple[int, Callable[[], None]]])

    @property
    def stopped(self) -> bool:
        """Whether what is sent now has to wait."""
        return self.cut or self.clogged

    def hold(self, incarnation: int, again: Callable[[], None]) -> None:
        """Call `again` when the path opens, for that incarnation of its source. Raises `PathFlooded`."""
        if len(self.held) >= HELD_MAX:
            raise PathFlooded(f"{HELD_MAX} messages from {self.source} to {self.target} are held up")
        self.held.append((incarnation, again))

    def held_from(self, incarnation: int) -> int:
        """How many messages of that incarnation are held."""
        return sum(held == incarnation for held, _ in self.held)

    def drop_held(self, incarnation: int, *, keep: int) -> None:
        """Forget all but the first `keep` of them."""
        kept: deque[tuple[int, Callable[[], None]]] = deque()
        for held, again in self.held:
            if held != incarnation or keep > 0:
                kept.append((held, again))
            if held == incarnation:
                keep -= 1
        self.held = kept


class Weather:
    """The paths of one world, and the network faults that are on."""

    def __init__(self, conditions: Conditions, rng: random.Random) -> None:
        self._conditions = conditions
        self._rng = rng
        self._paths: dict[tuple[str, str], NetworkPath] = {}
        self._active: list[NetworkFault] = []
        self.now = conditions
        """The conditions that hold at this moment."""

    @property
    def conditions(self) -> Conditions:
        """What holds while no `NetConditions` is on; may be replaced at any time."""
        return self._conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._judge_all()

    def path(self, source: str, target: str) -> NetworkPath:
        """The path from `source` to `target`, made at its first use."""
        found = self._paths.get((source, target))
        if found is None:
            found = self._paths[source, target] = NetworkPath(source, target)
            self._judge(found)
        return found

    def arrival_ns(self, path: NetworkPath, conditions: Conditions, now_ns: int, nbytes: int) -> int:
        """When `nbytes` sent now arrive: in the order of the path, unless they are to be reordered."""
        random = self._rng.random
        departed_ns = path.free_ns if path.free_ns > now_ns else now_ns
        departed_ns += nbytes * 1_000_000_000 // conditions.bandwidth_bytes_per_s
        path.free_ns = departed_ns
        if conditions.reorder and random() < conditions.reorder:
            spread_ns = 4 * (conditions.latency_ns + conditions.jitter_ns)
            return departed_ns + int(random() * (spread_ns + 1))
        at_ns = departed_ns + conditions.latency_ns + int(random() * (conditions.jitter_ns + 1))
        if at_ns <= path.last_arrival_ns:
            at_ns = path.last_arrival_ns + 1
        path.last_arrival_ns = at_ns
        return at_ns

    def reliable_ns(self, path: NetworkPath, now_ns: int, nbytes: int) -> int:
        """When `nbytes` sent now over a reliable, ordered channel arrive: a loss costs a retransmission."""
        conditions = self.now
        for attempt in range(RETRANSMISSIONS_MAX):
            if not conditions.loss or self._rng.random() >= conditions.loss:
                break
            now_ns += RETRANSMIT_NS << attempt
        in_order = replace(conditions, reorder=0.0) if conditions.reorder else conditions
        return self.arrival_ns(path, in_order, now_ns, nbytes)

    def begin(self, fault: NetworkFault) -> None:
        """The fault is on."""
        self._active.append(fault)
        self._judge_all()

    def end(self, fault: NetworkFault) -> None:
        """The fault is over; what its paths held goes on its way. Nothing if it was not on."""
        if fault in self._active:
            self._active.remove(fault)
        self._judge_all()

    def heal(self, core: frozenset[str]) -> None:
        """Calm for good: no fault among `core`; what a cut keeps from the others, it keeps from them."""
        kept: list[NetworkFault] = []
        for fault in self._active:
            match fault:
                case Partition(groups=groups):
                    # The core comes together in one group of its own; the rest stays as divided as it was.
                    rest = tuple(tuple(name for name in group if name not in core) for group in groups)
                    if any(rest):
                        parts = (tuple(sorted(core)), *(group for group in rest if group))
                        kept.append(Partition(groups=parts, at_ns=fault.at_ns, for_ns=fault.for_ns))
                case Cut(source=source, target=target) | Clog(source=source, target=target):
                    if source not in core or target not in core:
                        kept.append(fault)
                case NetConditions():
                    pass
        self._active = kept
        self._judge_all()

    def _judge_all(self) -> None:
        storms = [fault for fault in self._active if isinstance(fault, NetConditions)]
        self.now = _under(storms[-1], self._conditions) if storms else self._conditions
        for path in self._paths.values():
            self._judge(path)
        for path in list(self._paths.values()):
            waiting = len(path.held)
            while waiting and not path.stopped:
                waiting -= 1
                path.held.popleft()[1]()

    def _judge(self, path: NetworkPath) -> None:
        path.cut = any(_cuts(fault, path.source, path.target) for fault in self._active)
        path.clogged = any(
            isinstance(fault, Clog) and (fault.source, fault.target) == (path.source, path.target)
            for fault in self._active
        )


def _under(storm: NetConditions, otherwise: Conditions) -> Conditions:
    return replace(
        otherwise,
        latency_ns=storm.latency_ns,
        jitter_ns=storm.jitter_ns,
        bandwidth_bytes_per_s=storm.bandwidth_bytes_per_s,
        loss=storm.loss,
        duplicate=storm.duplicate,
        reorder=storm.reorder,
    )


def _cuts(fault: NetworkFault, source: str, target: str) -> bool:
    match fault:
        case Cut():
            return (fault.source, fault.target) == (source, target)
        case Partition(groups=groups):
            ends = [i for name in (source, target) for i, group in enumerate(groups) if name in group]
            return len(ends) == 2 and ends[0] != ends[1]
        case _:
            return False
