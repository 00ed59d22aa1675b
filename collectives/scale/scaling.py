"""One all-reduce of thousands of ranks on a model of a network: undisturbed, or with deaths in it."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives._timeline import Timeline
from zbmd.collectives.algorithms import Operation, Request
from zbmd.collectives.algorithms.hierarchical import hosts_of
from zbmd.collectives.scale.bounds import bound_ns, least_ns
from zbmd.collectives.scale.fabric import Fabric
from zbmd.collectives.scale.flat_ring import RANKS_MIN, ring_ends, ring_instructions
from zbmd.collectives.scale.placement import Placement, place
from zbmd.collectives.scale.schedules import schedule_of

Times = NDArray[np.float64]
CHUNK_BYTES = 1 << 20
"""A chunk is at most so long."""
TREE_CHUNKS_MAX = 128
FLAT_RING_FROM = 513
"""Rings of so many ranks are walked a vector at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What passes between a death and the repeated operation, beyond the network's own times.

    `notice_ns`: the kernel's proof on the dead rank's host. Then a view is agreed upon over a tree of the
    members: `phases` waves up or down, each level a message of `message_ns`.
    """

    notice_ns: float = 1e6
    message_ns: float = 50e3
    phases: int = 4

    def agreed_ns(self, n: int) -> float:
        """From a death to the next view of `n` members."""
        return self.notice_ns + self.phases * math.ceil(math.log2(max(2, n))) * self.message_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
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

    @property
    def bus_bytes_per_ns(self) -> float:
        """nccl-tests' bus bandwidth, GB/s: 2 (n - 1) / n of the bytes over the time."""
        return 2 * (self.n - 1) / self.n * self.nbytes / self.time_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """An operation in which `dead` ranks died at `died_ns`. `stalled`: survivors that could not end it.

    `recovered_ns`: from the death to the last survivor's end of the repeated operation; 0 if nobody stalled.
    """

    dead: tuple[int, ...]
    died_ns: float
    stalled: int
    recovered_ns: float
    again: Measured


def all_reduce(
    algorithm: str, n: int, nbytes: int, fabric: Fabric, *, skew_ns: float = 0, seed: int = 0
) -> Measured:
    """An all-reduce of `nbytes` a rank, by one of `roles.AT_SCALE`. Ranks come `skew_ns` apart at most.

    Raises `ProgramError` for another algorithm, `UserError` if the network is none.
    """
    placement = place(n, fabric)
    return _measure(algorithm, placement, nbytes, _arrivals(n, skew_ns, seed))


def repeat_after_deaths(
    whole: Measured, fabric: Fabric, *, deaths: int, recovery: Recovery, seed: int = 0
) -> Repaired:
    """The same with `deaths` random ranks that die at a random moment of it.

    The survivors agree on a view and repeat it with their inputs. Raises ValueError if nobody would be left.
    """
    n, nbytes, algorithm = whole.n, whole.nbytes, whole.algorithm
    if not 0 < deaths < n:
        raise ValueError(f"{deaths} deaths among {n} ranks")
    rng = random.Random(f"{seed}/{algorithm}/{n}/{nbytes}/{deaths}")
    placement = place(n, fabric)
    dead, died_ns = tuple(sorted(rng.sample(range(n), deaths))), rng.uniform(0, whole.time_ns)
    stalled = _stalled(_request(algorithm, placement, nbytes), placement, nbytes, dead, died_ns)
    survivors = placement.without(dead)
    again = _measure(algorithm, survivors, nbytes, np.zeros(survivors.n))
    recovered = recovery.agreed_ns(survivors.n) + again.time_ns if stalled else 0.0
    return Repaired(dead=dead, died_ns=died_ns, stalled=stalled, recovered_ns=recovered, again=again)


def _arrivals(n: int, skew_ns: float, seed: int) -> Times:
    return np.random.default_rng(seed).uniform(0, skew_ns, n) if skew_ns else np.zeros(n)


