"""Proves the programs of every algorithm for every number of ranks, 1 to 64, and many chunk counts.

`python -m zbmd.tools.verify_sweep [--algorithm NAME] [--ranks 1:64]`: what
`tests/collectives/test_verifier.py` samples. Some minutes on one core. Exits with 1 at the first program that
is wrong, and prints its request.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from zbmd.collectives.algorithms import ALGORITHMS, Operation, Request, build, spec_of
from zbmd.collectives.algorithms.shard_tree import assign_shards
from zbmd.collectives.errors import VerificationError
from zbmd.collectives.program import MAX_RANKS
from zbmd.collectives.verifier import verify

CHUNKS_ODD = (1, 2, 3, 7)
SHARDS = (1, 13, 64)


def requests(operation: Operation, algorithm: str, n: int) -> Iterator[Request]:
    """Few and many chunks, odd numbers, the first, a middle and the last root, hosts of several sizes."""
    base = Request(operation=operation, algorithm=algorithm, n=n)
    entry = ALGORITHMS[operation, algorithm]
    if operation is Operation.BARRIER:
        counts: tuple[int, ...] = (1,)
    elif entry.blocked:
        counts = (base.blocks, 3 * base.blocks) if n <= MAX_RANKS // 4 else (base.blocks,)
    else:
        counts = (*CHUNKS_ODD, n, 2 * n + 1)
    for chunks in dict.fromkeys(counts):
        request = replace(base, chunks=chunks)
        if operation is Operation.ALL_REDUCE_SHARDS:
            for shards in SHARDS:
                yield replace(request, shards=shards, assignment=assign_shards(shards, n))
        elif ALGORITHMS[operation, algorithm].over_hosts:
            for ranks_a_host in (1, 3, 8):
                yield replace(request, hosts=tuple(r // ranks_a_host for r in range(n)))
        elif operation in (Operation.BROADCAST, Operation.REDUCE, Operation.GATHER, Operation.SCATTER):
            for root in {0, n // 2, n - 1}:
                yield replace(request, root=root)
        else:
            yield request


def sweep(operation: Operation, algorithm: str, ranks: range) -> int:
    """How many sets of programs were proved. Raises `VerificationError` at the first that is wrong."""
    proved = 0
    for n in ranks:
        for request in requests(operation, algorithm, n):
            programs = [build(request, rank) for rank in range(n)]
            for in_place in (False, True):
                try:
                    verify(programs, spec_of(request, in_place=in_place))
                except VerificationError:
                    print(f"wrong: {request}{' in place' if in_place else ''}", file=sys.stderr)
                    raise
                proved += 1
    return proved


def main() -> int:
    """Sweep, one line an algorithm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", help="only algorithms of this name")
    parser.add_argument("--ranks", default=f"1:{MAX_RANKS}", metavar="FIRST:LAST", help="(%(default)s)")
    arguments = parser.parse_args()
    first, last = map(int, arguments.ranks.split(":"))
    for operation, algorithm in sorted(ALGORITHMS, key=str):
        if arguments.algorithm in (None, algorithm):
            began_s = time.monotonic()
            try:
                proved = sweep(operation, algorithm, range(first, last + 1))
            except VerificationError as error:
                print(f"{operation.name.lower()}/{algorithm}: {error}", file=sys.stderr)
                return 1
            took_s = time.monotonic() - began_s
            print(f"{operation.name.lower()}/{algorithm}: {proved} proved in {took_s:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
