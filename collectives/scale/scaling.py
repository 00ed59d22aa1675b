"""Simulate one operation of thousands of ranks on a model of a network, undisturbed or with deaths in it."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, ROOTED, Operation, Request
from zbmd.collectives.algorithms.hierarchical import hosts_of
from zbmd.collectives.algorithms.ring import WINDOW_SLOTS
from zbmd.collectives.algorithms.trees import CHILD_SLOTS
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.execution.remote_fetch import STAGING_BYTES_MAX
from zbmd.collectives.execution.remote_sending import slot_payload_bytes
from zbmd.collectives.native._stepper import PUB_BYTES_MAX
from zbmd.collectives.scale._timeline import Timeline
from zbmd.collectives.scale.bounds import Fabric, Placement, bound_ns, least_ns, place
from zbmd.collectives.scale.roles import (
    check_at_scale,
    folds_in_rank_order,
    is_eager,
    is_pairwise,
    schedule_of,
)

# The ring over all ranks, a vector of ranks at a time.
#
# At 10,000 ranks the flat ring's programs have 10^9 instructions. All ranks walk the same ones, and no two
# share a port of the network, so each instruction is done for all ranks at once: the same additions as the
# timeline's, to the same results, deaths included (`tests/collectives/scale/test_scale.py`).

RANKS_MIN = WINDOW_SLOTS + 1
"""In a smaller ring no rank reports free slots."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The times that chunks go around, to be reduced and to be kept. `own`: the own block is copied first."""

    reducing: int
    keeping: int
    own: bool


ROUNDS: Final[Mapping[Operation, Rounds]] = MappingProxyType(
    {
        Operation.ALL_REDUCE: Rounds(1, 1, own=False),
        Operation.REDUCE_SCATTER: Rounds(1, 0, own=False),
        Operation.ALL_GATHER: Rounds(0, 1, own=True),
    }
)
"""The operations of a ring."""


def ring_instructions(operation: Operation, n: int, turns_a_hop: int) -> int:
    """Return the number of instructions of all ranks."""
    rounds = ROUNDS[operation]
    turns = (rounds.reducing + rounds.keeping) * (n - 1) * turns_a_hop
    return n * (3 * turns + 2 * (turns - WINDOW_SLOTS) + (turns_a_hop if rounds.own else 0))


def ring_ends(
    operation: Operation,
    placement: Placement,
    *,
    chunk_bytes: float,
    turns_a_hop: int,
    begin: Times,
    dies: Times | None = None,
) -> Times:
    """When each rank has ended its part, ns (nan: never). Blocks are of `turns_a_hop` chunks.

    begin, dies: float64 (n,), when each sets out, and when it does nothing more (none dies). Raises
    `ProgramError` for fewer than `RANKS_MIN` ranks.
    """
    n, fabric, rounds = placement.n, placement.fabric, ROUNDS[operation]
    if n < RANKS_MIN:
        raise ProgramError(f"a ring of {n} ranks needs no window: it is walked one rank at a time")
    hosts = placement.host_array
    far = hosts != np.roll(hosts, -1)  # from a rank to the one that follows
    latency = np.where(far, fabric.far_ns, fabric.near_ns)
    leaves = chunk_bytes / np.where(far, fabric.far_bytes_per_ns, fabric.near_bytes_per_ns)
    crosses = np.where(far, leaves, 0.0)  # a port takes a chunk in for as long as one goes out
    own = chunk_bytes / fabric.own_bytes_per_ns
    reducing = rounds.reducing * (n - 1) * turns_a_hop
    turns = reducing + rounds.keeping * (n - 1) * turns_a_hop
    clock, coming = begin.copy(), np.zeros(n)

    def until_death() -> None:
        if dies is not None:
            clock[clock >= dies] = np.inf  # what it would do now never happens

    for _ in range(turns_a_hop if rounds.own else 0):
        until_death()
        clock += own
    freed = np.zeros((WINDOW_SLOTS, n))
    for turn in range(turns):
        slot = turn % WINDOW_SLOTS
        if turn >= WINDOW_SLOTS:
            until_death()
            np.maximum(clock, np.roll(freed[slot], -1) + latency, out=clock)
        until_death()
        clock += fabric.post_ns
        if_far = np.maximum(clock + latency, coming) + crosses
        clock += leaves
        arrives = np.where(far, if_far, clock + latency)
        coming = np.where(far, if_far, coming)
        until_death()
        np.maximum(clock, np.roll(arrives, 1), out=clock)
        until_death()
        clock += (3 if turn < reducing else 1) * own
        if turn + WINDOW_SLOTS < turns:
            until_death()
            clock += fabric.post_ns
            freed[slot] = clock
    return np.where(np.isinf(clock), np.nan, clock)