def _measure(algorithm: str, placement: Placement, nbytes: int, begin: Times) -> Measured:
    request = _request(algorithm, placement, nbytes)
    entered, steps = _enter(placement, begin)
    n, chunk_bytes = placement.n, nbytes / request.chunks
    vectorised = algorithm == "ring" and n >= max(FLAT_RING_FROM, RANKS_MIN)
    if vectorised:
        turns = request.chunks // n
        ends = ring_ends(placement, chunk_bytes=chunk_bytes, turns_a_hop=turns, begin=entered)
        steps += ring_instructions(n, turns)
    else:
        ends, performed = walk(request, placement, chunk_bytes, entered, np.full(n, np.inf))
        steps += performed
    return Measured(
        algorithm=algorithm,
        n=n,
        nbytes=nbytes,
        time_ns=float(ends.max() - begin.min()),
        entered_ns=float(entered.max() - begin.min()),
        bound_ns=bound_ns(request, placement, nbytes),
        least_ns=least_ns(placement, nbytes),
        chunks=request.chunks,
        instructions=steps,
        vectorised=vectorised,
    )


def walk(
    request: Request, placement: Placement, chunk_bytes: float, begin: Times, dies: Times
) -> tuple[Times, int]:
    """When each rank ends the request's program, ns (nan: never), one instruction at a time; and how many."""
    schedule, fabric = schedule_of(request), placement.fabric
    timeline = Timeline(
        schedule.codes,
        schedule.which,
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
    )
    ends, _ = timeline.run(begin, dies)
    return ends, timeline.steps


def _enter(placement: Placement, begin: Times) -> tuple[Times, int]:
    """Nobody begins before all have come: at this size by a barrier."""
    if placement.n == 1:
        return begin, 0
    barrier = Request(operation=Operation.BARRIER, algorithm="dissemination", n=placement.n)
    return walk(barrier, placement, 0.0, begin, np.full(placement.n, np.inf))


def _stalled(
    request: Request, placement: Placement, nbytes: int, dead: Collection[int], died_ns: float
) -> int:
    """How many survivors of the deaths do not end."""
    n = placement.n
    dies = np.full(n, np.inf)
    dies[list(dead)] = died_ns
    entered, _ = _enter(placement, np.zeros(n))
    if request.algorithm == "ring" and n >= FLAT_RING_FROM:
        # Every rank needs every other's part and passes on all of them: who dies before its end stops all.
        chunk_bytes = nbytes / request.chunks
        ends = ring_ends(placement, chunk_bytes=chunk_bytes, turns_a_hop=request.chunks // n, begin=entered)
        return n - len(dead) if died_ns < ends[list(dead)].max() else 0
    ends, _ = walk(request, placement, nbytes / request.chunks, entered, dies)
    return int(np.isnan(np.delete(ends, list(dead))).sum())


def _request(algorithm: str, placement: Placement, nbytes: int) -> Request:
    """With as many chunks as keep the pipeline full, and blocks of equally many of them."""
    n = placement.n
    request = Request(operation=Operation.ALL_REDUCE, algorithm=algorithm, n=n, hosts=placement.hosts)
    hosts = hosts_of(n, placement.hosts)
    match algorithm:
        case "ring":
            blocks = n
        case "hierarchical":
            blocks = min(map(len, hosts)) * len(hosts)
        case _:
            return _with_chunks(request, _tree_chunks(placement, nbytes, algorithm, hosts))
    return _with_chunks(request, blocks * math.ceil(nbytes / blocks / CHUNK_BYTES))


def _with_chunks(request: Request, chunks: int) -> Request:
    return Request(
        operation=request.operation,
        algorithm=request.algorithm,
        n=request.n,
        chunks=chunks,
        hosts=request.hosts if request.algorithm.startswith("hierarchical") else (),
    )


def _tree_chunks(placement: Placement, nbytes: int, algorithm: str, hosts: list[list[int]]) -> int:
    """As many as make the way through the pipeline shortest: sqrt(steps x bytes x β / α) (Sanders et al.)."""
    fabric = placement.fabric
    slices = min(map(len, hosts)) if algorithm == "hierarchical_tree" else 1
    levels = math.ceil(math.log2(max(2, len(hosts))))
    best = math.sqrt(2 * levels * nbytes / slices / fabric.far_bytes_per_ns / (3 * fabric.far_ns))
    chunks = min(TREE_CHUNKS_MAX, max(1, round(best)))
    if algorithm == "double_tree":
        chunks += chunks % 2
    return slices * chunks
