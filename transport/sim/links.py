"""`SimLink`: a `zbmd.transport.link.interface.Link` between two simulated processes, and its regions.

Operations on regions and frames of one link share one order. Bytes are read from the sender's buffer when
they arrive, as a network card reads them while it sends: a buffer that is reused before its transfer is done
sends something else. When the sender dies, the put that was in flight may land in part, and is not notified.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from zbmd.transport.clock.deadlines import derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LinkFull, LocalProtocolError, PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.identity import Identity, PeerInfo
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import Endpoint, LinkLimits
from zbmd.transport.memory.region import CheckedRegion, RegionHandle, RemoteRegion, require_owner
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.sim.storage import SimSegment

OPERATION_BYTES: Final = 64
"""Overhead of a put, a get or a notification on the wire."""
TRANSFERS_MAX: Final = 1024
"""Transfers of one link under way at once."""
_DEADLINES: Final = derive()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What one side of a link brings: its contracts' fingerprints ("id/version" -> digest), job, bounds, and
    what it calls itself at the hello: empty for the name of its process.
    """

    contracts: dict[str, str]
    job: int
    limits: LinkLimits
    hello: str = ""


class SimTransfer(Transfer):
    """A transfer that can only be awaited: a thread that blocks would stop all of virtual time."""

    __slots__ = ()

    def wait(self, deadline_ns: int = 0) -> None:
        """Raises `LocalProtocolError` unless done."""
        if not self.done:
            raise LocalProtocolError("a simulated process cannot block: await the transfer")
        super().wait()


class Operations:
    """The transfers of one end of a link that are under way."""

    def __init__(self) -> None:
        self._under_way: dict[SimTransfer, None] = {}

    def begin(self, view: memoryview) -> SimTransfer:
        """Raises `LinkFull`."""
        self._under_way = {transfer: None for transfer in self._under_way if not transfer.done}
        if len(self._under_way) >= TRANSFERS_MAX:
            raise LinkFull(f"{TRANSFERS_MAX} transfers are under way; await one of them")
        transfer = SimTransfer(view)
        self._under_way[transfer] = None
        return transfer

    def fail(self, error: PeerLost) -> None:
        """The link has ended: whatever arrives now touches no buffer."""
        under_way, self._under_way = self._under_way, {}
        for transfer in under_way:
            transfer.finish(error)


class LinkOwner(Protocol):
    """The process that owns one end of a link, as the link sees it."""

    name: str
    incarnation: int
    dead: bool
    context: Context
    hybrid_clock: HybridClock
    segment: SimSegment | None

    def wall_ns(self) -> int:
        """The process's wall clock, ns since 1970."""
        ...


class Carrier(Protocol):
    """The network as a link sees it; see `network.Network`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The simulator's loop."""
        ...

    def carry(self, link: SimLink, nbytes: int, deliver: Callable[[], None], frame: bytes, /) -> None:
        """Carry a frame, an operation or a goodbye to the other end: in order, without loss."""
        ...

    def credit(self, link: SimLink, deliver: Callable[[], None], /) -> None:
        """Report to the other end that a frame was taken."""
        ...

    def delivered(self, link: SimLink, frame: bytes | bytearray, /) -> None:
        """A frame was taken from the link."""
        ...

    def part_that_lands(self) -> float:
        """Return the part, in [0, 1), of the operation that a death cut off."""
        ...

    def forget(self, link: SimLink, /) -> None:
        """The link has ended on this side."""
        ...


