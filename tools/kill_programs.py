"""Kill a rank at every instruction of every program, in real processes, with 2 to 5 ranks.

    python -m zbmd.tools.kill_programs                            every operation and algorithm, n = 2…5
    python -m zbmd.tools.kill_programs --ranks 3 --only ring      the rings of three
    python -m zbmd.tools.kill_programs --stride 5                 every fifth point

One job a program: in each round a rank is killed at the next point of the program that it runs (before it
enters, as it tells each peer, between any two instructions, at its end), and is replaced. Those who live end
with the right result or with a typed error, go on in the next view, and run the next round there. A result
that is wrong is a fault, as is one that does not come. Printed: of each program, at how many of its points a
rank died, and how the operation ended on the others. Exit code 1 at a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import uvloop

from zbmd.actors.host import Host, HostConfig
from zbmd.actors.host_events import HostEvent, RankReport
from zbmd.actors.host_output import OutputLine
from zbmd.actors.rank_log import log_to_stderr
from zbmd.actors.view import OnLoss, Outcome
from zbmd.collectives.algorithms import ALGORITHMS, Operation, Request
from zbmd.collectives.plan import chunks_for, plan_of
from zbmd.transport.errors import UserError

RANKS: Final = (2, 3, 4, 5)
COUNT: Final = 60
"""Elements of a rank's row, int64: divisible by all of `RANKS`."""
ROUND_S_MAX: Final = 60.0
"""A round takes some 100 ms. More than this, on the average of a job, is a hang."""
LINES_KEPT: Final = 20
RIGHT: Final = "right"
TYPED: Final = frozenset(("MembersLost", "OperationAborted"))

SCRIPT: Final = """
import json
import numpy as np
import zbmd
from zbmd.collectives.algorithms.shard_tree import assign_shards, shard_tree_nodes

PLAN = json.loads({plan!r})
COUNT, ROOT = PLAN["count"], PLAN["root"]


def inputs(c, k):
    return [np.arange(COUNT * c.size, dtype=np.int64) * 10**r + k for r in range(c.size)]


def run(c, k):
    # The operation of round k, and what it must give here.
    arena = c._segment.arena
    given, me, algorithm, root = inputs(c, k), c.place, PLAN["algorithm"], c.members[ROOT]
    mine, total = arena.from_array(given[me]), sum(given)
    blocks = lambda x: x.reshape(c.size, COUNT)
    match PLAN["operation"]:
        case "ALL_REDUCE":
            return c.all_reduce(mine, algorithm=algorithm), total
        case "REDUCE":
            got = c.reduce(mine, root, algorithm=algorithm)
            return (got, total) if me == ROOT else (0, 0)
        case "BROADCAST":
            return c.broadcast(mine, root, algorithm=algorithm), given[ROOT]
        case "ALL_GATHER":
            return c.all_gather(mine[:COUNT], algorithm=algorithm), np.stack([x[:COUNT] for x in given])
        case "GATHER":
            got = c.gather(mine[:COUNT], root, algorithm=algorithm)
            return (got, np.stack([x[:COUNT] for x in given])) if me == ROOT else (0, 0)
        case "SCATTER":
            out = np.zeros(COUNT, np.int64)
            got = c.scatter(blocks(mine) if me == ROOT else None, root, out, algorithm=algorithm)
            return got, blocks(given[ROOT])[me]
        case "REDUCE_SCATTER":
            return c.reduce_scatter(blocks(mine), algorithm=algorithm), blocks(total)[me]
        case "ALL_TO_ALL":
            got = c.all_to_all(blocks(mine), algorithm=algorithm)
            return got, np.stack([blocks(x)[me] for x in given])
        case "ALL_REDUCE_SHARDS":
            assignment = assign_shards(c.size, c.size)
            (node,) = shard_tree_nodes(c.size, *assignment[me])
            out = arena.empty(mine.shape, mine.dtype)
            return c.all_reduce_shards({{node: mine}}, out, shards=c.size, assignment=assignment), total
        case "BARRIER":
            c.barrier()
            return 0, 0


def attempt(c, k):
    try:
        got, wanted = run(c, k)
    except zbmd.ZbmdError as error:
        return type(error).__name__
    return "right" if np.array_equal(got, wanted) else "WRONG"


async def main():
    async with zbmd.join() as node:
        group = await zbmd.elastic_group(node)
        new = node.incarnation > 1  # it comes in behind the operation in which it died
        while (k := group.sequence) <= len(PLAN["kills"]):
            victim, point = PLAN["kills"][k - 1]
            if not new:
                plain, dies = group.group, node.rank == victim
                if dies:
                    plain.communicator.kill_at(plain.communicator.sequence + 1, point)
                end = await plain.run(lambda c: attempt(c, k))
                node.report({{"k": k, "rank": node.rank, "end": "survived" if dies else end}})
                if dies:
                    plain.communicator.kill_at(0, 0)
            new = False
            await group.barrier(on_loss="wait_for_replacement")
        await group.close()


zbmd.run(main())
"""


