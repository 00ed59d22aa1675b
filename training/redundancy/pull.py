"""Read the state of a peer where it lies in its memory."""

from __future__ import annotations

import contextlib

from zbmd.training.autograd.array_module import Array
from zbmd.training.redundancy.failures import Cancellation
from zbmd.transport.errors import DeadlineExceeded, LinkClosed, PeerLost
from zbmd.transport.memory.region import RemoteRegion
from zbmd.transport.memory.segment import PeerMemory
from zbmd.transport.native._native import now_ns
from zbmd.transport.rdma.remote_memory import RemoteMemory

FETCH_ELEMENTS = 1 << 18
"""A pull checks for cancellation after every MiB."""
FETCH_LOOK_NS = 100_000_000
"""And this often while no data arrives."""


def pull(
    region: RemoteRegion,
    memory: PeerMemory,
    into: Array,
    offset: int,
    cancellation: Cancellation,
    *,
    source: int,
) -> None:
    """Fill `into` from byte `offset`; a source that hangs delays us only until our epoch ends."""
    transfer = region.get(into, offset)
    try:
        while not transfer.done:
            cancellation.check()
            with contextlib.suppress(DeadlineExceeded):
                transfer.wait(now_ns() + FETCH_LOOK_NS)
        transfer.wait()
    except LinkClosed as error:
        raise PeerLost(source, str(error)) from error
    finally:
        if not transfer.done and isinstance(memory, RemoteMemory):
            memory.let_go((transfer,))
