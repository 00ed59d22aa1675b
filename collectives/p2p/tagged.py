"""Send and receive with tags: the driver of a `TagMatcher`, over the links of the group's members.

A small array travels in the message. A large one is lent: the message says where it lies in the sender's
arena, and the receiver reads it from there, by mapping or over the network, and checks its digest, because a
sender that cancels may use that memory again. One that lies elsewhere is copied to the arena piece by piece,
as it is received (`pieces`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, assert_never

import numpy as np
import structlog
import xxhash

from zbmd.actors.contracts import Contract
from zbmd.actors.errors import ActorError
from zbmd.actors.rank.member import Worker
from zbmd.collectives.communicator.operations import timeout_ns
from zbmd.collectives.device.arrays import CallersArray
from zbmd.collectives.device.arrays_in import (
    Array,
    Target,
    as_array,
    as_bytes,
    as_placed,
    packed,
    require_size,
    require_writeable,
)
from zbmd.collectives.device.host_copy import Landings, drained
from zbmd.collectives.errors import MembersLost, OperationAborted
from zbmd.collectives.p2p.on_loop import OnLoop
from zbmd.collectives.p2p.pieces import Incoming
from zbmd.collectives.p2p.streams import INLINE_BYTES_MAX, Lending, Piece, Reading
from zbmd.collectives.p2p.tag_machine import (
    Arrived,
    Cause,
    FailReceive,
    FailSend,
    GaveBack,
    Match,
    MemberLeft,
    ReceivePosted,
    ReceiveWithdrawn,
    SendPosted,
    Sent,
    TagAction,
    TagEvent,
    TakenThere,
    TellTaken,
    Took,
    Transmit,
)
from zbmd.collectives.p2p.wire import (
    CALLS_MAX,
    REASON_CHARS_MAX,
    MemberEnds,
    TaggedAsked,
    TaggedClosed,
    TaggedFailed,
    TaggedGreeting,
    TaggedMessage,
    TaggedPiece,
    TaggedTaken,
    described,
    dtype_of,
)
from zbmd.collectives.programs.reductions import dtype_code
from zbmd.transport.clock.patience import patient_timeout
from zbmd.transport.errors import (
    DeadlineExceeded,
    LinkClosed,
    PeerLost,
    RemoteProtocolError,
    UserError,
    ZbmdError,
)
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.rdma.remote_memory import RemoteMemory

log: Final = structlog.stdlib.get_logger("zbmd.collectives.tagged")

ACTOR_NAME = "tagged"
TAG_MAX = 2**31 - 1
CLOSED: Final = "closed the group"
REPORTS_S_MAX: Final = 1.0
"""Seconds that a failed operation waits to learn from the other members what has happened."""
CLOSE_S_MAX = 1.0
"""Seconds for sending the news of a close: a member that does not read finds out by the next view."""

FromMember: TypeAlias = (
    TaggedMessage | TaggedTaken | TaggedAsked | TaggedPiece | TaggedClosed | TaggedFailed | TaggedGreeting
)


Check: TypeAlias = Callable[[TaggedMessage, int], None]
"""Takes a message and its sender; what it raises leaves the message for the next receive."""


class Received(NamedTuple):
    """A received array, the rank that sent it, and its tag."""

    array: Any
    source: int
    tag: int


@dataclass(slots=True)
class _Send:
    array: Array
    tag: int
    done: asyncio.Future[None]
    to: int | None = None
    """To whom it was transmitted."""
    number: int = 0
    label: str = ""
    given_up: bool = False
    """Its caller may change the array."""
    lending: Lending | None = None

    @property
    def transmitted(self) -> bool:
        """Whether its message is on its way."""
        return self.to is not None


class _GivenUp(OperationAborted):
    """The sender gave the message up: no receive can have it."""


class TaggedEnd(ABC):
    """Tagged messages among the members of one group, from this rank's side; used on the worker's loop.

    stamp, channel: what tells the group's messages from those of others.
    """

    def __init__(self, worker: Worker, *, stamp: int, channel: int) -> None:
        self.on_loop: Final = OnLoop()
        self._worker = worker
        self._stamp, self._channel = stamp, channel
        self._keys = itertools.count(1)
        self._sends: dict[int, _Send] = {}
        self._lent: dict[tuple[int, int], _Send] = {}
        """Large sends under way, by receiver and the message's number."""
        self._readings: dict[tuple[int, int], Reading] = {}
        """Messages in pieces that are being received, by sender and number."""
        self._receives: dict[int, asyncio.Future[Match]] = {}
        self._here: dict[tuple[int, int], TaggedMessage] = {}
        self._outbox: asyncio.Queue[tuple[int, Contract]] = asyncio.Queue()  # bounded by the machine
        self._ended: ZbmdError | None = None
        self.ends: Final = MemberEnds()
        self._ending: set[tuple[int, int]] = set()
        """Processes whose links have ended, with something that came over them still to be taken, perhaps."""
        self._landings = Landings(worker.segment)
        self._landing = asyncio.Lock()
        """For one array of a device at a time, and so that messages stay in the order of their calls."""
        self._sender = asyncio.create_task(self._send_all(), name="zbmd-tagged")

    @abstractmethod
    def _handle(self, event: TagEvent | MemberLeft) -> None:
        """Give the machine an event, and perform what it answers."""

    @abstractmethod
    def _others(self) -> Sequence[int]:
        """Return the members that hear of the close."""

    @abstractmethod
    def _lost(self, rank: int, incarnation: int) -> None:
        """The link to a process has ended. All that came over it has been taken."""

    @abstractmethod
    def _failure(self, ranks: tuple[int, ...], cause: Cause) -> ZbmdError:
        """Return the error of a call that needs these ranks."""

    def _greeted(self, source: int, greeting: TaggedGreeting) -> None:
        raise RemoteProtocolError(f"rank {source} greets a group of one epoch: {greeting}")

    @property
    def ended(self) -> bool:
        """Whether nothing is sent or taken any more."""
        return self._ended is not None

    async def send(self, x: Any, to: int, tag: int, *, label: str = "") -> None:
        """See `Group.send`. x: as `taken` gives it. label: what it is in its caller's words."""
        require_tag(tag)
        async with self._landing:  # who is behind an array that is on its way from a device waits for it
            send = await self._made(x, tag)
            send.label = label
            key = next(self._keys)
            self._sends[key] = send
            try:
                self._put(SendPosted(key=key, to=to, tag=tag))
            except ZbmdError:
                self._sends.pop(key, None)
                raise
        # A small one may be sent again by its caller at once, unless so many are under way that it waits.
        if send.array.nbytes > INLINE_BYTES_MAX or not send.transmitted:
            try:
                await asyncio.shield(send.done)
            except asyncio.CancelledError:
                send.given_up = True
                raise

    async def _made(self, x: Any, tag: int) -> _Send:
        """Return the send of `x`. Awaits nothing if it lies on the host."""
        landing, done = self._landings.of(x), asyncio.get_running_loop().create_future()
        if landing is None:
            return _Send(_own(as_array(x, "x"), lasts=True), tag, done)

        def land() -> Array:
            try:
                return _own(landing.land()[0], lasts=False)
            finally:
                landing.end()

        return _Send(await drained(land), tag, done)

    async def receive(
        self, source: int | None, tag: int | None, out: Any, check: Check | None = None
    ) -> Received:
        """See `Group.recv`. `out`: as returned by `taken`. check: raises if it cannot take a message."""
        if tag is not None:
            require_tag(tag)
        key, matched = next(self._keys), asyncio.get_running_loop().create_future()
        self._receives[key] = matched
        try:
            self._put(ReceivePosted(key=key, source=source, tag=tag))
            match = await matched
        except asyncio.CancelledError:
            self._withdraw(key, matched)
            raise
        finally:
            del self._receives[key]
        place, end = (match.source, match.number), Took(source=match.source, number=match.number)
        message = self._here[place]
        try:
            if check is not None:
                check(message, match.source)
            array = await self._fetch(message, match.source, out)
        except RemoteProtocolError as error:
            self._end(error)
            raise
        except _GivenUp:
            del self._here[place]
            if self._ended is None:
                self._put(end)
            raise
        except BaseException as error:
            if self._ended is None:
                self._give_back(match, error)
            raise
        del self._here[place]
        if self._ended is None:
            self._put(end)
        return Received(array, match.source, message.tag)

    def _give_back(self, match: Match, error: BaseException) -> None:
        """Give a message that could not be taken, because of `error`, to the next receive that fits."""
        del error
        self._put(GaveBack(source=match.source, number=match.number))

    def _withdraw(self, key: int, matched: asyncio.Future[Match]) -> None:
        if self._ended is not None:
            return
        if matched.done() and not matched.cancelled():
            match = matched.result()
            self._put(GaveBack(source=match.source, number=match.number))
        else:
            self._put(ReceiveWithdrawn(key=key))

    def give_up(self, reason: str = "") -> None:
        """End what waits, as `close` does, soon. From any thread; `close` must still be called."""
        self.on_loop.soon(lambda: self._part(reason))

    def say_failed(self, reason: str, calls: Sequence[str]) -> None:
        """Report to the members, soon, that the operations of this one have ended. From any thread."""
        failed = TaggedFailed(
            epoch=self._stamp,
            channel=self._channel,
            reason=reason[:REASON_CHARS_MAX],
            calls=tuple(call[:REASON_CHARS_MAX] for call in calls[:CALLS_MAX]),
        )
        self.on_loop.soon(lambda: self._say_all(failed))

    def wait_for_reports(self, until: Callable[[], bool]) -> None:
        """Wait a moment until the members' `ends` have what `until` asks for; not on the loop's thread."""
        if not self.on_loop.is_here:
            self.ends.wait(until, REPORTS_S_MAX)

    def _say_all(self, message: TaggedFailed | TaggedClosed) -> None:
        if self._ended is None:
            for member in self._others():
                self._outbox.put_nowait((member, message))

    def _part(self, reason: str = "") -> None:
        if self._ended is None:
            self._say_all(TaggedClosed(epoch=self._stamp, channel=self._channel, reason=reason))
            self._end(OperationAborted("the group is closed: use the next view's"))

    async def close(self, reason: str = "") -> None:
        """End what waits with `OperationAborted`, here and on the members. Idempotent."""
        self._part(reason)
        self._outbox.put_nowait((self._worker.rank, TaggedClosed(epoch=0, channel=0)))  # the last
        await asyncio.wait([self._sender], timeout=CLOSE_S_MAX)
        self._sender.cancel()
        await asyncio.wait([self._sender])
        async with self._landing:
            self._landings.close()

    def link_ends(self, rank: int, incarnation: int) -> None:
        """Note that the link to a process has ended: `link_ended` follows, after what arrived over it."""
        self._ending.add((rank, incarnation))

    def link_ended(self, rank: int, incarnation: int) -> None:
        """Note that everything that arrived over the link to a process has been taken."""
        if (rank, incarnation) in self._ending:
            self._ending.remove((rank, incarnation))
            if self._ended is None:
                self._lost(rank, incarnation)

    def take(self, source: int, message: FromMember) -> None:
        """Take a member's message."""
        if self._ended is not None:
            return
        try:
            match message:
                case TaggedMessage(number=number, tag=tag):
                    self._here[source, number] = message
                    self._put(Arrived(source=source, number=number, tag=tag))
                case TaggedTaken(number=number):
                    self._put(TakenThere(by=source, number=number))
                case TaggedAsked():
                    self._asked(source, message)
                case TaggedPiece(number=number):
                    self._piece(source, message)
                case TaggedClosed(reason=reason):
                    self.ends.note(source, reason or CLOSED)
                    self._handle(MemberLeft(source=source))
                case TaggedFailed(reason=reason, calls=calls):
                    self.ends.note(source, reason, calls)
                case TaggedGreeting():
                    self._greeted(source, message)
        except RemoteProtocolError as error:
            self._end(error)

    def _put(self, event: TagEvent) -> None:
        if self._ended is not None:
            raise self._ended
        self._handle(event)

    def _perform(self, action: TagAction) -> None:
        match action:
            case Transmit(key=key, to=to, number=number):
                self._transmit(self._sends[key], to, number)
            case Match(key=key, source=source, number=number):
                if self._receives[key].done():  # cancelled in this very turn
                    self._put(GaveBack(source=source, number=number))
                else:
                    self._receives[key].set_result(action)
            case TellTaken(to=to, number=number):
                self._say(to, TaggedTaken(epoch=self._stamp, channel=self._channel, number=number))
            case Sent(key=key):
                self._let_go(self._sends.pop(key), None)
            case FailSend(key=key, to=to, cause=cause):
                self._let_go(self._sends.pop(key), self._failure((to,), cause))
            case FailReceive(key=key, ranks=ranks, cause=cause):
                if not self._receives[key].done():
                    self._receives[key].set_exception(self._failure(ranks, cause))
            case _:
                assert_never(action)

    def _transmit(self, send: _Send, to: int, number: int) -> None:
        send.to, send.number = to, number
        if send.array.nbytes <= INLINE_BYTES_MAX:
            first = Piece(send.array.tobytes())
        elif send.given_up:  # its bytes may have changed: a receiver that asks for more gets an error
            self._lent[to, number], first = send, Piece(b"\0")
        else:
            self._lent[to, number] = send
            send.lending = Lending(self._worker, as_bytes(send.array.reshape(-1), "x"))
            first = send.lending.first
        message = TaggedMessage(
            epoch=self._stamp,
            channel=self._channel,
            number=number,
            tag=send.tag,
            dtype=dtype_code(send.array.dtype),
            shape=send.array.shape,
            data=first.data,
            lent=first.lent,
            digest=first.digest,
            label=send.label,
        )
        self._say(to, message)

    def _asked(self, source: int, asked: TaggedAsked) -> None:
        """Send a receiver the pieces that it is ready for."""
        send = self._lent.get((source, asked.number))
        if send is None:
            return
        if send.given_up or send.lending is None:
            self._say_piece(source, asked, 0, Piece(b""))
            return
        for number, piece in send.lending.asked(asked.reading, asked.read):
            self._say_piece(source, asked, number, piece)

    def _say_piece(self, to: int, asked: TaggedAsked, number: int, piece: Piece) -> None:
        message = TaggedPiece(
            epoch=self._stamp,
            channel=self._channel,
            number=asked.number,
            reading=asked.reading,
            piece=number,
            data=piece.data,
            lent=piece.lent,
            digest=piece.digest,
        )
        self._say(to, message)

    def _say(self, to: int, message: FromMember) -> None:
        if to == self._worker.rank:
            asyncio.get_running_loop().call_soon(self.take, to, message)
        else:
            self._outbox.put_nowait((to, message))

    async def _send_all(self) -> None:
        while True:
            to, message = await self._outbox.get()
            if to == self._worker.rank:
                return
            # The notice of a member's end reports it, not a failed send.
            with contextlib.suppress(PeerLost, LinkClosed, ActorError):
                await self._worker.system.ref(f"rank{to}/{ACTOR_NAME}").tell(message)

    async def _fetch(self, message: TaggedMessage, source: int, out: Any) -> Any:
        """Return the array of a message, in `out` or in a new one. Raises `RemoteProtocolError`,
        `UserError`."""
        size, dtype = described(message, source), dtype_of(message.dtype)
        if isinstance(out, CallersArray):
            require_writeable(require_size(as_placed(out, "out"), dtype, size, "out"), "out")
            host = await self._fetch(message, source, None)
            async with self._landing:
                await drained(lambda: self._landings.write(out, host))
            return out.given
        result = np.empty(message.shape, dtype) if out is None else out
        target = Target(require_size(as_array(result, "out"), dtype, size, "out"), "out")
        flat = as_bytes(target.flat, "out")
        await self._read(message, source, flat)
        target.bring_home()
        return result

    async def _read(self, message: TaggedMessage, source: int, flat: Array) -> None:
        """Fill `flat` with the bytes of a message; ask for those that did not come with it."""
        first = Piece(message.data, message.lent, message.digest)
        if first.nbytes == flat.nbytes:
            await self._get(first, source, flat)
            return
        incoming = Incoming(flat.nbytes, first.nbytes, next(self._keys))
        key, reading = (source, message.number), Reading(incoming)
        self._readings[key] = reading
        try:
            self._ask(source, message.number, incoming)
            await self._get(first, source, flat[: first.nbytes])
            while not incoming.whole:
                piece = await reading.next()
                await self._get(piece, source, flat[incoming.offset : incoming.offset + piece.nbytes])
                incoming.took(piece.nbytes)
                if not incoming.whole:
                    self._ask(source, message.number, incoming)
                    await asyncio.sleep(0)  # so that it goes before the next is copied
        finally:
            del self._readings[key]

    def _ask(self, source: int, number: int, incoming: Incoming) -> None:
        asked = TaggedAsked(
            epoch=self._stamp,
            channel=self._channel,
            number=number,
            reading=incoming.reading,
            read=incoming.read,
        )
        self._say(source, asked)

    def _piece(self, source: int, message: TaggedPiece) -> None:
        reading = self._readings.get((source, message.number))
        if reading is None:
            return
        piece = Piece(message.data, message.lent, message.digest)
        if piece.nbytes:
            reading.came(message.reading, message.piece, piece)
        elif message.reading == reading.incoming.reading:
            reading.fail(_GivenUp(f"rank {source} gave its message up as it was taken"))

    def _fail_readings(self, source: int, error: ZbmdError) -> None:
        """Have the receives fail that wait for pieces of this member."""
        for (sender, _), reading in self._readings.items():
            if sender == source:
                reading.fail(error)

    async def _get(self, piece: Piece, source: int, flat: Array) -> None:
        lent = piece.lent
        if lent is None:
            flat[:] = np.frombuffer(piece.data, np.uint8)
            return
        if source == self._worker.rank:
            flat[:] = np.frombuffer(
                self._worker.segment.regions.resolve(lent, 0, flat.nbytes, write=False), np.uint8
            )
            return
        region = self._worker.peers[source].memory.open_region(lent, self._worker.segment)
        try:
            await self._transferred(source, region.get(flat))
        except PeerLost as error:  # its notice will come
            raise MembersLost((source,), f"its message went with it: {error.reason}") from None
        finally:
            region.close()
        if xxhash.xxh3_64_digest(flat.data) != piece.digest:
            raise self._ended or OperationAborted(f"rank {source} gave its message up as it was taken")

    async def _transferred(self, source: int, transfer: Transfer) -> None:
        try:
            await transfer
        except BaseException:
            self._let_memory_go(source, (transfer,))
            raise

    def _let_go(self, send: _Send, error: ZbmdError | None) -> None:
        if send.to is not None:
            self._lent.pop((send.to, send.number), None)
        if send.lending is not None:
            send.lending.end()
            if error is not None and send.to is not None:
                self._let_memory_go(send.to)
        if send.done.done():
            return
        if error is None:
            send.done.set_result(None)
        else:
            send.done.set_exception(error)
            send.done.exception()  # a small one is awaited by nobody

    def _let_memory_go(self, rank: int, transfers: tuple[Transfer, ...] = ()) -> None:
        """Make the connection with `rank` stop using our memory: the caller of a cancelled operation may
        change it.

        Otherwise the transport would find a wrong tag over it, which ends the connection.
        """
        peer = self._worker.peers.get(rank)
        if peer is not None and isinstance(peer.memory, RemoteMemory):
            peer.memory.let_go(transfers)

    def _end(self, error: ZbmdError) -> None:
        self._ended = error
        sends, self._sends = self._sends, {}
        for send in sends.values():
            self._let_go(send, error)
        for matched in self._receives.values():
            if not matched.done():
                matched.set_exception(error)
        for reading in self._readings.values():
            reading.fail(error)


def named(ranks: Sequence[int]) -> str:
    """Return a text that names the ranks."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


@asynccontextmanager
async def within(timeout: float | None, what: str) -> AsyncGenerator[None]:
    """Raise `DeadlineExceeded`, which names `what`, after `timeout` seconds; None is the default."""
    limit_s = timeout_ns(timeout) / 1e9
    try:
        async with patient_timeout(limit_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what}: nothing in {limit_s:g} s") from None


def _own(given: Array, *, lasts: bool) -> Array:
    """A copy of it, or, if it lasts until it is there, itself where it is large and in one piece."""
    flat = packed(given)
    dtype_code(flat.dtype)
    array = flat.reshape(given.shape)
    return array if lasts and array.nbytes > INLINE_BYTES_MAX else array.copy()


def require_tag(tag: int) -> None:
    """Raise `UserError` unless it can be a tag."""
    if not 0 <= tag <= TAG_MAX:
        raise UserError(f"tag={tag!r} is not in 0..{TAG_MAX}")
