"""The network among the processes of a `World`: datagrams, and links."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, PeerLost
from zbmd.transport.sim.links import LinkOptions, SimLink
from zbmd.transport.sim.loop import SimLoop
from zbmd.transport.sim.model import Kind
from zbmd.transport.sim.weather import Weather

if TYPE_CHECKING:
    from zbmd.transport.sim.world import SimProcess

DATAGRAM_BYTES_MAX = 65_507
LINKS_MAX = 4096
"""Ends of links that one process may have open."""
DATAGRAM_HEADER_BYTES = 28
SHAKE_BYTES = 256
"""What either side of a dial sends."""

OnLink = Callable[[SimLink], None]
Recorder = Callable[["SimProcess", Kind, object], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Datagram:
    """What arrived, and from whom."""

    sender: str
    incarnation: int
    data: bytes


class Network:
    """Carries what processes send. `weather` says how well."""

    def __init__(
        self, loop: SimLoop, weather: Weather, find: Callable[[str], SimProcess | None], record: Recorder
    ) -> None:
        self.loop = loop
        self.weather = weather
        self._find = find
        self._record = record
        self._chance: random.Random = loop.rng("sim/datagrams")
        self._deaths: random.Random = loop.rng("sim/link-deaths")
        self._links: dict[SimProcess, dict[SimLink, None]] = {}
        self._listeners: dict[SimProcess, tuple[OnLink, LinkOptions]] = {}

    # -- datagrams ---------------------------------------------------------------------------------------

    def send_datagram(self, source: SimProcess, to: str, data: bytes) -> None:
        """Send once, without any promise."""
        if len(data) > DATAGRAM_BYTES_MAX:
            raise LocalProtocolError(f"a datagram of {len(data)} bytes; {DATAGRAM_BYTES_MAX} is the bound")
        lane, now = self.weather.lane(source.name, to), self.weather.now
        self._record(source, Kind.SEND, _told(to, data))
        if lane.cut or (now.loss and self._chance.random() < now.loss):
            self._record(source, Kind.LOSE, _told(to, data))
            return
        datagram = Datagram(sender=source.name, incarnation=source.incarnation, data=bytes(data))
        if lane.clogged:
            lane.hold(source.incarnation, partial(self._pass, to, datagram))
            return
        copies = 2 if now.duplicate and self._chance.random() < now.duplicate else 1
        for _ in range(copies):
            self._pass(to, datagram)

    def _pass(self, to: str, datagram: Datagram) -> None:
        lane = self.weather.lane(datagram.sender, to)
        nbytes = DATAGRAM_HEADER_BYTES + len(datagram.data)
        at_ns = self.weather.arrival_ns(lane, self.weather.now, self.loop.now_ns, nbytes)
        self.loop.act_at(at_ns, partial(self._arrive, to, datagram))

    def _arrive(self, to: str, datagram: Datagram) -> None:
        target = self._find(to)
        if target is None:
            return
        taken = target.take_datagram(datagram)
        self._record(target, Kind.DELIVER if taken else Kind.DROP, _told(datagram.sender, datagram.data))

    # -- links -------------------------------------------------------------------------------------------

    def listen(self, process: SimProcess, on_link: OnLink, options: LinkOptions) -> None:
        """Accept links; `on_link` runs in the process."""
        if process in self._listeners:
            raise LocalProtocolError(f"{process} listens already")
        self._listeners[process] = (on_link, options)

    async def dial(self, process: SimProcess, to: str, options: LinkOptions, timeout_s: float) -> SimLink:
        """A link to whoever listens as `to`."""
        answer: asyncio.Future[SimLink] = self.loop.create_future()
        self._reliably(process.name, to, SHAKE_BYTES, partial(self._asked, process, to, options, answer))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"{to} did not answer {process.name} in {timeout_s:g} s") from None

    def _asked(
        self, dialer: SimProcess, to: str, options: LinkOptions, answer: asyncio.Future[SimLink]
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
        self, dialer: SimProcess, answer: asyncio.Future[SimLink], outcome: SimLink | PeerLost
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
        self, a: SimProcess, a_options: LinkOptions, b: SimProcess, b_options: LinkOptions
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
            self._record(link.owner, Kind.SEND, _told(link.peer.name, frame))
        self._reliably(link.owner.name, link.peer_process.name, nbytes, deliver)

    def credit(self, link: SimLink, deliver: Callable[[], None]) -> None:
        """Tell the far end that a frame was taken."""
        lane = self.weather.lane(link.owner.name, link.peer_process.name)
        if lane.stopped:
            lane.hold(link.owner.incarnation, deliver)
        else:
            self.loop.act_at(self.loop.now_ns + self.weather.now.latency_ns, deliver)

    def part_that_lands(self) -> float:
        """Of the operation that a death cut off: 0 to 1, without 1."""
        return self._deaths.random()

    def delivered(self, link: SimLink, frame: bytes | bytearray) -> None:
        """A frame was taken from a link."""
        self._record(link.owner, Kind.DELIVER, _told(link.peer.name, frame))

    def forget(self, link: SimLink) -> None:
        """The link has ended on this side."""
        self._links.get(link.owner, {}).pop(link, None)

    def process_ended(self, process: SimProcess) -> None:
        """Its links end: some of its last frames never arrive, and each peer learns of it at its own time."""
        self._listeners.pop(process, None)
        lost = PeerLost(process.name, "its end of the link closed without a goodbye")
        for link in self._links.pop(process, {}):
            far = link.far
            under_way = link.frames_sent - far.frames_arrived
            far.peer_dies(far.frames_arrived + self._deaths.randint(0, under_way))
            self._notice(process, far, partial(far.peer_ended, lost))

    def _notice(self, dead: SimProcess, witness: SimLink, deliver: Callable[[], None]) -> None:
        lane, now = self.weather.lane(dead.name, witness.owner.name), self.weather.now
        if lane.stopped:
            again = partial(self._notice, dead, witness, deliver)
            lane.hold(dead.incarnation, again)
            return
        at_ns = self.loop.now_ns + self._deaths.randint(now.notice_min_ns, now.notice_max_ns)
        self.loop.act_at(max(at_ns, lane.last_arrival_ns + 1), deliver)

    def _reliably(self, source: str, target: str, nbytes: int, deliver: Callable[[], None]) -> None:
        lane = self.weather.lane(source, target)
        if lane.stopped:
            lane.hold(0, partial(self._reliably, source, target, nbytes, deliver))
        else:
            self.loop.act_at(self.weather.reliable_ns(lane, self.loop.now_ns, nbytes), deliver)


def _told(other: str, data: bytes | bytearray) -> str:
    return f"{other} {len(data)} B {zlib.crc32(data):08x}"
