"""Plans and runs: how a call is carried out, and one native run of it.

A plan is a pure function of the call (operation, algorithm, element count, dtype, group), so all ranks
come to the same one; their descriptors prove it (`Request.digest`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import Operation, Request, algorithm_of, build
from zbmd.collectives.execution.proof import Proof, prove
from zbmd.collectives.native._program import NativeProgram
from zbmd.collectives.programs.layout import Piece
from zbmd.collectives.programs.program import Program, encode, hash_text

CHUNK_BYTES = 128 << 10
"""A chunk is at most this long, so that a reduction's partial results stay in a core's cache."""
PIECE_BYTES = 4 << 20
"""A larger operation is done in consecutive pieces of this size: it bounds staging and scratch."""
FAR_CHUNK_BYTES = 512 << 10
"""The same where what is read comes over a network: each chunk is asked for, and a question costs."""
FAR_SLOT_BYTES = 256 << 10
"""The same where chunks are put into slots there: each is a message, and the inbox is small."""
FAR_PIECE_BYTES = 16 << 20
"""The same: to meet for a piece costs messages."""
UNSTAGED_PIECE_BYTES = 16 << 20
"""The same where nothing is staged, and there are no more slots the more chunks there are."""
PLANS_MAX = 512
"""Plans kept; the least recently used is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a call, or of a piece of it: the request for programs, and this rank's program.

    exposed: the buffers that peers read. proof: how the programs of all ranks were proved. sent: of an eager
    plan, which chunks of this rank's input each rank is sent, if it is on another host. encoding: the program
    as the stepper has it (`program.encode`). in_arena: what is run instead where the `in` and `out` of all
    ranks lie in the arena, and the first rank of the group finds it quicker: ranks read in each other's
    descriptors which of the two it is. piece: elements of a block that one run takes, 0: all of them. last:
    the plan of a last, shorter piece, if there is one.
    """

    request: Request
    program: Program
    native: NativeProgram
    encoding: NDArray[np.int32] = field(repr=False, compare=False)
    exposed: frozenset[int]
    proof: Proof
    sent: tuple[range, ...] = ()
    in_arena: Plan | None = None
    piece: int = 0
    last: Plan | None = None

    @property
    def eager(self) -> bool:
        """Whether inputs travel with the descriptors."""
        return self.native.eager

    @property
    def kill_points(self) -> int:
        """Points at which fault injection can end an operation: 0..kill_points-1."""
        return self.native.kill_points


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One native run of a plan: a whole operation, or one piece of it.

    `addresses` maps each buffer to where it begins. Counts and strides are in elements of a block. With
    `layout` the blocks lie where it says: `count` is the longest of this piece, `total` that of the whole
    operation, and a stride is 1 for a staged array and 0 for one used in place. `digest` is of what the ranks
    must agree on beyond the plan.
    """

    plan: Plan
    addresses: Mapping[int, int]
    dtype: int
    reduction: int
    count: int
    total: int
    piece: int
    in_stride: int
    out_stride: int
    layout: Piece | None = None
    digest: int = 0

    @property
    def operation(self) -> int:
        """The operation's code in a descriptor."""
        return self.plan.request.operation.value

    @property
    def root(self) -> int:
        """The root's rank in the group; 0 if there is none."""
        return self.plan.request.root


@lru_cache(maxsize=PLANS_MAX)
def plan_of(request: Request, rank: int, in_arena: Request | None = None) -> Plan:
    """The plan of `rank` (0..n-1) for `request`, or for `in_arena`, of the same bits, as `Plan` has it.

    Raises `ProgramError` on a bad request, and `VerificationError` if the programs of its ranks are flawed.
    """
    other = None if in_arena is None else plan_of(in_arena, rank)
    algorithm, proof = algorithm_of(request), prove(request, rank)
    sends = algorithm.sends
    program = build(request, rank)
    encoding = encode(program)
    native = NativeProgram(
        encoding,
        n=program.n,
        rank=rank,
        blocks=program.blocks,
        chunks=program.chunks,
        scratch_slots=program.scratch_slots,
        inbox_slots=program.inbox_slots,
        eager=algorithm.eager,
        plan=request.digest() if in_arena is None else hash_text(f"{request.digest()} {in_arena.digest()}"),
        other=None if other is None else other.native,
    )
    return Plan(
        request=request,
        program=program,
        native=native,
        encoding=encoding,
        exposed=algorithm.exposes(request, rank),
        proof=proof,
        sent=() if sends is None else tuple(sends(request, rank, reader) for reader in range(request.n)),
        in_arena=other,
    )


def chunks_for(request: Request, block_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the number of chunks of the full vector, for `block_bytes` a block, the longest if they differ.

    Slices and blocks get the same number of chunks, a power of two, of at most `chunk_bytes` each.
    """
    algorithm = algorithm_of(request)
    if request.operation is Operation.BARRIER or (algorithm.eager and not request.operation.blocked):
        return 1
    sliced = request.operation not in (Operation.BROADCAST, Operation.REDUCE) or request.algorithm == "shared"
    parts = request.blocks if request.operation.blocked else request.n if sliced else 1
    part_bytes = block_bytes if request.operation.blocked else -(-block_bytes // parts)
    per_part = 1
    while part_bytes > per_part * chunk_bytes:
        per_part *= 2
    return parts * per_part
