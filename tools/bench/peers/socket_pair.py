"""The floor of puts over TCP: plain blocking sockets from one memory to another, nothing else.

`python -m zbmd.tools.bench.peers.socket_pair --control NAME --rank R --port P`. Rank 0 sends, rank 1 listens.
"""

from __future__ import annotations

import argparse
import mmap
import socket
import time
from typing import Final

from zbmd.tools.bench.peers.control import Measure, serve, timed, window_of, windows

CONNECT_TRIES_MAX: Final = 3000
CONNECT_PAUSE_S: Final = 0.01
PIECE_BYTES: Final = 4 << 20
"""What one call sends or receives at most."""


def measurer(sock: socket.socket, rank: int) -> Measure:
    """Times windows of messages, each of which ends with one byte back; see `patterns`."""

    def measure(what: str, nbytes: int, iterations: int) -> list[float]:
        with mmap.mmap(-1, nbytes) as memory, memoryview(memory) as view:
            view[:] = bytes(nbytes)
            window = window_of(nbytes)

            def send() -> None:
                for _ in range(window):
                    sent = 0
                    while sent < nbytes:
                        sent += sock.send(view[sent : sent + PIECE_BYTES])
                sock.recv(1)

            def take() -> None:
                for _ in range(window):
                    taken = 0
                    while taken < nbytes:
                        taken += sock.recv_into(view[taken : taken + PIECE_BYTES])
                sock.send(b"x")

            return timed(windows(iterations, nbytes), take if rank else send, window)

    return measure


def connected(rank: int, port: int) -> socket.socket:
    """The connection of the two ranks. Raises OSError if the other does not come."""
    if rank == 1:
        with socket.create_server(("127.0.0.1", port)) as listener:
            return listener.accept()[0]
    for _ in range(CONNECT_TRIES_MAX - 1):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:  # the other rank does not listen yet
            time.sleep(CONNECT_PAUSE_S)
    return socket.create_connection(("127.0.0.1", port))


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, required=True, choices=(0, 1))
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    with connected(arguments.rank, arguments.port) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serve(arguments.control, arguments.rank, measurer(sock, arguments.rank))


if __name__ == "__main__":
    main()
