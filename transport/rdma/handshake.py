"""The setup of an RDMA link over an authenticated TCP link.

The dialer offers its queue pairs, the listener answers with its own, and the dialer, once the way has been
tried, is ready. Either may refuse instead, with its reason, and then both are where they began, with a TCP
link on which nothing of this is under way any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from zbmd.transport.bulk.limits import BulkLimits, BulkPeerInfo
from zbmd.transport.errors import DeadlineExceeded, LinkClosed, PeerLost, UserError, ZbmdError
from zbmd.transport.frames import FrameHeader
from zbmd.transport.identity import PeerInfo
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.native._native import now_ns
from zbmd.transport.rdma.link import RdmaLink
from zbmd.transport.rdma.queue_pair import QueuePair
from zbmd.transport.rdma.setup import (
    WHY_MAX,
    MemoryAt,
    MessageT,
    RdmaAnswer,
    RdmaOffer,
    RdmaReady,
    RdmaRefusal,
    decode_setup,
    encode_setup,
    require_fits,
)
from zbmd.transport.tcp.link import TcpLink

if TYPE_CHECKING:
    from zbmd.transport.rdma.message_device import RdmaDevice
    from zbmd.transport.rdma.peer import RdmaPeer
    from zbmd.transport.rdma.plane import RdmaPlane

TRIAL_SHARE: Final = 2
"""The trial of the way may take this part of the time that is left: who dials is to learn why it fails."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RdmaMemory:
    """Give RDMA links regions, if the peer has it too. slot_of: the slot of a peer's cells in our segment."""

    plane: RdmaPlane
    slot_of: Callable[[PeerInfo], int]


class RdmaUnreachable(UserError):
    """Both sides have RDMA, and what one sends does not reach the other."""


class SetupChannel:
    """The messages of one set-up, over its TCP link."""

    def __init__(self, link: TcpLink, deadline_ns: int) -> None:
        self.link = link
        self.deadline_ns = deadline_ns
        self._came: asyncio.Queue[bytes | None] = asyncio.Queue()
        link.on_frame = self._on_frame
        link.on_closed = lambda error: self._came.put_nowait(None)

    def _on_frame(self, header: FrameHeader, payload: memoryview) -> None:
        self.link.on_frame = None  # one at a time: what follows may be for the link
        self._came.put_nowait(bytes(payload))

    def say(self, message: RdmaOffer | RdmaAnswer | RdmaRefusal | RdmaReady) -> None:
        """Send it."""
        self.link.send(encode_setup(message))

    def refuse(self, why: str) -> None:
        """Say that nothing comes of it, and why."""
        self.say(RdmaRefusal(why=why[:WHY_MAX]))

    async def hear(self, kind: type[MessageT]) -> MessageT:
        """The peer's next message.

        Raises `RdmaRefused`, `PeerLost`, `DeadlineExceeded`, and as `decode_setup`.
        """
        name = self.link.peer.name
        self.link.on_frame = self._on_frame
        try:
            async with asyncio.timeout((self.deadline_ns - now_ns()) / 1e9):
                data = await self._came.get()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{name} did not set up its RDMA link in time: it may be stuck") from error
        if data is None:
            raise PeerLost(name, "it ended while the RDMA link was set up")
        return decode_setup(data, kind, name)

    def release(self) -> TcpLink:
        """The link, for other use: the set-up is over. Raises `PeerLost` if it has ended."""
        link = self.link
        link.on_frame = link.on_closed = None
        if link.closed:
            raise PeerLost(link.peer.name, "it ended while the link was set up")
        return link


