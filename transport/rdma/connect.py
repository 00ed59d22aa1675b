"""Links to another host: RDMA where both sides can, else the TCP link that it would have been set up over.

The dialer says first whether it wants RDMA, so both sides know which link it is, and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog

from zbmd.transport.bulk.events import BulkLimits, BulkPeerInfo
from zbmd.transport.errors import DeadlineExceeded, LinkClosed, PeerLost, UserError, ZbmdError
from zbmd.transport.frames import FrameHeader
from zbmd.transport.identity import PeerInfo
from zbmd.transport.link.interface import Endpoint, LinkLimits
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import now_ns
from zbmd.transport.rdma import setup
from zbmd.transport.rdma.link import QueuePair, RdmaLink
from zbmd.transport.rdma.message_device import MessageDevice
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, TcpSettings
from zbmd.transport.tcp.link import TcpLink

if TYPE_CHECKING:
    from zbmd.transport.rdma.peer import RdmaPeer
    from zbmd.transport.rdma.plane import RdmaPlane


# ---- setup over an authenticated TCP link
#
# The dialer offers its queue pairs, the listener answers with its own, and the dialer, once the way has been
# tried, is ready. Either may refuse instead, with its reason, and then both are where they began, with a TCP
# link on which nothing of this is under way any more.

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

    def say(self, message: setup.RdmaOffer | setup.RdmaAnswer | setup.RdmaRefusal | setup.RdmaReady) -> None:
        """Send it."""
        self.link.send(setup.encode_setup(message))

    def refuse(self, why: str) -> None:
        """Say that nothing comes of it, and why."""
        self.say(setup.RdmaRefusal(why=why[: setup.WHY_MAX]))

    async def hear(self, kind: type[setup.MessageT]) -> setup.MessageT:
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
        return setup.decode_setup(data, kind, name)

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
    def at(self) -> setup.MemoryAt | None:
        """For the peer."""
        return None if self.peer is None else self.peer.at

    def connect(self, theirs: setup.MemoryAt | None) -> None:
        """Both have it, or neither."""
        if self.peer is not None and theirs is not None:
            self.peer.connect(theirs)
        else:
            self.drop()

    async def try_route(self, deadline_ns: int) -> None:
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
    talk: SetupChannel, endpoint: Endpoint, device: MessageDevice, memory: RdmaMemory | None
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
        talk.say(setup.RdmaOffer(at=queue_pair.at, memory=joined.at))
        answered = await talk.hear(setup.RdmaAnswer)
        await device.reach(setup.require_fits(answered.at, link.peer.name), talk.deadline_ns)
        queue_pair.connect(answered.at)
        joined.connect(answered.memory)
        await joined.try_route(talk.deadline_ns)
        talk.say(setup.RdmaReady())
        return joined.join(RdmaLink(link, queue_pair, device, endpoint=endpoint))
    except BaseException as error:
        _undo(made, error, talk)
        raise


async def set_up_as_listener(
    talk: SetupChannel, endpoint: Endpoint, device: MessageDevice, memory: RdmaMemory | None
) -> RdmaLink:
    """The listener's side; as `set_up_as_dialer`."""
    link = talk.link
    made: list[Callable[[], None]] = []
    try:
        offered = await talk.hear(setup.RdmaOffer)
        joined = _Joined(memory if offered.memory else None, link.peer, endpoint)
        made.append(joined.drop)
        queue_pair = QueuePair(device)
        made.append(lambda: queue_pair.end(_nothing))
        await device.reach(setup.require_fits(offered.at, link.peer.name), talk.deadline_ns)
        queue_pair.connect(offered.at)
        joined.connect(offered.memory)
        talk.say(setup.RdmaAnswer(at=queue_pair.at, memory=joined.at))
        await talk.hear(setup.RdmaReady)
        return joined.join(RdmaLink(link, queue_pair, device, endpoint=endpoint))
    except BaseException as error:
        _undo(made, error, talk)
        raise


def _undo(made: list[Callable[[], None]], error: BaseException, talk: SetupChannel) -> None:
    """Give everything back, and refuse the peer if the fault is ours."""
    for undo in made:
        undo()
    if isinstance(error, UserError) and not talk.link.closed:
        talk.refuse(str(error))


