"""`SimLink`: a `zbmd.transport.link.interface.Link` between two simulated processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zbmd.transport.errors import LocalProtocolError, PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.identity import Identity, PeerInfo
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.memory.region import RegionHandle, RemoteRegion, require_owner
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.sim.parts.regions import Operations, SimRegion

if TYPE_CHECKING:
    from zbmd.transport.sim.network import Network
    from zbmd.transport.sim.parts.segment import SimSegment
    from zbmd.transport.sim.world import SimProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What one side of a link brings: its contracts' fingerprints ("id/version" -> digest), job, bounds, and
    what it calls itself at the hello: empty for the name of its process.
    """

    contracts: dict[str, str]
    job: int
    limits: LinkLimits
    hello: str = ""


class SimLink(LinkSide):
    """See `zbmd.transport.link.interface.Link`. Made by `SimProcess.listen` and `dial`.

    Frames keep their order and none is lost: what the network loses is sent again, what it cuts waits. The
    peer's death shows as `PeerLost` after the last frame of its that still arrives. What a process opened of
    memory before the link, the peer reaches by `open_region`.
    """

    def __init__(
        self,
        network: Network,
        owner: SimProcess,
        identity: Identity,
        peer_process: SimProcess,
        peer: PeerInfo,
        limits: LinkLimits,
    ) -> None:
        super().__init__(
            identity=identity,
            peer=peer,
            clock=owner.hybrid_clock,
            wall_ns=owner.wall_ns,
            limits=limits,
            loop=network.loop,
        )
        self.owner = owner
        self.peer_process = peer_process
        self._network = network
        self._far: SimLink | None = None
        self._unread_bytes = 0
        """Sent and not yet taken by the peer: what would lie in the ring."""
        self._sent = 0
        self._arrived = 0
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

    @property
    def frames_sent(self) -> int:
        """Frames that left this end."""
        return self._sent

    @property
    def frames_arrived(self) -> int:
        """Frames that reached this end."""
        return self._arrived

    def _call_soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback, context=self.owner.context.copy())

    # -- sending -----------------------------------------------------------------------------------------

    def _push(self, header: bytes, payload: bytes) -> bool:
        """Send what fits into the window; a frame larger than it goes when the window is empty."""
        frame = header + payload
        if self._unread_bytes and self._unread_bytes + len(frame) > self._limits.ring_bytes:
            return False
        self._unread_bytes += len(frame)
        self._sent += 1
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
        """What this process brought to the link."""
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
        self._sent += 1
        self._network.carry(self, nbytes, partial(self.far.operation_arrives, arrive), b"")

    def operation_arrives(self, arrive: Callable[[float], None]) -> None:
        """What came last from a peer that died in the middle of it arrives in part."""
        self._arrived += 1
        if self.owner.dead or self._closed or self._peer_end is not None:
            return
        if not self._admitted():
            return
        if self._arrivals_max is None or self._arrived <= self._arrivals_max:
            arrive(1.0)
        elif self._arrived == self._arrivals_max + 1:
            arrive(self._network.part_that_lands())

    def answer(self, nbytes: int, deliver: Callable[[], None]) -> None:
        """Tell the far end of the outcome of an operation of its."""
        self._network.carry(self, nbytes, deliver, b"")

    def _lost(self) -> PeerLost:
        return PeerLost(self._peer.name, f"the link to its incarnation {self._peer.incarnation} has ended")

    # -- receiving ---------------------------------------------------------------------------------------

    def arrive(self, frame: bytes) -> None:
        """A frame reached this process: the network says so, outside of every process."""
        self._arrived += 1
        if self.owner.dead or (self._arrivals_max is not None and self._arrived > self._arrivals_max):
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
