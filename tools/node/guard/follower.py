"""A guard that supervises nothing: it stands for its rank until that has ended, and exits as it did."""

from __future__ import annotations

import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final

from zbmd.actors.process.exit import EXIT_FAILED
from zbmd.tools.node.guard import address as sockets
from zbmd.tools.node.guard.messages import PACKET_BYTES_MAX, Here, Signalled, decode_ended, encode
from zbmd.tools.node.signals import FORWARDED_SIGNALS, STOP_SIGNALS
from zbmd.transport.errors import DeadlineExceeded

SIGNALS_READ_MAX: Final = 64


def follow(address: str, local_rank: int, *, patience_s: float, signals: Sequence[str] = ()) -> int:
    """Wait for the end of a rank that the guard of local rank 0 supervises; return its exit code.

    address: see `address_of_guards`; patience_s: how long that guard may take to come; signals: names of
    more signals to pass on. Raises `DeadlineExceeded`, `UserError`.
    """
    with _Follower(address, local_rank, signals) as follower:
        return follower.wait(time.monotonic() + patience_s)


class _Follower:
    """The sockets of one guard, and the signals that it has received."""

    def __init__(self, address: str, local_rank: int, signals: Sequence[str]) -> None:
        self._local_rank = local_rank
        self._numbers = (*STOP_SIGNALS, *FORWARDED_SIGNALS, *(signal.Signals[name] for name in signals))
        self._asked = 0
        """The first signal that ends the run."""
        self._listener = sockets.listening(address, local_rank)
        self._connections: list[socket.socket] = []
        self._woken, self._wakes = socket.socketpair()
        for each in (self._woken, self._wakes):
            each.setblocking(False)
        if (connection := sockets.connected(address, 0)) is not None:
            self._greet(connection)

    def __enter__(self) -> _Follower:
        signal.set_wakeup_fd(self._wakes.fileno())
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
                signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for each in (self._listener, self._woken, self._wakes, *self._connections):
            each.close()

    def wait(self, end_s: float) -> int:
        """Return the exit code; see `follow`."""
        while True:
            left_s = None if self._connections else max(0.0, end_s - time.monotonic())
            watched = [self._listener, self._woken, *self._connections]
            ready = select.select(watched, [], [], left_s)[0]
            if not ready:
                raise DeadlineExceeded(
                    f"local rank {self._local_rank} has a guard, and local rank 0 of this host has none: "
                    "expected the launcher to start both. See what it says, or raise --join-timeout"
                )
            for each in ready:
                code = self._taken(each)
                if code is not None:
                    return code

    def _taken(self, ready: socket.socket) -> int | None:
        """Take what is there; return the exit code once it is known."""
        if ready is self._listener:
            self._greet(sockets.accepted(self._listener))
        elif ready is self._woken:
            return self._signalled(ready.recv(SIGNALS_READ_MAX))
        else:
            try:
                packet = ready.recv(PACKET_BYTES_MAX + 1)
            except ConnectionResetError:
                packet = b""
            if packet:
                return decode_ended(packet).code
            if self._asked:
                return 128 + self._asked
            print(
                "zbmd.torch.run: the guard of local rank 0 has ended before the ranks of this host, which "
                "end with it",
                file=sys.stderr,
            )
            return EXIT_FAILED
        return None

    def _greet(self, connection: socket.socket) -> None:
        self._connections.append(connection)
        connection.send(encode(Here(local_rank=self._local_rank)))

    def _signalled(self, numbers: bytes) -> int | None:
        for number in numbers:
            if number in STOP_SIGNALS:
                self._asked = self._asked or number
            if self._connections:
                try:
                    self._connections[0].send(encode(Signalled(number=number)))
                except OSError:
                    continue  # it has just ended: that is read next
            elif number in STOP_SIGNALS:
                return 128 + number
        return None
