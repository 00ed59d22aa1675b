"""Plans, their proofs and their runs: how a call is carried out, proved before anything of it runs.

A plan is a pure function of the call (operation, algorithm, element count, dtype, group), so all ranks
come to the same one; their descriptors prove it (`Request.digest`).

The programs of all ranks are pure functions of the request. Requests that `tools/lab/proofs/programs.py`
goes through (`swept_requests`) were proved offline, and cost nothing. Any other is verified when the first
plan of it is made, for calls in place and out of place; the verdict is kept for the life of the process.

Every rank of a group of up to `EACH_RANKS_MAX` does so by itself and comes to the same verdict. In a larger
one that would take each rank a second of its start, and of a replacement's recovery, so rank 0 proves for
all: where it finds a flaw it takes no part, and the others' operation ends at its deadline. What would take
more than about a second (`WORK_MAX`, `RANKS_MAX`) is not proved: a warning says so. In groups of up to 64
ranks no algorithm that "auto" chooses comes near that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, lru_cache
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import (
    ALGORITHMS,
    ROOTED,
    Algorithm,
    Operation,
    Request,
    algorithm_of,
    build,
    spec_of,
)
from zbmd.collectives.algorithms.compose import shared_drafts
from zbmd.collectives.algorithms.shard_tree import assign_shards
from zbmd.collectives.native._program import NativeProgram
from zbmd.collectives.programs.layout import Piece
from zbmd.collectives.programs.program import Program, encode, hash_text
from zbmd.collectives.programs.verifier import verify

log: Final = structlog.stdlib.get_logger("zbmd.collectives.proof")

SWEPT_RANKS_MAX: Final = 48
"""Groups of up to this many ranks are swept offline."""
EACH_RANKS_MAX: Final = 48
"""In larger groups only rank 0 verifies programs."""
RANKS_MAX: Final = 256
"""Programs of larger groups are not verified when a plan is made."""
WORK_MAX: Final = 4_000_000
"""Nor are those that take more work than this: instructions of all ranks, times `RANK_WORK` + ranks, since a
wait merges a vector clock. It is about a second of one core, once a process."""
RANK_WORK: Final = 16
PROOFS_MAX: Final = 4096
"""Proofs kept; the least recently used is dropped."""

_CHUNKS_ODD: Final = (1, 2, 3, 7)
_SHARDS: Final = (1, 13, 64)
_RANKS_A_HOST: Final = (1, 2, 3, 4, 8)
_DENSE_RANKS_MAX: Final = 16
"""In groups of up to this many ranks, chunk counts of large arrays (`plan.chunks_for`) are swept as well."""
CHUNKS_DENSE: Final = 128
"""Chunks of the largest piece of an operation (`plan.UNSTAGED_PIECE_BYTES`)."""


class ProofKind(Enum):
    """The ways in which the programs of a request are proved."""

    OFFLINE = "proved offline"
    NOW = "proved now"
    BY_RANK_0 = "proved by rank 0"
    NOT_PROVED = "not proved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The verdict on the programs of all ranks. `took_ms`: the time that it took this process."""

    kind: ProofKind
    took_ms: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.kind.value} in {self.took_ms:.1f} ms" if self.kind is ProofKind.NOW else self.kind.value
        )


def prove(request: Request, rank: int = 0) -> Proof:
    """Return the proof of `request` for `rank`, verifying the programs of all ranks if that is its part and
    has not been done.

    Raises `VerificationError`, which names the flaw, and `ProgramError` on a bad request.
    """
    if rank and request.n > EACH_RANKS_MAX:
        algorithm_of(request)
        return Proof(kind=ProofKind.BY_RANK_0)
    with _turn:  # one thread verifies; the others find its verdict
        return _prove(request)


def swept_requests(operation: Operation, algorithm: str, n: int) -> Iterator[Request]:
    """Yield the requests over `n` ranks that are proved offline: few and many chunks, odd numbers of them,
    the first, a middle and the last root, hosts of several sizes.
    """
    entry, base = ALGORITHMS[operation, algorithm], Request(operation=operation, algorithm=algorithm, n=n)
    for chunks in _swept_chunks(base, entry):
        request = replace(base, chunks=chunks)
        if operation is Operation.ALL_REDUCE_SHARDS:
            for shards in _SHARDS:
                yield replace(request, shards=shards, assignment=assign_shards(shards, n))
        elif entry.over_hosts:
            for ranks_a_host in _RANKS_A_HOST:
                yield replace(request, hosts=tuple(r // ranks_a_host for r in range(n)))
        elif operation in ROOTED:
            for root in sorted({0, n // 2, n - 1}):
                yield replace(request, root=root)
        else:
            yield request


def _swept_chunks(base: Request, entry: Algorithm) -> tuple[int, ...]:
    """The chunk counts of the swept requests, each once."""
    n = base.n
    if base.operation is Operation.BARRIER:
        return (1,)
    if entry.eager and not base.operation.blocked:  # always runs as one chunk (`plan.chunks_for`)
        return _CHUNKS_ODD[:3]
    dense = n <= _DENSE_RANKS_MAX
    per_part = [1 << k for k in range(CHUNKS_DENSE.bit_length()) if dense and n << k <= CHUNKS_DENSE]
    if base.operation.blocked:
        counts = {base.blocks, *([3 * base.blocks] if dense else []), *(base.blocks * k for k in per_part)}
    else:
        counts = {*_CHUNKS_ODD, n, 2 * n + 1, *(n * k for k in per_part)}
        if dense and base.operation in ROOTED:  # not cut into a slice a rank
            counts |= {1 << k for k in range(CHUNKS_DENSE.bit_length())}
    return tuple(sorted(counts))


@cache
def _swept(operation: Operation, algorithm: str, n: int) -> frozenset[Request]:
    return frozenset(swept_requests(operation, algorithm, n))


_turn: Final = threading.Lock()


@lru_cache(maxsize=PROOFS_MAX)
def _prove(request: Request) -> Proof:
    algorithm_of(request)
    if request.n <= SWEPT_RANKS_MAX and request in _swept(request.operation, request.algorithm, request.n):
        return Proof(kind=ProofKind.OFFLINE)
    began_ns = time.perf_counter_ns()
    programs = _all_programs(request)
    if programs is None:
        log.warning("plan not proved", request=str(request), ranks_max=RANKS_MAX, work_max=WORK_MAX)
        return Proof(kind=ProofKind.NOT_PROVED)
    for in_place in (False, True):
        verify(programs, spec_of(request, in_place=in_place))
    return Proof(kind=ProofKind.NOW, took_ms=(time.perf_counter_ns() - began_ns) / 1e6)


def _all_programs(request: Request) -> list[Program] | None:
    """Build the programs of all ranks; return None if verifying them would take too much work."""
    n = request.n
    instructions_max = WORK_MAX // (RANK_WORK + n)
    if n > RANKS_MAX:
        return None
    with shared_drafts():
        if n * min(len(build(request, rank).instructions) for rank in {0, n // 2, n - 1}) > instructions_max:
            return None
        programs: list[Program] = []
        instructions = 0
        for rank in range(n):
            programs.append(build(request, rank))
            instructions += len(programs[-1].instructions)
            if instructions > instructions_max:
                return None
    return programs


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
