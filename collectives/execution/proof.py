"""Proves the programs of a request before any of them runs.

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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache
from typing import Final

import structlog

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
from zbmd.collectives.programs.program import Program
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
_CHUNKS_DENSE: Final = 128
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
    per_part = [1 << k for k in range(_CHUNKS_DENSE.bit_length()) if dense and n << k <= _CHUNKS_DENSE]
    if base.operation.blocked:
        counts = {base.blocks, *([3 * base.blocks] if dense else []), *(base.blocks * k for k in per_part)}
    else:
        counts = {*_CHUNKS_ODD, n, 2 * n + 1, *(n * k for k in per_part)}
        if dense and base.operation in ROOTED:  # not cut into a slice a rank
            counts |= {1 << k for k in range(_CHUNKS_DENSE.bit_length())}
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