def _nothing() -> None:
    """Nobody waits for its end."""


log: Final = structlog.stdlib.get_logger("zbmd.transport.rdma")

RemoteLink: TypeAlias = TcpLink | RdmaLink
OnLink = Callable[[RemoteLink, str], None]
"""Takes a link, and why it is of its kind."""
Plain = Callable[[PeerInfo], bool]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """RDMA as a process offers it. memory: gives links regions, if the peer has it; only: no TCP instead."""

    device: MessageDevice
    memory: RdmaMemory | None = None
    only: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoRdma:
    """A process offers none. why: in a line that makes sense on both hosts."""

    why: str


OwnRdma: TypeAlias = Rdma | NoRdma


async def dial(
    address: TcpAddress | str,
    endpoint: Endpoint,
    own: OwnRdma,
    *,
    settings: TcpSettings | None = None,
    timeout_ns: int | None = None,
) -> tuple[RemoteLink, str]:
    """Connect to the listener at `address`: the link, and why it is of its kind.

    timeout_ns: by default the endpoint's `deadlines.dial_ns`. Raises as `tcp.dial`, and if it must be RDMA
    `RdmaRefused` if the peer cannot and `UserError` if we cannot.
    """
    deadline_ns = now_ns() + (endpoint.deadlines.dial_ns if timeout_ns is None else timeout_ns)
    link = await tcp.dial(address, _for_setup(endpoint, own), settings=settings, timeout_ns=timeout_ns)
    talk = SetupChannel(link, deadline_ns)
    try:
        if isinstance(own, NoRdma):
            talk.refuse(own.why)
            return talk.release(), own.why
        try:
            return await set_up_as_dialer(talk, endpoint, own.device, own.memory), _by(own.device)
        except (setup.RdmaRefused, UserError) as error:
            if own.only:
                with contextlib.suppress(ZbmdError):
                    await link.flush()  # it says why
                raise
            return talk.release(), str(error)
    except BaseException:
        link.close()
        raise


class RemoteListener:
    """Accepts links until closed. Made by `listen`."""

    def __init__(
        self, on_link: OnLink, endpoint: Endpoint, own: OwnRdma, timeout_ns: int, plain: Plain | None
    ) -> None:
        self._on_link = on_link
        self._plain = plain
        self._endpoint = endpoint
        self._own = own
        self._timeout_ns = timeout_ns
        self._tcp: tcp.TcpListener | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    async def begin(self, address: TcpAddress | str, settings: TcpSettings | None) -> None:
        """Once, by `listen`."""
        self._tcp = await tcp.listen(
            address,
            self._welcome,
            _for_setup(self._endpoint, self._own),
            settings=settings,
            timeout_ns=self._timeout_ns,
        )

    @property
    def listening(self) -> tcp.TcpListener:
        """Return the TCP listener that it is built on."""
        assert self._tcp is not None
        return self._tcp

    @property
    def address(self) -> TcpAddress:
        """Return the address at which others can dial it."""
        return self.listening.address

    @property
    def half_open(self) -> int:
        """Return how many connections are in the middle of their setup."""
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
        if self._plain is not None and self._plain(link.peer):
            self._on_link(link, f"{link.peer.name} asks for no other")
            return
        task = asyncio.ensure_future(self._set_up(link))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _set_up(self, link: TcpLink) -> None:
        try:
            made, why = await self._answer(SetupChannel(link, now_ns() + self._timeout_ns))
        except ZbmdError as error:
            log.warning("no link between hosts", peer=link.peer.name, reason=str(error))
            if not link.closed:
                with contextlib.suppress(ZbmdError):
                    await link.flush()  # it may say why
            link.close()
        except BaseException:
            link.close()
            raise
        else:
            self._on_link(made, why)

    async def _answer(self, talk: SetupChannel) -> tuple[RemoteLink, str]:
        own = self._own
        if isinstance(own, NoRdma):
            return await _decline(talk, own.why)
        try:
            return await set_up_as_listener(talk, self._endpoint, own.device, own.memory), _by(own.device)
        except (setup.RdmaRefused, UserError) as error:
            if own.only:
                raise
            return talk.release(), str(error)


