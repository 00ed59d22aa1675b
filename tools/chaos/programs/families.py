"""The programs whose every instruction a rank is killed at, and the kills that make up a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, ROOTED, Operation, Request
from zbmd.collectives.execution.plan import Plan, chunks_for, plan_of
from zbmd.collectives.programs.program import hash_text

RANKS: Final = (2, 3, 4, 5)
COUNT: Final = 60
"""Elements of a rank's row, int64: divisible by all of `RANKS`."""
EAGER_COUNT: Final = 12
"""The same where all rows of a rank travel with its descriptor, which has room for 1,408 bytes."""
FIRST: Final = 1
"""The run that dies is the first of its epoch: the call goes the general way."""
AGAIN: Final = 2
"""It is the second of two equal calls, which takes the native fast path where there is one for it."""
RUNS: Final = (FIRST, AGAIN)


@dataclass(frozen=True, slots=True)
class Family:
    """One algorithm of an operation, with so many ranks: a program a rank."""

    operation: Operation
    algorithm: str
    n: int

    def __str__(self) -> str:
        return f"{self.operation.name.lower()}/{self.algorithm} n={self.n}"

    @property
    def root(self) -> int:
        """The place of the root, if the operation has one."""
        return self.n - 1

    @property
    def count(self) -> int:
        """Elements of a rank's row."""
        return EAGER_COUNT if self.algorithm == "eager" else COUNT

    @property
    def hosts(self) -> tuple[int, ...]:
        """Of each rank, the number of its host, as far as the algorithm asks: two of them."""
        if not ALGORITHMS[self.operation, self.algorithm].over_hosts:
            return ()
        return tuple(place * 2 // self.n for place in range(self.n))

    def plan(self, rank: int) -> Plan:
        """What this rank runs."""
        request = Request(operation=self.operation, algorithm=self.algorithm, n=self.n, hosts=self.hosts)
        if self.operation is Operation.ALL_REDUCE_SHARDS:
            shards = tuple((place, place + 1) for place in range(self.n))
            request = replace(request, shards=self.n, assignment=shards)
        if self.operation in ROOTED:
            request = replace(request, root=self.root)
        request = replace(request, chunks=request.blocks)
        return plan_of(replace(request, chunks=chunks_for(request, self.count * 8)), rank)

    def points(self) -> list[int]:
        """How many points each rank's program has."""
        return [self.plan(rank).kill_points for rank in range(self.n)]


@dataclass(frozen=True, slots=True)
class Kill:
    """Rank `victim` is to die at `point` of its program, in `run` (one of `RUNS`).

    The point behind the last one kills nobody: that nobody dies there shows that there are no more.
    """

    family: Family
    victim: int
    point: int
    run: int
    beyond: bool = False

    @property
    def key(self) -> str:
        """Its name in the ledger, with a hash of the victim's program: another program is another kill."""
        encoding = self.family.plan(self.victim).encoding.tobytes().hex()
        return f"{self.family} {hash_text(encoding):016x} {self.victim}:{self.point}:{self.run}"


def families(ranks: Sequence[int], only: str) -> Iterator[Family]:
    """All whose name contains `only`."""
    for n in ranks:
        for operation, algorithm in sorted(ALGORITHMS, key=str):
            family = Family(operation, algorithm, n)
            if only in str(family):
                yield family


def kills_of(family: Family, stride: int, runs: Sequence[int]) -> list[Kill]:
    """Every rank at every `stride`-th point of its own program, and behind its last one."""
    return [
        Kill(family, victim, point, run, beyond=point == points)
        for run in runs
        for victim, points in enumerate(family.points())
        for point in (*range(0, points, stride), points)
    ]
