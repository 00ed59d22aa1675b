"""RDMA links between hosts: listening and dialing. Each is set up over an authenticated TCP link.

Needs pyverbs and a device (`rdma_device.open_device`) on both hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from zbmd.transport import tcp
from zbmd.transport._native import now_ns
from zbmd.transport.bulk_limits import BulkLimits
from zbmd.transport.bulk_peer import BulkPeerInfo
from zbmd.transport.endpoint import Endpoint
from zbmd.transport.errors import DeadlineExceeded, LinkClosed, PeerLost, UserError, ZbmdError
from zbmd.transport.frames import FrameHeader
from zbmd.transport.hello import PeerInfo
from zbmd.transport.link import LinkLimits
from zbmd.transport.rdma_device import RdmaDevice
from zbmd.transport.rdma_link import RdmaLink
from zbmd.transport.rdma_queue_pair import QueuePair
from zbmd.transport.rdma_setup import (
    Answer,
    MemoryAt,
    MessageT,
    Offer,
    Ready,
    Refusal,
    decode,
    encode,
    require_fits,
)
from zbmd.transport.segment import Segment
from zbmd.transport.tcp_address import TcpAddress
from zbmd.transport.tcp_link import TcpLink
from zbmd.transport.tcp_settings import TcpSettings

log: Final = structlog.stdlib.get_logger("zbmd.transport.rdma")

if TYPE_CHECKING:
    from zbmd.transport.rdma_peer import RdmaPeer
    from zbmd.transport.rdma_plane import RdmaPlane

OnLink = Callable[[RdmaLink], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What gives links regions, where both sides have it: the peer's cells in our segment are of its slot."""

    plane: RdmaPlane
    slot_of: Callable[[PeerInfo], int]