@dataclass(frozen=True, slots=True)
class Family:
    """One algorithm of an operation, with so many ranks."""

    operation: Operation
    algorithm: str
    n: int

    def __str__(self) -> str:
        return f"{self.operation.name.lower()}/{self.algorithm} n={self.n}"

    @property
    def root(self) -> int:
        """The place of the root, if the operation has one."""
        return self.n - 1

    def points(self) -> list[int]:
        """How many points each rank's program has."""
        request = Request(operation=self.operation, algorithm=self.algorithm, n=self.n)
        if self.operation is Operation.ALL_REDUCE_SHARDS:
            shards = tuple((rank, rank + 1) for rank in range(self.n))
            request = replace(request, shards=self.n, assignment=shards)
        if self.operation in (Operation.BROADCAST, Operation.REDUCE, Operation.GATHER, Operation.SCATTER):
            request = replace(request, root=self.root)
        if ALGORITHMS[self.operation, self.algorithm].over_hosts:
            request = replace(request, hosts=(0,) * self.n)
        request = replace(request, chunks=request.blocks)
        request = replace(request, chunks=chunks_for(request, COUNT * 8))
        return [plan_of(request, rank).kill_points for rank in range(self.n)]

    def kills(self, stride: int) -> list[tuple[int, int]]:
        """(victim, point) of each round. With two ranks every point is tried on both."""
        points = self.points()
        found: list[tuple[int, int]] = []
        for point in range(0, max(points), stride):
            victims = range(self.n) if self.n == 2 else [point % self.n]
            found += [(victim, point) for victim in victims if point < points[victim]]
        return found


@dataclass(slots=True)
class Found:
    """What became of a family's job. `ends`: how the operation ended on those who lived, in all rounds."""

    tried: int
    reached: int = 0
    ends: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])


class _Job:
    """Observer and output of a job."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.told: dict[int, dict[int, str]] = defaultdict(dict)

    async def write_line(self, line: OutputLine) -> None:
        """Keep the last lines of the ranks, in case the job fails."""
        self.lines = [*self.lines[1 - LINES_KEPT :], f"{line.rank}: {line.text.decode(errors='replace')}"]

    async def observe(self, event: HostEvent) -> None:
        """Keep how a round ended on a rank."""
        if isinstance(event, RankReport):
            told: dict[str, Any] = event.payload
            self.told[told["k"]][told["rank"]] = told["end"]


async def kill_family(family: Family, stride: int, scratch: Path) -> Found:
    """Run one family's job."""
    kills = family.kills(stride)
    found, job = Found(tried=len(kills)), _Job()
    plan = {
        "kills": kills,
        "count": COUNT,
        "root": family.root,
        "operation": family.operation.name,
        "algorithm": family.algorithm,
    }
    script = scratch / "job.py"
    script.write_text(SCRIPT.format(plan=json.dumps(plan)))
    config = HostConfig(
        target=str(script),
        world_size=family.n,
        on_loss=OnLoss.REPLACE,
        max_restarts=len(kills) + 1,
        arena_bytes=1 << 20,
        preload=("zbmd.collectives.elastic",),
        environment={"ZBMD_ALGORITHM": f"{family.operation.name.lower()}={family.algorithm}"}
        if family.operation is Operation.ALL_REDUCE_SHARDS
        else {},
    )
    try:
        async with asyncio.timeout(ROUND_S_MAX * max(1, len(kills))):
            result = await Host(config, output=job, observer=job.observe).run()
        if result.outcome is not Outcome.SUCCEEDED:
            found.faults.append(f"the job ended as {result.outcome.name}: {result.reason}")
    except TimeoutError:
        found.faults.append(f"round {max(job.told, default=0)} does not end")
    for k, (victim, point) in enumerate(kills, 1):
        judge(found, job.told[k], k, victim, point, family.n)
    if found.faults:
        found.faults += job.lines
    return found


def judge(found: Found, told: dict[int, str], k: int, victim: int, point: int, n: int) -> None:
    """Note how a round ended: on the victim, if it told of it, and on the others."""
    dies = told.pop(victim, None) is None
    found.reached += dies
    for rank in range(n):
        end = told.get(rank)
        if rank == victim:
            continue
        found.ends[end or "silent"] += 1
        allowed = {RIGHT, *TYPED} if dies else {RIGHT}
        if end not in allowed:
            found.faults.append(f"round {k}: rank {victim} at point {point}; rank {rank} ended with {end}")


def families(ranks: Sequence[int], only: str) -> Iterator[Family]:
    """All whose name contains `only`."""
    for n in ranks:
        for operation, algorithm in sorted(ALGORITHMS, key=str):
            family = Family(operation, algorithm, n)
            if only in str(family):
                yield family


def sweep(chosen: Sequence[Family], stride: int) -> int:
    """Print a row a family, and the sums. Returns how many had a fault."""
    total: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    faulty = 0
    for family in chosen:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="zbmd-kills-") as scratch:
            os.environ["ZBMD_COOKIE_FILE"] = str(Path(scratch, "cookie"))
            found = uvloop.run(kill_family(family, stride, Path(scratch)))
        took_s = time.monotonic() - began_s
        said = ", ".join(f"{count} {end}" for end, count in sorted(found.ends.items()))
        print(
            f"{family!s:36} {found.reached:3} of {found.tried:3} reached: {said}; {took_s:.1f} s", flush=True
        )
        for fault in found.faults:
            print(f"    {fault}", flush=True)
        faulty += bool(found.faults)
        total += Counter(tried=found.tried, reached=found.reached)
        ends += found.ends
    said = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    points = f"{total['reached']} of {total['tried']} points reached"
    print(f"{len(chosen)} programs, {points}: {said}; {faulty} faulty")
    return faulty


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(
        prog="python -m zbmd.tools.kill_programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, choices=RANKS, help="(2 3 4 5)")
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    parser.add_argument("--stride", type=int, default=1, help="every so many-th point (%(default)s)")
    arguments = parser.parse_args(argv)
    log_to_stderr()
    try:
        if arguments.stride < 1:
            raise UserError(f"--stride {arguments.stride} is not at least 1")
        chosen = list(families(arguments.ranks, arguments.only))
        return 1 if sweep(chosen, arguments.stride) else 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
