"""The programs of all ranks of a large group, in the form of the compiled timeline.

An eager program reads inputs that came with the descriptors. So before it each rank puts to every other what
that reads of its input, in the order in which a real group tells its descriptors (`RemoteExecutor._enter`),
and waits for those whose input it reads, and for nobody else.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, Request
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.programs.program import (
    COPY_CODE,
    ENCODING_WIDTH,
    FINISH_CODE,
    NOTIFY_CODE,
    PUB,
    PUT_CODE,
    REDUCE_CODE,
    WAIT_CODE,
    encode,
    peers_after,
)
from zbmd.collectives.scale.roles import Roles, roles_of

Code = NDArray[np.int32]
CHECKED_RANKS = 3
"""So many ranks of a schedule are compared with their own programs."""
PEER, COUNT, FIRST, SECOND = 2, 3, 6, 9
"""Columns of an encoding."""
OWN = -1


@dataclass(frozen=True, slots=True)
class Schedule:
    """See `_timeline.Timeline` for the tables."""

    codes: list[Code]
    which: NDArray[np.int32]
    first: NDArray[np.int64]
    peers: NDArray[np.int32]
    back: NDArray[np.int32]

    @property
    def instructions(self) -> int:
        """Of all ranks together."""
        return int(np.array([len(code) for code in self.codes])[self.which].sum())


def schedule_of(request: Request) -> Schedule:
    """All ranks' programs; each kind of program is built once. Raises `ProgramError`."""
    roles = roles_of(request)
    numbers: dict[Hashable, int] = {}
    codes: list[Code] = []
    which = np.empty(request.n, np.int32)
    built: set[int] = set()
    for rank, role in enumerate(roles):
        if role.key not in numbers:
            numbers[role.key] = len(codes)
            codes.append(code_of(request, rank, role))
            built.add(rank)
        which[rank] = numbers[role.key]
    for rank in random.Random(request.n).sample(range(request.n), min(CHECKED_RANKS, request.n)):
        if rank not in built and not np.array_equal(code_of(request, rank, roles[rank]), codes[which[rank]]):
            raise ProgramError(f"{request}: rank {rank} has another program than the ranks of its kind")
    return Schedule(codes, which, *_neighbours(roles))


def code_of(request: Request, rank: int, role: Roles) -> Code:
    """What matters in time of a rank's program: neighbours for ranks, and neither chunks nor slots.

    Raises `ProgramError` if the program has a peer that is no neighbour.
    """
    # Not `build`: a group of memory has few ranks, and a simulated one many.
    algorithm = ALGORITHMS[request.operation, request.algorithm]
    encoding = encode(algorithm.build(request, rank))
    if algorithm.sends is not None:
        encoding = np.concatenate([_meeting(request, rank, encoding), encoding])
        for column in (FIRST, SECOND):  # it is here by now
            encoding[encoding[:, column + 1] == PUB, column] = rank
    numbers = np.full(request.n, request.n, np.int32)
    numbers[role.neighbours] = np.arange(len(role.neighbours), dtype=np.int32)
    numbers[rank] = OWN
    kind = encoding[:, 0]
    code = np.zeros_like(encoding)
    code[:, 0], code[:, COUNT] = kind, encoding[:, COUNT]
    for column, kinds in (
        (PEER, (PUT_CODE, NOTIFY_CODE, WAIT_CODE)),
        (FIRST, (PUT_CODE, REDUCE_CODE, COPY_CODE, FINISH_CODE)),
        (SECOND, (REDUCE_CODE,)),
    ):
        code[:, column] = np.where(np.isin(kind, kinds), numbers[encoding[:, column]], OWN)
        if (code[:, column] == request.n).any():
            raise ProgramError(f"{request}: rank {rank} has a peer that is none of its neighbours")
    return code


def _meeting(request: Request, rank: int, encoding: Code) -> Code:
    """An eager operation's messages: a put for each chunk sent, a wait for each rank that is read of."""
    sends = ALGORITHMS[request.operation, request.algorithm].sends
    assert sends is not None, "it is eager"
    rows: list[tuple[int, int, int]] = []
    for peer in peers_after(rank, request.n):
        rows += [(PUT_CODE, peer, 0)] * len(sends(request, rank, peer))
    read = {
        int(owner) for column in (FIRST, SECOND) for owner in encoding[encoding[:, column + 1] == PUB, column]
    }
    rows += [
        (WAIT_CODE, peer, len(sends(request, peer, rank)))
        for peer in peers_after(rank, request.n)
        if peer in read
    ]
    meeting = np.zeros((len(rows), ENCODING_WIDTH), np.int32)
    if rows:
        meeting[:, 0], meeting[:, PEER], meeting[:, COUNT] = np.array(rows, np.int32).T
    meeting[:, FIRST] = rank
    return meeting


def _neighbours(roles: list[Roles]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """(first, peers, back), see `Timeline`."""
    n = len(roles)
    counts = np.array([len(role.neighbours) for role in roles], np.int64)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    peers = np.concatenate([role.neighbours for role in roles]).astype(np.int32)
    ranks = np.repeat(np.arange(n, dtype=np.int64), counts)
    order = np.argsort(ranks * n + peers)
    # Sorted by (neighbour, rank), pairs come in the order of the same pairs the other way round.
    mirrored = np.argsort(peers.astype(np.int64) * n + ranks)
    if not np.array_equal(peers[order], ranks[mirrored]) or not np.array_equal(ranks[order], peers[mirrored]):
        raise ProgramError("a rank is not the neighbour of one of its neighbours")
    back = np.empty(len(peers), np.int32)
    back[mirrored] = order - first[ranks[order]]
    return first, peers, back