class SimLink(LinkSide):
    """See `zbmd.transport.link.interface.Link`. Made by `SimProcess.listen` and `dial`.

    Frames keep their order and none is lost: what the network loses is sent again, what it cuts waits. The
    peer's death shows as `PeerLost` after the last frame of its that still arrives. What a process opened of
    memory before the link, the peer reaches by `open_region`.
    """

    carrier = "simulated"

    def __init__(
        self,
        network: Carrier,
        owner: LinkOwner,
        identity: Identity,
        peer_process: LinkOwner,
        peer: PeerInfo,
        limits: LinkLimits,
    ) -> None:
        endpoint = Endpoint(
            identity=identity, cookie=b"", clock=owner.hybrid_clock, limits=limits, deadlines=_DEADLINES
        )
        super().__init__(endpoint, peer, wall_ns=owner.wall_ns, loop=network.loop)
        self.owner = owner
        self.peer_process = peer_process
        self._network = network
        self._far: SimLink | None = None
        self._unread_bytes = 0
        """Sent and not yet taken by the peer: what would lie in the ring."""
        self.frames_sent = 0
        """Frames that left this end."""
        self.frames_arrived = 0
        """Frames that reached this end."""
        self._arrivals_max: int | None = None
        """Once the peer is dead: how many of its frames arrive at all."""
        self._inbox: deque[bytes] = deque()
        self._memory = owner.segment
        self._operations = Operations()

    def join(self, far: SimLink) -> None:
        """The other end."""
        self._far = far
        if self._memory is not None and far._memory is not None:
            self._memory.admit(far._memory.slot, self._peer.incarnation)

    @property
    def far(self) -> SimLink:
        """The other end."""
        assert self._far is not None
        return self._far

    def _call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback, context=self.owner.context.copy())

    # -- sending -----------------------------------------------------------------------------------------

    def _push(self, header: bytes, payload: bytes) -> bool:
        """Send what fits into the window; a frame larger than it goes when the window is empty."""
        frame = header + payload
        if self._unread_bytes and self._unread_bytes + len(frame) > self._limits.ring_bytes:
            return False
        self._unread_bytes += len(frame)
        self.frames_sent += 1
        self._network.carry(self, len(frame), partial(self.far.arrive, frame), frame)
        return True

    def credit(self, nbytes: int) -> None:
        """The peer took so many bytes."""
        self._unread_bytes -= nbytes
        if not self._closed and not self.owner.dead:
            self._call_soon(self._pump)

    # -- regions -----------------------------------------------------------------------------------------

    @property
    def own_memory(self) -> SimSegment:
        """The memory that this process brought to the link."""
        assert self._memory is not None, "a region was opened, so both have one"
        return self._memory

    def open_region(self, handle: RegionHandle) -> RemoteRegion:
        """See `zbmd.transport.link.interface.Link.open_region`."""
        theirs = self.far._memory
        if self._memory is None or theirs is None:
            raise LocalProtocolError(f"no memory came with the link to {self._peer.name}: nothing to open")
        require_owner(handle, slot=theirs.slot, incarnation=self._peer.incarnation)
        return SimRegion(self, handle)

    def require_peer(self) -> None:
        """Raise `PeerLost` once this end knows that there is nobody behind the link."""
        if self._closed or self._peer_end is not None:
            raise self._lost()

    def transfer(self, view: memoryview) -> Transfer:
        """One that fails when the link ends. Raises `LinkFull`."""
        return self._operations.begin(view)

    def send_operation(self, nbytes: int, arrive: Callable[[float], None]) -> None:
        """In the order of frames. `arrive(1.0)` runs when it has reached the peer, if it does."""
        self.frames_sent += 1
        self._network.carry(self, nbytes, partial(self.far.operation_arrives, arrive), b"")

    def operation_arrives(self, arrive: Callable[[float], None]) -> None:
        """Deliver a part of the last operation of a peer that died during it."""
        self.frames_arrived += 1
        if self.owner.dead or self._closed or self._peer_end is not None:
            return
        if not self._admitted():
            return
        if self._arrivals_max is None or self.frames_arrived <= self._arrivals_max:
            arrive(1.0)
        elif self.frames_arrived == self._arrivals_max + 1:
            arrive(self._network.part_that_lands())

    def answer(self, nbytes: int, deliver: Callable[[], None]) -> None:
        """Report the outcome of an operation to the remote end."""
        self._network.carry(self, nbytes, deliver, b"")

    def _lost(self) -> PeerLost:
        return PeerLost(self._peer.name, f"the link to its incarnation {self._peer.incarnation} has ended")

    # -- receiving ---------------------------------------------------------------------------------------

    def arrive(self, frame: bytes) -> None:
        """A frame reached this process: the network says so, outside of every process."""
        self.frames_arrived += 1
        if self.owner.dead or (self._arrivals_max is not None and self.frames_arrived > self._arrivals_max):
            return
        self._inbox.append(frame)
        self._schedule_drain()

    def _next_frame(self) -> bytes | None:
        if not self._inbox:
            return None
        frame = self._inbox.popleft()
        if len(frame) > self._limits.frame_bytes_max:
            raise RemoteProtocolError(
                f"a frame of {len(frame)} bytes from {self._peer.name}, over the bound of "
                f"{self._limits.frame_bytes_max}"
            )
        self._network.credit(self, partial(self.far.credit, len(frame)))
        return frame

    def _park(self) -> bool:
        return not self._inbox

    def _deliver(self, frame: bytes | bytearray) -> None:
        self._network.delivered(self, frame)
        super()._deliver(frame)

    # -- the end -----------------------------------------------------------------------------------------

    def peer_dies(self, arrivals_max: int) -> None:
        """The peer is dead, which this side does not know yet; so many of its frames arrive in all."""
        self._arrivals_max = arrivals_max

    def peer_ended(self, error: ZbmdError | None) -> None:
        """The end of the peer's side has reached this one."""
        if self.owner.dead:
            return
        if (
            error is not None
            and self._memory is not None
            and self.far._memory is not None
            and self._admitted()
        ):
            # Nothing of the dead lands behind its link's end: this is the notice and the proof in one.
            self._memory.end_proven(self.far._memory.slot)
            self._memory.set_lost(self.far._memory.slot)
        self._operations.fail(self._lost())
        self._peer_ended(error)

    def _say_goodbye(self) -> None:
        self._network.carry(self, 1, partial(self.far.peer_ended, None), b"")

    def _fail(self, error: ZbmdError) -> None:
        lost = PeerLost(self._identity.name, "its end of the link closed without a goodbye")
        self._network.carry(self, 1, partial(self.far.peer_ended, lost), b"")
        self._end(error)

    def _admitted(self) -> bool:
        return self.own_memory.admits(self.far.own_memory.slot, self._peer.incarnation)

    def _tear_down(self) -> None:
        self._inbox.clear()
        self._operations.fail(self._lost())
        self._network.forget(self)