Times = NDArray[np.float64]
CHUNK_BYTES = 1 << 20
"""A chunk is at most so long."""
TREE_CHUNKS_MAX = 128
FLAT_RING_FROM = 513
"""Rings of so many ranks are walked a vector at a time."""
PAIRS_MAX = 20_000_000
"""Pairs of ranks that exchange something: some 50 bytes each."""
READS_AHEAD_MAX = 1 << 20
BUILT_MAX = 4_000_000
"""Instructions that are built, of programs no two of which are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The time between a death and the repeated operation, beyond the network's own times."""

    notice_ns: float = 1e6
    message_ns: float = 50e3
    phases: int = 4

    def agreed_ns(self, n: int) -> float:
        """Return the time from a death to the next view of `n` members."""
        return self.notice_ns + self.phases * math.ceil(math.log2(max(2, n))) * self.message_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleMeasurement:
    """One operation. Times in ns of the simulated clock, from the first rank's begin to the last one's end.

    `bound_ns`: what this algorithm cannot be faster than; `least_ns`: what none can. `chunks`: of the vector.
    `instructions`: performed by all ranks together. `entered_ns`: of that, until all ranks had entered.
    """

    algorithm: str
    n: int
    nbytes: int
    time_ns: float
    entered_ns: float
    bound_ns: float
    least_ns: float
    chunks: int
    instructions: int
    vectorised: bool
    operation: Operation = Operation.ALL_REDUCE

    @property
    def bus_bytes_per_ns(self) -> float:
        """nccl-tests' bus bandwidth, GB/s: of the bytes over the time 2 (n - 1) / n for an all-
        reduce, 1 for a
        broadcast or reduce, else (n - 1) / n.
        """
        share = (self.n - 1) / self.n
        if self.operation is Operation.ALL_REDUCE:
            share *= 2
        elif self.operation in (Operation.BROADCAST, Operation.REDUCE):
            share = 1.0
        return share * self.nbytes / self.time_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairMeasurement:
    """An operation in which `dead` ranks died at `died_ns`. `stalled`: survivors that could not end it.

    `recovered_ns`: from the death to the last survivor's end of the repeated operation; 0 if nobody stalled.
    """

    dead: tuple[int, ...]
    died_ns: float
    stalled: int
    recovered_ns: float
    again: ScaleMeasurement


