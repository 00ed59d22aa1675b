"""Forked processes on hosts of their own: all that they share is TCP connections, made before the fork."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import combinations

from support.bulk.bulk_host import stripe_of, tcp_pair
from zbmd.transport.bulk.events import BulkPeerInfo
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.identity import Side
from zbmd.transport.memory.segment import Segment
from zbmd.transport.rdma.remote_memory import Mirror, RemoteMemory
from zbmd.transport.secure.protection import Protection


class Wiring:
    """The connections between ranks of different hosts. hosts: of each rank, the number of its host."""

    def __init__(self, segments: Sequence[Segment], hosts: Sequence[int]) -> None:
        self._segments = segments
        self._sockets: dict[tuple[int, int], tuple[socket.socket, Side]] = {}
        self._mirrors: dict[tuple[int, int], Mirror] = {}
        for a, b in combinations(range(len(segments)), 2):
            if hosts[a] != hosts[b]:
                dialer, listener = tcp_pair()
                self._sockets[b, a], self._sockets[a, b] = (dialer, Side.DIALER), (listener, Side.LISTENER)
                self._mirrors[a, b], self._mirrors[b, a] = Mirror(segments[a], b), Mirror(segments[b], a)

    def close_all_but(self, rank: int) -> None:
        """Close the ends of the other processes: only those may hold them, so that a death closes them."""
        for owner, _ in [key for key in self._sockets if key[0] != rank]:
            for key in [key for key in self._sockets if key[0] == owner]:
                self._sockets.pop(key)[0].close()

    def connect(self, rank: int) -> tuple[DataPlane, dict[int, BulkPeer], dict[int, RemoteMemory]]:
        """In the process of `rank`: its data plane, and its peers on other hosts."""
        plane = DataPlane()
        bulks: dict[int, BulkPeer] = {}
        memories: dict[int, RemoteMemory] = {}
        for (owner, peer), (sock, side) in self._sockets.items():
            if owner != rank:
                continue
            segment = self._segments[peer]
            info = BulkPeerInfo(name=f"rank{peer}", slot=peer, incarnation=segment.incarnation)
            bulk = bulks[peer] = BulkPeer(plane, info, segment=self._segments[rank])
            bulk.add_stripe(stripe_of(sock, 0, side, Protection.MAC))
            memories[peer] = RemoteMemory(
                bulk,
                self._mirrors[rank, peer],
                self._mirrors[peer, rank].handle,
                arena_offset=segment.nbytes - segment.arena.capacity_bytes,
                nbytes=segment.nbytes,
            )
        return plane, bulks, memories