class _Joined:
    """The memory of one link, while it is set up. None of it if `memory` is None."""

    def __init__(self, memory: Memory | None, peer: PeerInfo, endpoint: Endpoint) -> None:
        self.peer: RdmaPeer | None = None
        self.link: RdmaLink | None = None
        if memory is None:
            return
        self.peer = memory.plane.connect(
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


def open_plane(name: str, address: str | None = None, *, segment: Segment) -> RdmaPlane:
    """The data plane of this process over a device; see `rdma_plane.RdmaPlane`, also for what it raises.

    Raises `UserError`, too, where zbmd was built without libibverbs.
    """
    try:
        from zbmd.transport.rdma_plane import RdmaPlane
    except ImportError as error:
        raise UserError(
            f"memory over RDMA needs libibverbs, and zbmd built where its headers are ({error}): "
            "apt install libibverbs-dev, then install zbmd from its source again."
        ) from error
    return RdmaPlane(name, address, segment=segment)


class _Talk:
    """The messages of one set-up, over its TCP link."""

    def __init__(self, link: TcpLink, deadline_ns: int) -> None:
        self._link = link
        self._deadline_ns = deadline_ns
        self._came: asyncio.Queue[bytes | None] = asyncio.Queue()
        link.on_frame = self._on_frame
        link.on_closed = lambda error: self._came.put_nowait(None)

    def _on_frame(self, header: FrameHeader, payload: memoryview) -> None:
        self._link.on_frame = None  # one at a time: what follows may be for the link
        self._came.put_nowait(bytes(payload))

    def say(self, message: Offer | Answer | Refusal | Ready) -> None:
        self._link.send(encode(message))

    async def hear(self, kind: type[MessageT]) -> MessageT:
        name = self._link.peer.name
        self._link.on_frame = self._on_frame
        try:
            async with asyncio.timeout((self._deadline_ns - now_ns()) / 1e9):
                data = await self._came.get()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{name} did not set up its RDMA link in time: it may be stuck") from error
        if data is None:
            raise PeerLost(name, "it ended while the RDMA link was set up")
        return decode(data, kind, name)


def _for_setup(endpoint: Endpoint) -> Endpoint:
    """What the TCP link carries is no larger or smaller for what the RDMA link may."""
    return dataclasses.replace(endpoint, limits=LinkLimits())


async def dial(
    address: TcpAddress | str,
    endpoint: Endpoint,
    device: RdmaDevice,
    *,
    settings: TcpSettings | None = None,
    timeout_ns: int | None = None,
    memory: Memory | None = None,
) -> RdmaLink:
    """Connect to the listener at `address` and return the link.

    memory: gives it regions, if the listener has it, too. timeout_ns: by default the endpoint's
    `deadlines.dial_ns`. Raises as `tcp.dial`, `RdmaRefused` if the peer has no queue pair for us, and
    `UserError` if our device has none.
    """
    deadline_ns = now_ns() + (endpoint.deadlines.dial_ns if timeout_ns is None else timeout_ns)
    link = await tcp.dial(address, _for_setup(endpoint), settings=settings, timeout_ns=timeout_ns)
    try:
        return await _offer(link, endpoint, device, deadline_ns, memory)
    except BaseException:
        link.close()
        raise


async def _offer(
    link: TcpLink, endpoint: Endpoint, device: RdmaDevice, deadline_ns: int, memory: Memory | None
) -> RdmaLink:
    joined = _Joined(memory, link.peer, endpoint)
    queue_pair = QueuePair(device)
    try:
        talk = _Talk(link, deadline_ns)
        talk.say(Offer(at=queue_pair.at, memory=joined.at))
        answer = await talk.hear(Answer)
        queue_pair.connect(require_fits(answer.at, link.peer.name))
        joined.connect(answer.memory)
        talk.say(Ready())
        return joined.join(RdmaLink(link, queue_pair, device, endpoint=endpoint))
    except BaseException:
        joined.drop()
        queue_pair.end(link.close)
        raise


class Listener:
    """Accepts RDMA links until closed. Made by `listen`."""

    def __init__(
        self,
        on_link: OnLink,
        endpoint: Endpoint,
        device: RdmaDevice,
        timeout_ns: int,
        memory: Memory | None = None,
    ) -> None:
        self._on_link = on_link
        self._endpoint = endpoint
        self._device = device
        self._timeout_ns = timeout_ns
        self._memory = memory
        self._tcp: tcp.Listener | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    async def begin(self, address: TcpAddress | str, settings: TcpSettings | None) -> None:
        """Once, by `listen`."""
        self._tcp = await tcp.listen(
            address, self._welcome, _for_setup(self._endpoint), settings=settings, timeout_ns=self._timeout_ns
        )

    @property
    def listening(self) -> tcp.Listener:
        """What is listened with."""
        assert self._tcp is not None
        return self._tcp

    @property
    def address(self) -> TcpAddress:
        """Where others can dial it."""
        return self.listening.address

    @property
    def half_open(self) -> int:
        """How many connections are in the middle of their set-up."""
        return self.listening.half_open + len(self._under_way)

    def close(self) -> None:
        """Stop listening and end the connections under way; links already made live on. Idempotent."""
        self.listening.close()
        for task in self._under_way:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connections under way have ended, after `close`."""
        await self.listening.wait_closed()
        while self._under_way:
            self.close()
            await asyncio.wait(self._under_way)

    def _welcome(self, link: TcpLink) -> None:
        task = asyncio.ensure_future(self._answer_or_refuse(link))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _answer_or_refuse(self, link: TcpLink) -> None:
        talk = _Talk(link, now_ns() + self._timeout_ns)
        try:
            await self._answer(link, talk)
        except ZbmdError as error:
            log.warning("no RDMA link", peer=link.peer.name, reason=str(error))
            if isinstance(error, UserError) and not link.closed:
                talk.say(Refusal(why=str(error)[:400]))
                with contextlib.suppress(ZbmdError):
                    await link.flush()
            link.close()
        except BaseException:
            link.close()
            raise

    async def _answer(self, link: TcpLink, talk: _Talk) -> None:
        offer = await talk.hear(Offer)
        joined = _Joined(self._memory if offer.memory else None, link.peer, self._endpoint)
        queue_pair = QueuePair(self._device)
        try:
            queue_pair.connect(require_fits(offer.at, link.peer.name))
            joined.connect(offer.memory)
            talk.say(Answer(at=queue_pair.at, memory=joined.at))
            await talk.hear(Ready)
            made = joined.join(RdmaLink(link, queue_pair, self._device, endpoint=self._endpoint))
        except BaseException:
            joined.drop()
            queue_pair.end(lambda: None)
            raise
        self._on_link(made)


async def listen(
    address: TcpAddress | str,
    on_link: OnLink,
    endpoint: Endpoint,
    device: RdmaDevice,
    *,
    settings: TcpSettings | None = None,
    timeout_ns: int | None = None,
    memory: Memory | None = None,
) -> Listener:
    """Listen at `address`, as `tcp.listen`, for links over `device`; `on_link` is called with each.

    memory: gives those links regions whose dialers have it, too. timeout_ns: from a connection to its link,
    by default the endpoint's `deadlines.hello_ns`.
    """
    if timeout_ns is None:
        timeout_ns = endpoint.deadlines.hello_ns
    listener = Listener(on_link, endpoint, device, timeout_ns, memory)
    await listener.begin(address, settings)
    return listener
