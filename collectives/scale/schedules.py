"""The programs of all ranks of a large group, in the form of the compiled timeline."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms import ALGORITHMS, Request
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.program import (
    COPY_CODE,
    NOTIFY_CODE,
    PUT_CODE,
    REDUCE_CODE,
    WAIT_CODE,
    encode,
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
    for rank, role in enumerate(roles):
        if role.key not in numbers:
            numbers[role.key] = len(codes)
            codes.append(code_of(request, rank, role))
        which[rank] = numbers[role.key]
    for rank in random.Random(request.n).sample(range(request.n), min(CHECKED_RANKS, request.n)):
        if not np.array_equal(code_of(request, rank, roles[rank]), codes[which[rank]]):
            raise ProgramError(f"{request}: rank {rank} has another program than the ranks of its kind")
    return Schedule(codes, which, *_neighbours(roles))


def code_of(request: Request, rank: int, role: Roles) -> Code:
    """What matters in time of a rank's program: neighbours for ranks, and neither chunks nor slots.

    Raises `ProgramError` if the program has a peer that is no neighbour.
    """
    # Not `build`: a group of memory has few ranks, and a simulated one many.
    program = ALGORITHMS[request.operation, request.algorithm].build(request, rank)
    encoding = encode(program)
    numbers = np.full(request.n, request.n, np.int32)
    numbers[list(role.neighbours)] = np.arange(len(role.neighbours), dtype=np.int32)
    numbers[rank] = OWN
    kind = encoding[:, 0]
    code = np.zeros_like(encoding)
    code[:, 0], code[:, COUNT] = kind, encoding[:, COUNT]
    for column, kinds in (
        (PEER, (PUT_CODE, NOTIFY_CODE, WAIT_CODE)),
        (FIRST, (PUT_CODE, REDUCE_CODE, COPY_CODE)),
        (SECOND, (REDUCE_CODE,)),
    ):
        code[:, column] = np.where(np.isin(kind, kinds), numbers[encoding[:, column]], OWN)
        if (code[:, column] == request.n).any():
            raise ProgramError(f"{request}: rank {rank} has a peer that is none of its neighbours")
    return code


def _neighbours(roles: list[Roles]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    width = max(1, *(len(role.neighbours) for role in roles))
    peers = np.full((len(roles), width), -1, np.int32)
    back = np.full((len(roles), width), -1, np.int32)
    places = [{peer: k for k, peer in enumerate(role.neighbours)} for role in roles]
    for rank, role in enumerate(roles):
        for k, peer in enumerate(role.neighbours):
            peers[rank, k], back[rank, k] = peer, places[peer][rank]
    return peers, back
