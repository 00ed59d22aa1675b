"""One of two ranks of gloo, through torch.distributed (its send and recv are gloo's TCP pairs).

`python -m zbmd.tools.bench.peers.gloo_pair --control NAME --rank R --store FILE`
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from zbmd.tools.bench.peers.control import serve, timed, window_of, windows


class Ranks:
    """This rank and the other one."""

    def __init__(self, rank: int, store: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        self._torch.set_num_threads(1)
        self._dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        self.rank = rank

    def measure(self, what: str, nbytes: int, iterations: int) -> list[float]:
        """`p2p`, `echo` or `put`; nanoseconds a message, on both ranks."""
        out, into = (self._torch.ones(nbytes, dtype=self._torch.uint8) for _ in range(2))
        if what != "put":
            return timed(iterations, self._ping(into if what == "echo" else out, into), 2)
        return timed(
            windows(iterations, nbytes), self._window(out, into, window_of(nbytes)), window_of(nbytes)
        )

    def _ping(self, out: Any, into: Any) -> Callable[[], None]:
        send, receive, other = self._dist.send, self._dist.recv, 1 - self.rank

        def first() -> None:
            send(out, other)
            receive(into, other)

        def second() -> None:
            receive(into, other)
            send(out, other)

        return second if self.rank else first

    def _window(self, out: Any, into: Any, window: int) -> Callable[[], None]:
        dist, other = self._dist, 1 - self.rank
        answer = self._torch.ones(1, dtype=self._torch.uint8)

        def sender() -> None:
            for work in [dist.isend(out, other) for _ in range(window)]:
                work.wait()
            dist.recv(answer, other)

        def receiver() -> None:
            for work in [dist.irecv(into, other) for _ in range(window)]:
                work.wait()
            dist.send(answer, other)

        return receiver if self.rank else sender


def main() -> None:
    """Serve the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", required=True, help="a file, not there yet, that both ranks can reach")
    arguments = parser.parse_args()
    ranks = Ranks(arguments.rank, arguments.store)
    serve(arguments.control, ranks.rank, ranks.measure)


if __name__ == "__main__":
    main()
