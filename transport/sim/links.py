"""`SimLink`: a `zbmd.transport.link.Link` between two simulated processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from zbmd.transport.errors import PeerLost, RemoteProtocolError, ZbmdError
from zbmd.transport.hello import Identity, PeerInfo
from zbmd.transport.link import LinkLimits
from zbmd.transport.link_side import LinkSide

if TYPE_CHECKING:
    from zbmd.transport.sim.network import Network
    from zbmd.transport.sim.world import SimProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What one side of a link brings: its contracts' fingerprints ("id/version" -> digest), job, bounds."""

    contracts: dict[str, str]
    job: int
    limits: LinkLimits


class SimLink(LinkSide):
    """See `zbmd.transport.link.Link`. Made by `SimProcess.listen` and `dial`.

    Frames keep their order and none is lost: what the network loses is sent again, what it cuts waits. The
    peer's death shows as `PeerLost` after the last frame of its that still arrives. It hands over no segment.
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

    def join(self, far: SimLink) -> None:
        """The other end."""
        self._far = far

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

    def _deliver(self, frame: bytes) -> None:
        self._network.delivered(self, frame)
        super()._deliver(frame)

    # -- the end -----------------------------------------------------------------------------------------

    def peer_dies(self, arrivals_max: int) -> None:
        """The peer is dead, which this side does not know yet; so many of its frames arrive in all."""
        self._arrivals_max = arrivals_max

    def peer_ended(self, error: ZbmdError | None) -> None:
        """The end of the peer's side has reached this one."""
        if not self.owner.dead:
            self._peer_ended(error)

    def _say_goodbye(self) -> None:
        self._network.carry(self, 1, partial(self.far.peer_ended, None), b"")

    def _fail(self, error: ZbmdError) -> None:
        lost = PeerLost(self._identity.name, "its end of the link closed without a goodbye")
        self._network.carry(self, 1, partial(self.far.peer_ended, lost), b"")
        self._end(error)

    def _tear_down(self) -> None:
        self._inbox.clear()
        self._network.forget(self)