def refusal(operation: Operation, algorithm: str, n: int, nbytes: int, fabric: Fabric) -> str:
    """Return why this is not simulated, "" if it is. Raises `ProgramError` if it never is."""
    check_at_scale(operation, algorithm)
    request = Request(operation=operation, algorithm=algorithm, n=n)
    if is_eager(request):
        by_rank = operation in (Operation.ALL_GATHER, Operation.GATHER)
        travels, most = -(-nbytes // n) if by_rank else nbytes, eager_bytes_max(n, fabric)
        if travels > most:
            return f"{travels:,} bytes: with descriptors travel {most:,} at most"
    if is_pairwise(request) and n * (n - 1) > PAIRS_MAX:
        return f"{n * (n - 1):,} pairs of ranks: {PAIRS_MAX:,} fit into memory"
    if folds_in_rank_order(request) and 3 * n * n > BUILT_MAX:
        return f"no two ranks' programs are equal: {3 * n * n:,} instructions, {BUILT_MAX:,} are built"
    return ""


def eager_bytes_max(n: int, fabric: Fabric) -> int:
    """Bytes that travel with a descriptor in production; see `remote_sending`."""
    return PUB_BYTES_MAX if fabric.ranks_per_host > 1 else max(PUB_BYTES_MAX, slot_payload_bytes(n))


def simulate(
    operation: Operation,
    algorithm: str,
    n: int,
    nbytes: int,
    fabric: Fabric,
    *,
    skew_ns: float = 0,
    seed: int = 0,
) -> ScaleMeasurement:
    """An operation by one of `roles.AT_SCALE`, rank 0 its root. Ranks come `skew_ns` apart at most.

    `nbytes`: of a rank's largest array. Raises `ProgramError` for another algorithm and for what `refusal`
    has something to say about, `UserError` if the network is none.
    """
    if why := refusal(operation, algorithm, n, nbytes, fabric):
        raise ProgramError(f"{operation.name.lower()} by {algorithm!r} on {n} ranks is not simulated: {why}")
    placement = place(n, fabric)
    return _measure(operation, algorithm, placement, nbytes, _arrivals(n, skew_ns, seed))


def repeat_after_deaths(
    whole: ScaleMeasurement, fabric: Fabric, *, deaths: int, recovery: Recovery, seed: int = 0
) -> RepairMeasurement:
    """The same with `deaths` random ranks that die at a random moment of it; not the root, if there is one.

    (Without its root an operation is not repeated, but ends with `MembersLost`.) The survivors agree on a
    view and repeat it with their inputs. Raises ValueError if nobody would be left.
    """
    n, nbytes, operation, algorithm = whole.n, whole.nbytes, whole.operation, whole.algorithm
    if not 0 < deaths < n:
        raise ValueError(f"{deaths} deaths among {n} ranks")
    rng = random.Random(f"{seed}/{algorithm}/{n}/{nbytes}/{deaths}")
    placement = place(n, fabric)
    mortal = range(1 if operation in ROOTED else 0, n)
    dead, died_ns = tuple(sorted(rng.sample(mortal, deaths))), rng.uniform(0, whole.time_ns)
    stalled = _stalled(_request(operation, algorithm, placement, nbytes), placement, nbytes, dead, died_ns)
    survivors = placement.without(dead)
    again = _measure(operation, algorithm, survivors, nbytes, np.zeros(survivors.n))
    recovered = recovery.agreed_ns(survivors.n) + again.time_ns if stalled else 0.0
    return RepairMeasurement(dead=dead, died_ns=died_ns, stalled=stalled, recovered_ns=recovered, again=again)


def _arrivals(n: int, skew_ns: float, seed: int) -> Times:
    return np.random.default_rng(seed).uniform(0, skew_ns, n) if skew_ns else np.zeros(n)


def _measure(
    operation: Operation, algorithm: str, placement: Placement, nbytes: int, begin: Times
) -> ScaleMeasurement:
    request = _request(operation, algorithm, placement, nbytes)
    entered, steps = _enter(request, placement, begin)
    ends, performed = _ends(request, placement, nbytes, entered, np.full(placement.n, np.inf))
    if np.isnan(ends).any():
        raise ProgramError(f"{request}: {int(np.isnan(ends).sum())} ranks never end: the programs are wrong")
    return ScaleMeasurement(
        operation=operation,
        algorithm=algorithm,
        n=placement.n,
        nbytes=nbytes,
        time_ns=float(ends.max() - begin.min()),
        entered_ns=float(entered.max() - begin.min()),
        bound_ns=bound_ns(request, placement, nbytes),
        least_ns=least_ns(operation, placement, nbytes),
        chunks=request.chunks,
        instructions=steps + performed,
        vectorised=_by_vectors(request),
    )


def _by_vectors(request: Request) -> bool:
    return request.algorithm == "ring" and request.n >= max(FLAT_RING_FROM, RANKS_MIN)


def _ends(
    request: Request, placement: Placement, nbytes: int, begin: Times, dies: Times
) -> tuple[Times, int]:
    """Return when each rank ends, ns (nan: never), and how many instructions were performed."""
    # The full vector of an all-to-all is what all ranks have.
    chunk_bytes = nbytes * (request.n if request.operation is Operation.ALL_TO_ALL else 1) / request.chunks
    if not _by_vectors(request):
        return walk(request, placement, chunk_bytes, begin, dies)
    turns = request.chunks // request.n
    ends = ring_ends(
        request.operation,
        placement,
        chunk_bytes=chunk_bytes,
        turns_a_hop=turns,
        begin=begin,
        dies=None if np.isinf(dies).all() else dies,
    )
    return ends, ring_instructions(request.operation, request.n, turns)


def walk(
    request: Request, placement: Placement, chunk_bytes: float, begin: Times, dies: Times
) -> tuple[Times, int]:
    """Return when each rank ends the program, ns (nan: never), one instruction at a time; and their
    number."""
    schedule, fabric = schedule_of(request), placement.fabric
    timeline = Timeline(
        schedule.codes,
        schedule.which,
        schedule.first,
        schedule.peers,
        schedule.back,
        placement.host_array,
        placement.port_array,
        ports=placement.port_count,
        near_ns=fabric.near_ns,
        far_ns=fabric.far_ns,
        post_ns=fabric.post_ns,
        near_ns_per_byte=1 / fabric.near_bytes_per_ns,
        far_ns_per_byte=1 / fabric.far_bytes_per_ns,
        own_ns_per_byte=1 / fabric.own_bytes_per_ns,
        chunk_bytes=chunk_bytes,
        reads_ahead=int(min(READS_AHEAD_MAX, STAGING_BYTES_MAX / max(1.0, chunk_bytes))),
    )
    ends, _ = timeline.run(begin, dies)
    return ends, timeline.steps


def _enter(request: Request, placement: Placement, begin: Times) -> tuple[Times, int]:
    """Nobody begins before all have come: at this size by a barrier. Eager ranks, and a barrier's, do."""
    if placement.n == 1 or request.operation is Operation.BARRIER or is_eager(request):
        return begin, 0
    barrier = Request(operation=Operation.BARRIER, algorithm="dissemination", n=placement.n)
    return walk(barrier, placement, 0.0, begin, np.full(placement.n, np.inf))


def _stalled(
    request: Request, placement: Placement, nbytes: int, dead: Collection[int], died_ns: float
) -> int:
    """Return how many survivors of the deaths do not end."""
    dies = np.full(placement.n, np.inf)
    dies[list(dead)] = died_ns
    entered, _ = _enter(request, placement, np.zeros(placement.n))
    ends, _ = _ends(request, placement, nbytes, entered, dies)
    return int(np.isnan(np.delete(ends, list(dead))).sum())


def _request(operation: Operation, algorithm: str, placement: Placement, nbytes: int) -> Request:
    """With as many chunks as keep the pipeline full, and blocks of equally many of them."""
    n, over_hosts = placement.n, ALGORITHMS[operation, algorithm].over_hosts
    base = Request(operation=operation, algorithm=algorithm, n=n, hosts=placement.hosts if over_hosts else ())
    hosts = hosts_of(n, placement.hosts)
    slices = min(map(len, hosts))
    whole = nbytes * (n if operation is Operation.ALL_TO_ALL else 1)
    match algorithm:
        case "tree" | "double_tree" | "hierarchical_tree":
            return replace(base, chunks=_tree_chunks(base, placement, nbytes, slices, len(hosts)))
        case "hierarchical":
            blocks = slices * len(hosts)
        case "eager" | "dissemination":
            return replace(base, chunks=base.blocks)
        case "ring":
            blocks = n
        case _:
            blocks = n if operation is Operation.ALL_REDUCE else base.blocks
    return replace(base, chunks=blocks * max(1, math.ceil(whole / blocks / CHUNK_BYTES)))


def _tree_chunks(request: Request, placement: Placement, nbytes: int, slices: int, hosts: int) -> int:
    """As many as make the way through the pipeline shortest: sqrt(steps x bytes x β / α) (Sanders et al.).

    α is what a chunk costs whoever passes it on, beyond its bytes: where chunks are put, the posts;
    with two trees
    also a share of the round trip in which a slot is given back, for each node has a turn of the other
    tree to
    wait for; where chunks are read (a broadcast), three latencies.
    """
    fabric = placement.fabric
    over_hosts = request.algorithm == "hierarchical_tree"
    slices = slices if over_hosts else 1
    levels = math.ceil(math.log2(max(2, hosts)))
    reads = request.operation is Operation.BROADCAST
    each_ns = 3 * fabric.far_ns if reads else 4 * fabric.post_ns
    if request.algorithm == "double_tree":
        each_ns += 2 * fabric.far_ns / CHILD_SLOTS
    best = math.sqrt(2 * levels * nbytes / slices / fabric.far_bytes_per_ns / max(1.0, each_ns))
    chunks = min(TREE_CHUNKS_MAX, max(1, round(best)))
    if request.algorithm == "double_tree":
        chunks += chunks % 2
    return slices * chunks