async def _decline(talk: SetupChannel, why: str) -> tuple[RemoteLink, str]:
    """We have none; the dialer may have refused before us."""
    try:
        await talk.hear(setup.RdmaOffer)
    except setup.RdmaRefused as error:
        why = str(error)
    else:
        talk.refuse(why)
    return talk.release(), why


async def listen(
    address: TcpAddress | str,
    on_link: OnLink,
    endpoint: Endpoint,
    own: OwnRdma,
    *,
    settings: TcpSettings | None = None,
    timeout_ns: int | None = None,
    plain: Plain | None = None,
) -> RemoteListener:
    """Listen at `address`, as `tcp.listen`; `on_link` is called with each link, and why it is of its kind.

    timeout_ns: from a connection to its link, by default the endpoint's `deadlines.hello_ns`. plain: tells
    whose links come by `tcp.dial`, nobody's by default.
    """
    if timeout_ns is None:
        timeout_ns = endpoint.deadlines.hello_ns
    listener = RemoteListener(on_link, endpoint, own, timeout_ns, plain)
    await listener.begin(address, settings)
    return listener


def _by(device: MessageDevice) -> str:
    return f"both sides have RDMA; here by {device.name}"


def _for_setup(endpoint: Endpoint, own: OwnRdma) -> Endpoint:
    """A TCP link that carries the set-up alone is no larger or smaller for what the RDMA link may."""
    only = isinstance(own, Rdma) and own.only
    return dataclasses.replace(endpoint, limits=LinkLimits()) if only else endpoint


# ---- links that are RDMA or nothing
#
# They need pyverbs and a device (`open_rdma_device`) on both hosts. Where one of them may lack it, use `dial`
# and `listen`.

OnRdmaLink = Callable[[RdmaLink], None]


def open_rdma_plane(name: str, address: str | None = None, *, segment: Segment) -> RdmaPlane:
    """Open the data plane of this process over a device. Raises as `rdma.plane.RdmaPlane`.

    Raises `UserError`, too, where zbmd was built without libibverbs.
    """
    try:
        from zbmd.transport.rdma.plane import RdmaPlane
    except ImportError as error:
        raise UserError(
            f"memory over RDMA needs libibverbs, and zbmd built where its headers are ({error}): "
            "apt install libibverbs-dev, then install zbmd from its source again."
        ) from error
    return RdmaPlane(name, address, segment=segment)


async def dial_rdma(
    address: TcpAddress | str,
    endpoint: Endpoint,
    device: MessageDevice,
    *,
    settings: TcpSettings | None = None,
    timeout_ns: int | None = None,
    memory: RdmaMemory | None = None,
) -> RdmaLink:
    """Connect to the listener at `address` and return the link.

    memory: gives it regions, if the listener has it, too. timeout_ns: by default the endpoint's
    `deadlines.dial_ns`. Raises as `tcp.dial`, `RdmaRefused` if the peer has no queue pair for us, and
    `UserError` if our device has none, or nothing comes through.
    """
    own = Rdma(device=device, memory=memory, only=True)
    link, _ = await dial(address, endpoint, own, settings=settings, timeout_ns=timeout_ns)
    assert isinstance(link, RdmaLink)
    return link


async def listen_rdma(
    address: TcpAddress | str,
    on_link: OnRdmaLink,
    endpoint: Endpoint,
    device: MessageDevice,
    *,
    settings: TcpSettings | None = None,
    timeout_ns: int | None = None,
    memory: RdmaMemory | None = None,
) -> RemoteListener:
    """Listen at `address`, as `tcp.listen`, for links over `device`; `on_link` is called with each.

    memory: gives those links regions whose dialers have it, too. timeout_ns: from a connection to its link,
    by default the endpoint's `deadlines.hello_ns`.
    """

    def made(link: RemoteLink, why: str) -> None:
        assert isinstance(link, RdmaLink)
        on_link(link)

    own = Rdma(device=device, memory=memory, only=True)
    return await listen(address, made, endpoint, own, settings=settings, timeout_ns=timeout_ns)
