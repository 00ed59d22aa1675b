"""Small puts to and from one peer, past the machine while it is at rest: `_quick.QuickPuts` on a socket."""

from __future__ import annotations

import select
import socket
import ssl
from typing import Final

from zbmd.transport.bulk._fast_path import QuickPuts
from zbmd.transport.bulk.events import QuickMoved
from zbmd.transport.bulk.machine import BulkMachine
from zbmd.transport.bulk.stripe_io import StripeSocket
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle, Regions
from zbmd.transport.native._native import Mapping

CALLS_MAX: Final = 4
"""Receives, each of many records, before others have their turn."""
WAITED_FOR_MIN: Final = 1 << 16
"""With so much not sent it is waited for that it may be: it would have to be copied."""
ROOM_WAIT_MS: Final = 2
"""Longest time without progress."""
ROOM_LOOKS_MAX: Final = 64
"""Times that something may arrive without room becoming free."""


class QuickStripe:
    """The stripe of a peer on which small puts are quick, and whether they are now.

    slot: the peer's; own: our segment, whose cells are set. For the thread that has the turn.
    """

    def __init__(self, machine: BulkMachine, regions: Regions, own: Mapping, slot: int) -> None:
        self._machine = machine
        self._regions = regions
        self._own = own
        self._slot = slot
        self._puts: QuickPuts | None = None
        self._io: StripeSocket | None = None
        self._sock: socket.socket | None = None
        self.stripe = -1
        """The number of that stripe while puts take the fast path; else -1."""

    def begin(self, stripes: dict[int, StripeSocket]) -> bool:
        """Go past the machine if it is at rest and its stripe is between two records; whether that is so."""
        assert self.stripe < 0, "what it has counted would be lost"
        rest = self._machine.rest()
        io = None if rest is None else stripes.get(rest.stripe)
        if rest is None or io is None or isinstance(io.sock, ssl.SSLSocket) or not io.rests:
            return False
        if self._puts is None or self._io is not io:
            self._io, self._sock = io, io.sock
            self._puts = QuickPuts(
                seal_sent=io.writer.seal,
                seal_come=io.reader.seal,
                resolve=self._resolve,
                versions=self._regions,
                own=self._own.address,
                slot=self._slot,
            )
        self._puts.begin(
            io.writer.records,
            io.reader.records,
            rest.puts,
            rest.acked,
            rest.awaited,
            rest.published,
            rest.acknowledged,
        )
        io.set_wake_bytes()
        self.stripe = rest.stripe
        return True

    def end(self) -> QuickMoved:
        """Leave the fast path: return the event for the machine. What has arrived waits in the stripe."""
        puts, io = self._puts, self._io
        assert puts is not None and io is not None, "it has begun"
        self.stripe = -1
        moved = QuickMoved(
            puts=puts.new_puts, acked=puts.acked, published=puts.published, acknowledged=puts.told
        )
        io.go_on(sent_records=puts.sent_records, come_records=puts.come_records, come=puts.end())
        return moved

    def put(self, handle: RegionHandle, data: memoryview, at: int, channel: int, value: int) -> bool | None:
        """Send it, as far as the socket takes it: whether that is whole. None if it must go another way."""
        assert self._puts is not None, "it has begun"
        sent = self._puts.put(handle, data, at, channel, value)
        return None if sent is None else self._send(*sent)

    def notify(self, channel: int, value: int) -> bool | None:
        """As `put`."""
        assert self._puts is not None, "it has begun"
        sent = self._puts.notify(channel, value)
        return None if sent is None else self._send(sent)

    def acknowledge(self) -> bool:
        """Tell the peer what is published; as `put`."""
        assert self._puts is not None, "it has begun"
        sent = self._puts.acknowledge()
        return not sent or self._send(sent)

    def receive(self) -> bool:
        """Take what is there: whether all of it was ours, and the connection stands."""
        puts, sock = self._puts, self._sock
        assert puts is not None and sock is not None, "it has begun"
        for _ in range(CALLS_MAX):
            room = puts.room
            try:
                nbytes = sock.recv_into(room[0]) if len(room) == 1 else sock.recvmsg_into(room)[0]
            except BlockingIOError:
                return True
            except OSError:
                return False  # the stripe finds out what it is
            if not nbytes or not puts.came(nbytes):
                return False
            if nbytes < sum(map(len, room)):
                break
        return True

    @property
    def owes(self) -> bool:
        """Whether something published is not yet acknowledged to the peer."""
        return self._puts is not None and self._puts.told < self._puts.published

    def _send(self, *parts: memoryview) -> bool:
        """Send; bytes that the socket refuses, or fails on, are left to the stripe as a copy."""
        io, sock = self._io, self._sock
        assert io is not None and sock is not None, "it has begun"
        io.owed = True
        left = list(parts)
        while True:
            try:
                sent = sock.send(left[0]) if len(left) == 1 else sock.sendmsg(left)
            except BlockingIOError:
                sent = 0
            except OSError:
                break
            left = _behind(left, sent)
            if not left:
                return True
            if sum(map(len, left)) < WAITED_FOR_MIN or not self._wait_for_room(sock):
                break
        for part in left:
            io.writer.behind(part)
        return False

    def _wait_for_room(self, sock: socket.socket) -> bool:
        """Until the socket takes more; what comes meanwhile is received, as the peer may wait for that.

        False if that takes too long, or something has come that is not ours.
        """
        for _ in range(ROOM_LOOKS_MAX):
            poll = select.poll()
            poll.register(sock, select.POLLOUT | select.POLLIN)
            found = poll.poll(ROOM_WAIT_MS)
            if not found:
                return False
            if found[0][1] & ~select.POLLOUT and not self.receive():
                return False
            if found[0][1] & select.POLLOUT:
                return True
        return False

    def _resolve(self, slot: int, incarnation: int, offset: int, nbytes: int) -> memoryview | None:
        handle = RegionHandle(slot=slot, incarnation=incarnation, offset=offset, nbytes=nbytes, writable=True)
        try:
            return self._regions.resolve(handle, 0, nbytes, write=True)
        except RemoteProtocolError:
            return None


def _behind(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Return the pieces without their first `sent` bytes."""
    left: list[memoryview] = []
    for part in parts:
        if sent < len(part):
            left.append(part[sent:])
        sent = max(0, sent - len(part))
    return left
