"""The network among simulated processes: its weather, and the datagrams and links of a `World`."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, PeerLost, ZbmdError
from zbmd.transport.identity import Identity
from zbmd.transport.sim.faults import Clog, Cut, NetConditions, Partition
from zbmd.transport.sim.links import LinkOptions, LinkOwner, SimLink
from zbmd.transport.sim.loop import SimLoop
from zbmd.transport.sim.model import Conditions, HistoryKind

# ---- weather: when a message between two processes arrives, or what delays it
#
# Both kinds of simulated world ask it. A path is one directed pair; it is stopped while a `Partition`, `Cut`
# or `Clog` applies to it, and keeps what waits for it to open again.

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
        """Return how many messages of that incarnation are held."""
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
        """The conditions while no `NetConditions` is on; may be replaced at any time."""
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
    changes = {name: value for name, value in asdict(storm).items() if name not in ("at_ns", "for_ns")}
    return replace(otherwise, **changes)


def _cuts(fault: NetworkFault, source: str, target: str) -> bool:
    match fault:
        case Cut():
            return (fault.source, fault.target) == (source, target)
        case Partition(groups=groups):
            ends = [i for name in (source, target) for i, group in enumerate(groups) if name in group]
            return len(ends) == 2 and ends[0] != ends[1]
        case _:
            return False


DATAGRAM_BYTES_MAX = 65_507
DATAGRAMS_WAITING_MAX = 1024
"""Datagrams that wait to be received; more are lost, as a kernel's buffer loses them."""
LINKS_MAX = 4096
"""Ends of links that one process may have open."""
DATAGRAM_HEADER_BYTES = 28
SHAKE_BYTES = 256
"""Bytes that either side of a dial sends."""

