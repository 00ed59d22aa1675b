"""Send and receive with tags: the driver of `TagMachine`, over the links of the group's members.

A small array travels in the message. A large one is lent: the message says where it lies in the sender's
arena (a copy, if it is elsewhere), and the receiver reads it from there, by mapping or over the network, and
checks its digest, because a sender that cancels may use that memory again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar, assert_never

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
    TagMachine,
    TakenThere,
    TellTaken,
    Took,
    Transmit,
)
from zbmd.collectives.p2p.wire import (
    TaggedClosed,
    TaggedGreeting,
    TaggedMessage,
    TaggedTaken,
    described,
)
from zbmd.collectives.programs.reductions import DTYPE_NAMES, dtype_code
from zbmd.transport.errors import (
    DeadlineExceeded,
    LinkClosed,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    UserError,
    ZbmdError,
)
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.rdma.remote_memory import RemoteMemory

log: Final = structlog.stdlib.get_logger("zbmd.collectives.tagged")

ACTOR_NAME = "tagged"
INLINE_BYTES_MAX = 64 << 10
"""A longer array is lent."""
TAG_MAX = 2**31 - 1
LOOP_CHECK_S: Final = 1.0
"""Seconds between checks, by a thread that waits for the loop, that it is open: a closed one calls nobody."""
CLOSE_S_MAX = 1.0
"""Seconds for sending the news of a close: a member that does not read finds out by the next view."""

ResultT = TypeVar("ResultT")


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
    handle: RegionHandle | None = None

    @property
    def transmitted(self) -> bool:
        """Whether its message is on its way."""
        return self.to is not None


class OnLoop:
    """The loop of the thread that makes this, for calls of other threads that must run there."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def soon(self, call: Callable[[], None]) -> None:
        """Have the loop make a call, unless it is closed. From any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def wait_for(self, begin: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Have the loop run a coroutine; return its result, or raise its error.

        Raises `LocalProtocolError` on the loop's thread, which may not wait, and `OperationAborted` if the
        loop ends first.
        """
        if threading.get_ident() == self._thread:
            raise LocalProtocolError("this call passes the loop, and this is its thread: await it instead")
        ended = OperationAborted("the loop that this call passes has ended, and took it along")
        begun = begin()
        try:
            running = asyncio.run_coroutine_threadsafe(begun, self._loop)
        except RuntimeError:  # it is closed
            begun.close()
            raise ended from None
        while not wait([running], timeout=LOOP_CHECK_S).done:
            if self._loop.is_closed():
                raise ended
        try:
            return running.result()
        except CancelledError:
            raise ended from None


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
        self._receives: dict[int, asyncio.Future[Match]] = {}
        self._here: dict[tuple[int, int], TaggedMessage] = {}
        self._outbox: asyncio.Queue[tuple[int, Contract]] = asyncio.Queue()  # bounded by the machine
        self._ended: ZbmdError | None = None
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

    async def send(self, x: Any, to: int, tag: int) -> None:
        """See `Group.send`. x: as `taken` gives it."""
        _require_tag(tag)
        async with self._landing:  # who is behind an array that is on its way from a device waits for it
            send = await self._made(x, tag)
            key = next(self._keys)
            self._sends[key] = send
            try:
                self._put(SendPosted(key=key, to=to, tag=tag))
            except ZbmdError:
                self._sends.pop(key, None)
                raise
        # A small one may be sent again by its caller at once, unless so many are under way that it waits.
        if send.array.nbytes > INLINE_BYTES_MAX or not send.transmitted:
            await asyncio.shield(send.done)

    async def _made(self, x: Any, tag: int) -> _Send:
        """Return the send of `x`. Awaits nothing if it lies on the host."""
        landing, done = self._landings.of(x), asyncio.get_running_loop().create_future()
        if landing is None:
            return _Send(self._own(as_array(x, "x"), lasts=True), tag, done)

        def land() -> Array:
            try:
                return self._own(landing.land()[0], lasts=False)
            finally:
                landing.end()

        return _Send(await drained(land), tag, done)

    def _own(self, given: Array, *, lasts: bool) -> Array:
        """A copy of it, or, if it lasts until it is there, itself where it is large and lies in the arena."""
        flat, arena = packed(given), self._worker.segment.arena
        dtype_code(flat.dtype)
        array = flat.reshape(given.shape)
        if array.nbytes <= INLINE_BYTES_MAX:
            return array.copy()
        return array if lasts and arena.offset_of(array) is not None else arena.from_array(array)

    async def receive(self, source: int | None, tag: int | None, out: Any) -> Received:
        """See `Group.recv`. `out`: as returned by `taken`."""
        if tag is not None:
            _require_tag(tag)
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
            array = await self._fetch(message, match.source, out)
        except RemoteProtocolError as error:
            self._end(error)
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

    def give_up(self) -> None:
        """End what waits, as `close` does, soon. From any thread; `close` must still be called."""
        self.on_loop.soon(self._part)

    def _part(self) -> None:
        if self._ended is None:
            for member in self._others():
                self._outbox.put_nowait((member, TaggedClosed(epoch=self._stamp, channel=self._channel)))
            self._end(OperationAborted("the group is closed: use the next view's"))

    async def close(self) -> None:
        """End what waits with `OperationAborted`, here and on the members. Idempotent."""
        self._part()
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

    def take(self, source: int, message: TaggedMessage | TaggedTaken | TaggedClosed | TaggedGreeting) -> None:
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
                case TaggedClosed():
                    self._handle(MemberLeft(source=source))
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
        data, digest = b"", b""
        send.to = to
        if send.array.nbytes <= INLINE_BYTES_MAX:
            data = send.array.tobytes()
        else:
            segment = self._worker.segment
            offset = segment.arena.offset_of(send.array)
            assert offset is not None, "a large array was put into the arena"
            send.handle = segment.regions.lend(send.array, offset, writable=False)
            digest = xxhash.xxh3_64_digest(as_bytes(send.array.reshape(-1), "x").data)
        message = TaggedMessage(
            epoch=self._stamp,
            channel=self._channel,
            number=number,
            tag=send.tag,
            dtype=dtype_code(send.array.dtype),
            shape=send.array.shape,
            data=data,
            lent=send.handle,
            digest=digest,
        )
        self._say(to, message)

    def _say(self, to: int, message: TaggedMessage | TaggedTaken | TaggedGreeting) -> None:
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
        size, dtype = described(message, source), _dtype(message.dtype)
        if isinstance(out, CallersArray):
            require_writeable(require_size(as_placed(out, "out"), dtype, size, "out"), "out")
            host = await self._fetch(message, source, None)
            async with self._landing:
                await drained(lambda: self._landings.write(out, host))
            return out.given
        result = np.empty(message.shape, dtype) if out is None else out
        target = Target(require_size(as_array(result, "out"), dtype, size, "out"), "out")
        flat = as_bytes(target.flat, "out")
        if message.lent is None:
            flat[:] = np.frombuffer(message.data, np.uint8)
        else:
            await self._get(message.lent, message.digest, source, flat)
        target.bring_home()
        return result

    async def _get(self, lent: RegionHandle, digest: bytes, source: int, flat: Array) -> None:
        if source == self._worker.rank:
            flat[:] = np.frombuffer(
                self._worker.segment.regions.resolve(lent, 0, flat.nbytes, write=False), np.uint8
            )
            return
        region = self._worker.peers[source].memory.open_region(lent, self._worker.segment)
        transfer = region.get(flat)
        try:
            await transfer
        except BaseException:
            self._let_memory_go(source, (transfer,))
            raise
        finally:
            region.close()
        if xxhash.xxh3_64_digest(flat.data) != digest:
            raise self._ended or OperationAborted(f"rank {source} gave its message up as it was taken")

    def _let_go(self, send: _Send, error: ZbmdError | None) -> None:
        if send.handle is not None:
            self._worker.segment.regions.take_back(send.handle)
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


