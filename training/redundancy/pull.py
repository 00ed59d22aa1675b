"""Read the state of a peer where it lies in its memory."""

from __future__ import annotations

import contextlib

import msgspec

from zbmd.collectives.commit.driver import Cancellation
from zbmd.training.autograd.array_module import Array
from zbmd.transport.errors import DeadlineExceeded, LinkClosed, PeerLost, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.memory.segment import PeerMemory, Segment
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


def open_state(
    handle: bytes, slot: int, peer: PeerMemory, own: Segment, *, rank: int, nbytes: int
) -> RemoteRegion:
    """Return the state in a slot of `rank`, which must have `nbytes`; `handle`: its description of its slots.

    Raises `RemoteProtocolError` if the description is invalid.
    """
    try:
        described = msgspec.msgpack.decode(handle, type=list[RegionHandle])[slot]
    except (IndexError, ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise RemoteProtocolError(f"rank {rank} sent an invalid handle: {error}") from error
    if described.nbytes != nbytes:
        raise RemoteProtocolError(f"rank {rank} holds {described.nbytes} bytes of state, this rank {nbytes}")
    return peer.open_region(described, own)
