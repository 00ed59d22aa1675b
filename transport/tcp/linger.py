"""The end of a TCP link after its close: the last records leave, and the peer has time to read them.

A socket that is closed with something unread resets its connection, and what is on its way to the peer is
lost with it. So the closing side sends what it has, says that this is all, and then reads and forgets until
the peer has closed too. By a deadline, and for a bounded number of connections at once.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from itertools import islice
from typing import Final

from zbmd.transport.errors import ZbmdError
from zbmd.transport.handshake.byte_socket import PIECES_PER_WRITE_MAX, ByteSocket
from zbmd.transport.secure.mac import Buffer

LINGERING_MAX: Final = 256
"""Of a process; a connection beyond it is closed at once."""
READS_PER_WAKE: Final = 4
_FORGOTTEN: Final = memoryview(bytearray(1 << 16))


def linger(
    byte_socket: ByteSocket, backlog: deque[Buffer], loop: asyncio.AbstractEventLoop, duration_ns: int
) -> None:
    """Take over a socket that no one watches any more, with what is still to be sent."""
    if len(_lingering) >= LINGERING_MAX:
        byte_socket.close()
        return
    _Linger(byte_socket, backlog, loop, duration_ns)


def drop_sent(backlog: deque[Buffer], nbytes: int) -> None:
    """Take the first `nbytes` off what is to be sent."""
    while nbytes:
        piece = backlog[0]
        if len(piece) <= nbytes:
            nbytes -= len(piece)
            backlog.popleft()
        else:
            backlog[0] = memoryview(piece)[nbytes:]
            nbytes = 0


class _Linger:
    """One connection; the loop holds it while it lasts."""

    def __init__(
        self,
        byte_socket: ByteSocket,
        backlog: deque[Buffer],
        loop: asyncio.AbstractEventLoop,
        duration_ns: int,
    ) -> None:
        self._socket = byte_socket
        self._fd = byte_socket.sock.fileno()
        self._backlog = backlog
        self._loop = loop
        self._finished = False
        _lingering.add(self)
        self._timer = loop.call_later(duration_ns / 1e9, self._close)
        loop.add_reader(self._fd, self._read)
        loop.add_writer(self._fd, self._write)
        self._write()

    def __del__(self) -> None:
        self._socket.close()  # the loop has ended before we had

    def _write(self) -> None:
        if self._finished:
            return
        try:
            while self._backlog:
                taken = self._socket.write(list(islice(self._backlog, PIECES_PER_WRITE_MAX)))
                if taken is None:
                    return
                drop_sent(self._backlog, taken)
        except (OSError, ZbmdError):
            self._close()
            return
        self._finished = True
        self._loop.remove_writer(self._fd)
        self._socket.finish()

    def _read(self) -> None:
        try:
            for _ in range(READS_PER_WAKE):
                taken = self._socket.read_into(_FORGOTTEN)
                if taken is None:
                    return
                if taken == 0:
                    self._close()
                    return
        except (OSError, ZbmdError):
            self._close()

    def _close(self) -> None:
        if self in _lingering:
            _lingering.discard(self)
            self._timer.cancel()
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._socket.close()


_lingering: weakref.WeakSet[_Linger] = weakref.WeakSet()