def named(ranks: Sequence[int]) -> str:
    """Return a text that names the ranks."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


class Tagged(TaggedEnd):
    """The tagged messages of a group of one epoch: they end with the first loss, but outlast a member's
    close.
    """

    def __init__(self, worker: Worker, members: tuple[int, ...], *, epoch: int, channel: int) -> None:
        super().__init__(worker, stamp=epoch, channel=channel)
        self._members = members
        self._machine = TagMachine(members)

    def _handle(self, event: TagEvent | MemberLeft) -> None:
        actions = self._machine.handle(event, now_ns=time.monotonic_ns())
        self._machine.check_invariants()
        for action in actions:
            self._perform(action)

    def _others(self) -> list[int]:
        return [member for member in self._members if member != self._worker.rank]

    def _lost(self, rank: int, incarnation: int) -> None:
        if rank in self._members and not self._machine.has_left(rank):
            self._end(MembersLost((rank,), f"incarnation {incarnation} ended; wait for the next view"))

    def _failure(self, ranks: tuple[int, ...], cause: Cause) -> ZbmdError:
        assert cause is Cause.LEFT, "the first loss ends all"
        return OperationAborted(f"{named(ranks)} closed the group of epoch {self._stamp}")


@asynccontextmanager
async def within(timeout: float | None, what: str) -> AsyncGenerator[None]:
    """Raise `DeadlineExceeded`, which names `what`, after `timeout` seconds; None is the default."""
    limit_s = timeout_ns(timeout) / 1e9
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what}: nothing in {limit_s:g} s") from None


def _dtype(code: int) -> np.dtype[Any]:
    if DTYPE_NAMES[code] == "bfloat16":
        import ml_dtypes

        narrow: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return narrow
    return np.dtype(DTYPE_NAMES[code])


def _require_tag(tag: int) -> None:
    if not 0 <= tag <= TAG_MAX:
        raise UserError(f"tag={tag!r} is not in 0..{TAG_MAX}")