class _Joined:
    """The memory of one link, while it is set up. None of it if `memory` is None."""

    def __init__(self, memory: RdmaMemory | None, peer: PeerInfo, endpoint: Endpoint) -> None:
        self.peer: RdmaPeer | None = None
        self.link: RdmaLink | None = None
        if memory is None:
            return
        from zbmd.transport.rdma.peer import RdmaPeer

        self.peer = RdmaPeer(
            memory.plane,
            BulkPeerInfo(name=peer.name, slot=memory.slot_of(peer), incarnation=peer.incarnation),
            limits=BulkLimits(close_ns=endpoint.deadlines.flush_ns),
            on_ended=self._on_ended,
        )

    @property
    def at(self) -> MemoryAt | None:
        """For the peer."""
        return None if self.peer is None else self.peer.at

    def connect(self, theirs: MemoryAt | None) -> None:
        """Both have it, or neither."""
        if self.peer is not None and theirs is not None:
            self.peer.connect(theirs)
        else:
            self.drop()

    async def try_way(self, deadline_ns: int) -> None:
        """Read something of the peer, so that what keeps packets back is found now.

        Raises `RdmaUnreachable`.
        """
        if self.peer is None:
            return
        trial = self.peer.trial()
        try:
            async with asyncio.timeout((deadline_ns - now_ns()) / TRIAL_SHARE / 1e9):
                await trial
        except (TimeoutError, ZbmdError) as error:
            raise RdmaUnreachable(
                f"nothing comes through from the RDMA device here to that of {self.peer.info.name} "
                f"({error or 'no answer in time'}): is UDP port 4791 open, and is there a route between "
                "their addresses?"
            ) from error

    def drop(self) -> None:
        """It will not be used."""
        if self.peer is not None:
            self.peer.abort(LinkClosed("no link came of it"))
            self.peer = None

    def join(self, link: RdmaLink) -> RdmaLink:
        """The link stands."""
        self.link = link
        if self.peer is not None:
            link.carry(self.peer)
        return link

    def _on_ended(self, error: ZbmdError | None) -> None:
        if self.link is not None:
            self.link.memory_ended(error)


async def set_up_as_dialer(
    talk: SetupChannel, endpoint: Endpoint, device: RdmaDevice, memory: RdmaMemory | None
) -> RdmaLink:
    """The dialer's side: the link.

    Raises `RdmaRefused` or `UserError` if the peer or we cannot, which both know then; else the TCP link is
    of no use any more: `PeerLost`, `DeadlineExceeded`, `RemoteProtocolError`.
    """
    link = talk.link
    made: list[Callable[[], None]] = []
    try:
        joined = _Joined(memory, link.peer, endpoint)
        made.append(joined.drop)
        queue_pair = QueuePair(device)
        made.append(lambda: queue_pair.end(_nothing))
        talk.say(RdmaOffer(at=queue_pair.at, memory=joined.at))
        set_up_as_listener = await talk.hear(RdmaAnswer)
        await device.reach(require_fits(set_up_as_listener.at, link.peer.name), talk.deadline_ns)
        queue_pair.connect(set_up_as_listener.at)
        joined.connect(set_up_as_listener.memory)
        await joined.try_way(talk.deadline_ns)
        talk.say(RdmaReady())
        return joined.join(RdmaLink(link, queue_pair, device, endpoint=endpoint))
    except BaseException as error:
        _undo(made, error, talk)
        raise


async def set_up_as_listener(
    talk: SetupChannel, endpoint: Endpoint, device: RdmaDevice, memory: RdmaMemory | None
) -> RdmaLink:
    """The listener's side; as `set_up_as_dialer`."""
    link = talk.link
    made: list[Callable[[], None]] = []
    try:
        offered = await talk.hear(RdmaOffer)
        joined = _Joined(memory if offered.memory else None, link.peer, endpoint)
        made.append(joined.drop)
        queue_pair = QueuePair(device)
        made.append(lambda: queue_pair.end(_nothing))
        await device.reach(require_fits(offered.at, link.peer.name), talk.deadline_ns)
        queue_pair.connect(offered.at)
        joined.connect(offered.memory)
        talk.say(RdmaAnswer(at=queue_pair.at, memory=joined.at))
        await talk.hear(RdmaReady)
        return joined.join(RdmaLink(link, queue_pair, device, endpoint=endpoint))
    except BaseException as error:
        _undo(made, error, talk)
        raise


def _undo(made: list[Callable[[], None]], error: BaseException, talk: SetupChannel) -> None:
    """What was made is given back; the peer is told what is ours to tell."""
    for undo in made:
        undo()
    if isinstance(error, UserError) and not talk.link.closed:
        talk.refuse(str(error))


def _nothing() -> None:
    """Nobody waits for its end."""