OnLink = Callable[[SimLink], None]
Recorder = Callable[[Any, HistoryKind, object], None]
"""Records a happening at a process: the process, its kind, and details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datagram:
    """A datagram and its sender."""

    sender: str
    incarnation: int
    data: bytes


class NetworkProcess(LinkOwner, Protocol):
    """A process as the network sees it; see `world.SimProcess`."""

    def identity(self, options: LinkOptions, /) -> Identity:
        """Return the identity that the process proves at hello."""
        ...

    def take_datagram(self, datagram: Datagram, /) -> bool:
        """Take a datagram that arrived; return False if there is no room."""
        ...


class DatagramInbox:
    """The datagrams that have arrived at one process and wait to be received. owner: names it in errors."""

    def __init__(self, owner: str, loop: SimLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._waiting: deque[Datagram] = deque()
        self._receiver: asyncio.Future[None] | None = None

    async def receive(self) -> Datagram:
        """Return the next datagram. Raises `LocalProtocolError` if another task waits for one."""
        while not self._waiting:
            if self._receiver is not None:
                raise LocalProtocolError(f"another task of {self._owner} waits for a datagram")
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None
        return self._waiting.popleft()

    def put(self, datagram: Datagram) -> bool:
        """Add a datagram; return False if `DATAGRAMS_WAITING_MAX` wait already."""
        if len(self._waiting) >= DATAGRAMS_WAITING_MAX:
            return False
        self._waiting.append(datagram)
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)
        return True


class Network:
    """Carries what processes send. `weather` says how well."""

    def __init__(
        self, loop: SimLoop, weather: Weather, find: Callable[[str], NetworkProcess | None], record: Recorder
    ) -> None:
        self.loop = loop
        self.weather = weather
        self._find = find
        self._record = record
        self._chance: random.Random = loop.rng("sim/datagrams")
        self._deaths: random.Random = loop.rng("sim/link-deaths")
        self._links: dict[LinkOwner, dict[SimLink, None]] = {}
        self._listeners: dict[NetworkProcess, tuple[OnLink, LinkOptions]] = {}

    # -- datagrams ---------------------------------------------------------------------------------------

    def send_datagram(self, source: NetworkProcess, to: str, data: bytes) -> None:
        """Send once, without any promise."""
        if len(data) > DATAGRAM_BYTES_MAX:
            raise LocalProtocolError(f"a datagram of {len(data)} bytes; {DATAGRAM_BYTES_MAX} is the bound")
        path, now = self.weather.path(source.name, to), self.weather.now
        self._record(source, HistoryKind.SEND, _described(to, data))
        if path.cut or (now.loss and self._chance.random() < now.loss):
            self._record(source, HistoryKind.LOSE, _described(to, data))
            return
        datagram = Datagram(sender=source.name, incarnation=source.incarnation, data=bytes(data))
        if path.clogged:
            path.hold(source.incarnation, partial(self._pass, to, datagram))
            return
        copies = 2 if now.duplicate and self._chance.random() < now.duplicate else 1
        for _ in range(copies):
            self._pass(to, datagram)

    def _pass(self, to: str, datagram: Datagram) -> None:
        path = self.weather.path(datagram.sender, to)
        nbytes = DATAGRAM_HEADER_BYTES + len(datagram.data)
        at_ns = self.weather.arrival_ns(path, self.weather.now, self.loop.now_ns, nbytes)
        self.loop.act_at(at_ns, partial(self._arrive, to, datagram))

    def _arrive(self, to: str, datagram: Datagram) -> None:
        target = self._find(to)
        if target is None:
            return
        taken = target.take_datagram(datagram)
        self._record(
            target,
            HistoryKind.DELIVER if taken else HistoryKind.DROP,
            _described(datagram.sender, datagram.data),
        )

    # -- links -------------------------------------------------------------------------------------------

    def listen(self, process: NetworkProcess, on_link: OnLink, options: LinkOptions) -> None:
        """Accept links; `on_link` runs in the process."""
        if process in self._listeners:
            raise LocalProtocolError(f"{process} listens already")
        self._listeners[process] = (on_link, options)

    async def dial(self, process: NetworkProcess, to: str, options: LinkOptions, timeout_s: float) -> SimLink:
        """A link to whoever listens as `to`."""
        answer: asyncio.Future[SimLink] = self.loop.create_future()
        self._reliably(process.name, to, SHAKE_BYTES, partial(self._asked, process, to, options, answer))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"{to} did not answer {process.name} in {timeout_s:g} s") from None

    def _asked(
        self, dialer: NetworkProcess, to: str, options: LinkOptions, answer: asyncio.Future[SimLink]
    ) -> None:
        target = self._find(to)
        if dialer.dead:
            return
        if target is None or target not in self._listeners:
            lost = PeerLost(to, "nobody listens at its address")
            self._reliably(to, dialer.name, SHAKE_BYTES, partial(self._answer, dialer, answer, lost))
            return
        on_link, theirs = self._listeners[target]
        near, far = self._join(dialer, options, target, theirs)
        self.loop.call_soon(on_link, far, context=target.context.copy())
        self._reliably(to, dialer.name, SHAKE_BYTES, partial(self._answer, dialer, answer, near))

    def _answer(
        self, dialer: NetworkProcess, answer: asyncio.Future[SimLink], outcome: SimLink | PeerLost
    ) -> None:
        def settle() -> None:
            if answer.done():  # the dialer has given up
                if isinstance(outcome, SimLink):
                    outcome.close()
            elif isinstance(outcome, SimLink):
                answer.set_result(outcome)
            else:
                answer.set_exception(outcome)

        self.loop.call_soon(settle, context=dialer.context.copy())

    def _join(
        self, a: NetworkProcess, a_options: LinkOptions, b: NetworkProcess, b_options: LinkOptions
    ) -> tuple[SimLink, SimLink]:
        a_identity, b_identity = a.identity(a_options), b.identity(b_options)
        near = SimLink(self, a, a_identity, b, b_identity, a_options.limits)
        far = SimLink(self, b, b_identity, a, a_identity, b_options.limits)
        near.join(far)
        far.join(near)
        for link in (near, far):
            links = self._links.setdefault(link.owner, {})
            if len(links) >= LINKS_MAX:
                raise LocalProtocolError(f"{link.owner} has {LINKS_MAX} links open")
            links[link] = None
        return near, far

    def carry(self, link: SimLink, nbytes: int, deliver: Callable[[], None], frame: bytes) -> None:
        """Take a frame, or a goodbye, from one end of a link to the other: in order, without loss."""
        if frame:
            self._record(link.owner, HistoryKind.SEND, _described(link.peer.name, frame))
        self._reliably(link.owner.name, link.peer_process.name, nbytes, deliver)

    def credit(self, link: SimLink, deliver: Callable[[], None]) -> None:
        """Report to the remote end that a frame was taken."""
        path = self.weather.path(link.owner.name, link.peer_process.name)
        if path.stopped:
            path.hold(link.owner.incarnation, deliver)
        else:
            self.loop.act_at(self.loop.now_ns + self.weather.now.latency_ns, deliver)

    def part_that_lands(self) -> float:
        """Of the operation that a death cut off: 0 to 1, without 1."""
        return self._deaths.random()

    def delivered(self, link: SimLink, frame: bytes | bytearray) -> None:
        """A frame was taken from a link."""
        self._record(link.owner, HistoryKind.DELIVER, _described(link.peer.name, frame))

    def forget(self, link: SimLink) -> None:
        """The link has ended on this side."""
        self._links.get(link.owner, {}).pop(link, None)

    def process_ended(self, process: NetworkProcess) -> None:
        """Its links end: some of its last frames never arrive, and each peer learns of it at its own time."""
        self._listeners.pop(process, None)
        lost = PeerLost(process.name, "its end of the link closed without a goodbye")
        for link in self._links.pop(process, {}):
            far = link.far
            under_way = link.frames_sent - far.frames_arrived
            far.peer_dies(far.frames_arrived + self._deaths.randint(0, under_way))
            self._notice(process, far, partial(far.peer_ended, lost))

    def _notice(self, dead: NetworkProcess, witness: SimLink, deliver: Callable[[], None]) -> None:
        path, now = self.weather.path(dead.name, witness.owner.name), self.weather.now
        if path.stopped:
            again = partial(self._notice, dead, witness, deliver)
            path.hold(dead.incarnation, again)
            return
        at_ns = self.loop.now_ns + self._deaths.randint(now.notice_min_ns, now.notice_max_ns)
        self.loop.act_at(max(at_ns, path.last_arrival_ns + 1), deliver)

    def _reliably(self, source: str, target: str, nbytes: int, deliver: Callable[[], None]) -> None:
        path = self.weather.path(source, target)
        if path.stopped:
            path.hold(0, partial(self._reliably, source, target, nbytes, deliver))
        else:
            self.loop.act_at(self.weather.reliable_ns(path, self.loop.now_ns, nbytes), deliver)


def _described(other: str, data: bytes | bytearray) -> str:
    return f"{other} {len(data)} B {zlib.crc32(data):08x}"