class SimRegion(CheckedRegion):
    """See `zbmd.transport.memory.region.RemoteRegion`. Made by `SimLink.open_region`."""

    def __init__(self, link: SimLink, handle: RegionHandle) -> None:
        super().__init__(handle)
        self._link = link

    def _put(self, view: memoryview, offset: int, channel: int, value: int, owner: object) -> Transfer:
        transfer = self._link.transfer(view)
        arrive = partial(self._put_arrives, transfer, view, offset, channel, value)
        self._link.send_operation(OPERATION_BYTES + view.nbytes, arrive)
        return transfer

    def _get(self, view: memoryview, offset: int, owner: object) -> Transfer:
        transfer = self._link.transfer(view)
        self._link.send_operation(OPERATION_BYTES, partial(self._get_arrives, transfer, view, offset))
        return transfer

    def _notify(self, channel: int, value: int) -> None:
        self._link.send_operation(OPERATION_BYTES, partial(self._notify_arrives, channel, value))

    def _check_usable(self) -> None:
        super()._check_usable()
        self._link.require_peer()

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview | None:
        """None: simulated processes share no memory."""
        self._check_open()
        return super().view(offset, nbytes)

    # -- at the owner, when the network says so; `landed` is the part that made it, 1 if all did ---------

    def _put_arrives(
        self, transfer: Transfer, view: memoryview, offset: int, channel: int, value: int, landed: float
    ) -> None:
        if transfer.done:  # the sender's end of the link is closed, and its buffer may be another's
            return
        far = self._link.far
        try:
            target = far.own_memory.regions.resolve(self._handle, offset, view.nbytes, write=True)
        except RemoteProtocolError as error:
            far.answer(OPERATION_BYTES, partial(transfer.finish, error))
            return
        count = int(view.nbytes * landed)
        target[:count] = view[:count]
        if landed == 1.0:
            far.own_memory.notified(self._link.own_memory.slot, channel, value)
            far.answer(OPERATION_BYTES, transfer.finish)

    def _get_arrives(self, transfer: Transfer, view: memoryview, offset: int, landed: float) -> None:
        far = self._link.far
        if landed < 1.0:
            return
        try:
            data = bytes(far.own_memory.regions.resolve(self._handle, offset, view.nbytes, write=False))
        except RemoteProtocolError as error:
            far.answer(OPERATION_BYTES, partial(transfer.finish, error))
            return
        far.answer(OPERATION_BYTES + len(data), partial(_fill, transfer, view, data))

    def _notify_arrives(self, channel: int, value: int, landed: float) -> None:
        if landed == 1.0:
            self._link.far.own_memory.notified(self._link.own_memory.slot, channel, value)


def _fill(transfer: Transfer, view: memoryview, data: bytes) -> None:
    if not transfer.done:
        view[:] = data
        transfer.finish()
