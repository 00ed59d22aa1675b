"""Two ranks of a peer that send messages to each other, and the floors of that: sockets and plain copies.

`python -m zbmd.tools.bench.peers.pairs PEER --control NAME [--rank R] [--at WHERE]`, one process a rank; MPI
gives its processes their ranks. WHERE is the file of gloo's store, which gloo makes, or the sockets' port.
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from zbmd.tools.bench.peers.control import Measure, serve, timed, window_of, windows

CONNECT_TRIES_MAX: Final = 3000
CONNECT_PAUSE_S: Final = 0.01
PIECE_BYTES: Final = 4 << 20
"""Most bytes that one call of a socket sends or receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of a library at one of two ranks; each takes a buffer and the other's rank.

    buffer: makes one of so many bytes; start_send, start_receive: return what `wait_all` waits for.
    """

    rank: int
    buffer: Callable[[int], Any]
    send: Callable[[Any, int], object]
    receive: Callable[[Any, int], object]
    start_send: Callable[[Any, int], Any]
    start_receive: Callable[[Any, int], Any]
    wait_all: Callable[[list[Any]], object]


def measure(calls: Calls, what: str, nbytes: int, iterations: int) -> list[float]:
    """`p2p`, `echo` or `put`; nanoseconds a message, on both ranks."""
    out, into = calls.buffer(nbytes), calls.buffer(nbytes)
    if what != "put":
        return timed(iterations, _ping(calls, into if what == "echo" else out, into), 2)
    window = window_of(nbytes)
    return timed(windows(iterations, nbytes), _window(calls, out, into, window), window)


def _ping(calls: Calls, out: Any, into: Any) -> Callable[[], None]:
    send, receive, other = calls.send, calls.receive, 1 - calls.rank

    def first() -> None:
        send(out, other)
        receive(into, other)

    def second() -> None:
        receive(into, other)
        send(out, other)

    return second if calls.rank else first


def _window(calls: Calls, out: Any, into: Any, window: int) -> Callable[[], None]:
    wait_all, other, answer = calls.wait_all, 1 - calls.rank, calls.buffer(1)

    def sender() -> None:
        wait_all([calls.start_send(out, other) for _ in range(window)])
        calls.receive(answer, other)

    def receiver() -> None:
        wait_all([calls.start_receive(into, other) for _ in range(window)])
        calls.send(answer, other)

    return receiver if calls.rank else sender


def gloo(rank: int, store: str) -> tuple[int, Measure]:
    """Through torch.distributed, whose send and recv are gloo's TCP pairs."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def wait_all(works: Sequence[Any]) -> None:
        for work in works:
            work.wait()

    calls = Calls(
        rank=rank,
        buffer=lambda nbytes: torch.ones(nbytes, dtype=torch.uint8),
        send=dist.send,
        receive=dist.recv,
        start_send=dist.isend,
        start_receive=dist.irecv,
        wait_all=wait_all,
    )
    return rank, partial(measure, calls)


def mpi(_: int, __: str) -> tuple[int, Measure]:
    """Through mpi4py, with numpy arrays in its fast form [buffer, count, datatype], made once a size."""
    importlib.import_module("mpi4py").rc.thread_level = "single"  # MPI's quickest mode
    mpi4py: Any = importlib.import_module("mpi4py.MPI")
    np: Any = importlib.import_module("numpy")
    world = mpi4py.COMM_WORLD
    calls = Calls(
        rank=world.rank,
        buffer=lambda nbytes: [np.ones(nbytes, np.uint8), nbytes, mpi4py.BYTE],
        send=world.Send,
        receive=world.Recv,
        start_send=world.Isend,
        start_receive=world.Irecv,
        wait_all=mpi4py.Request.Waitall,
    )
    return world.rank, partial(measure, calls)


def sockets(rank: int, port: str) -> tuple[int, Measure]:
    """The floor of puts over TCP: blocking sockets from one memory to another. Rank 0 sends, 1 listens.

    Times windows of messages, each of which ends with one byte back.
    """
    sock = connected(rank, int(port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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

    return rank, measure


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


def memcpy(shared: bool, _: int, __: str) -> tuple[int, Measure]:
    """The floor of every copy: numpy copies between two arrays of one process.

    shared: from the arena to the inbox of a segment, memory with the pages that ranks share.
    """
    import numpy as np

    from zbmd.transport.memory.segment import Segment

    def measure(what: str, nbytes: int, iterations: int) -> list[float]:
        if not shared:
            into, src = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
            return timed(iterations, lambda: np.copyto(into, src), 1)
        segment = Segment.create(slot=0, incarnation=1, arena_bytes=nbytes, inbox_bytes=nbytes)
        inbox, arena = segment.inbox.empty(nbytes, np.uint8), segment.arena.empty(nbytes, np.uint8)
        inbox.fill(0)
        arena.fill(1)
        samples = timed(iterations, lambda: np.copyto(inbox, arena), 1)
        segment.close()
        return samples

    return 0, measure


PEERS: Final[dict[str, Callable[[int, str], tuple[int, Measure]]]] = {
    "gloo": gloo,
    "mpi4py": mpi,
    "sockets": sockets,
    "memcpy": partial(memcpy, False),
    "memcpy-shared": partial(memcpy, True),
}
"""Each returns its rank and what measures."""


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, default=0, choices=(0, 1))
    parser.add_argument("--at", default="", metavar="WHERE")
    arguments = parser.parse_args()
    serve(arguments.control, *PEERS[arguments.peer](arguments.rank, arguments.at))


if __name__ == "__main__":
    main()
