"""Lower bounds of an operation's time on a network, in the α-β model: by each algorithm, and by any.

Three things bound a phase: the way of one chunk (latencies one after the other), the busiest port (its bytes
over its rate) and the busiest rank. Phases that a rank does one after the other add up. An operation's
`nbytes` are those of a rank's largest array, as in nccl-tests: of n blocks for those that are by rank.

ring: the terms of Patarasuk and Yuan (JPDC 69(2), 2009): n - 1 hops a round, (n - 1) / n of the bytes over
each edge.
trees: those of Sanders, Speck and Träff (Parallel Computing 35(12), 2009): the height, and what the busiest
    inner node passes on. One latency a level, though a tree that reads needs three.
bruck: that of Bruck et al. (IEEE TPDS 8(11), 1997): a latency a round, and every block over as many edges as
    its distance has bits. All blocks of a round as one message, though our program puts each by itself.
direct: a read is two latencies (ask, be answered), and to part one. Whatever is read of another host crosses
    the ports of both, as often as it is read.
eager: one latency; a rank posts its messages one after the other.
hierarchical: within hosts, between them, within hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import Operation, Request
from zbmd.collectives.algorithms.hierarchical import hosts_of
from zbmd.collectives.algorithms.trees import BinaryTree, balanced_tree, two_trees
from zbmd.collectives.errors import ProgramError
from zbmd.transport.errors import UserError

# The simulated network of collectives at scale: hosts of a few ranks, fast inside, slower between them.


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of ranks: `hosts[r]` is the host of rank r, `ports[r]` its port to the network."""

    hosts: tuple[int, ...]
    ports: tuple[int, ...]
    fabric: Fabric

    @property
    def n(self) -> int:
        """Return the number of ranks."""
        return len(self.hosts)

    @property
    def host_array(self) -> NDArray[np.int32]:
        """Return the hosts, int32 (n,)."""
        return np.array(self.hosts, np.int32)

    @property
    def port_array(self) -> NDArray[np.int32]:
        """Return the ports, int32 (n,)."""
        return np.array(self.ports, np.int32)

    @property
    def port_count(self) -> int:
        """Return the number of ports of all hosts."""
        return (max(self.hosts) + 1) * self.fabric.ports

    def without(self, gone: Collection[int]) -> Placement:
        """Return the group of the other ranks, renumbered; they stay on their hosts."""
        left = [rank for rank in range(self.n) if rank not in gone]
        return Placement(
            tuple(self.hosts[rank] for rank in left), tuple(self.ports[rank] for rank in left), self.fabric
        )


def place(n: int, fabric: Fabric) -> Placement:
    """Return `n` ranks, host after host."""
    each, ports = fabric.ranks_per_host, fabric.ports
    hosts = tuple(rank // each for rank in range(n))
    return Placement(hosts, tuple(hosts[rank] * ports + rank % each % ports for rank in range(n)), fabric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Latencies in ns, rates in bytes a ns (GB/s). The defaults: eight accelerators a host, 400 Gb/s between.

    near_*: between ranks of a host. far_*: between hosts, a port. own: reading or reducing own memory. post:
    what it takes a rank to post a put, a notification or a read. `ports`: how many a host has; rank i of it
    uses port i mod ports.
    """

    ranks_per_host: int = 8
    ports: int = 1
    near_ns: float = 1_000.0
    far_ns: float = 5_000.0
    post_ns: float = 200.0
    near_bytes_per_ns: float = 300.0
    far_bytes_per_ns: float = 50.0
    own_bytes_per_ns: float = 1_000.0

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1 or not 1 <= self.ports <= self.ranks_per_host:
            raise UserError(
                f"a host of {self.ranks_per_host} ranks and {self.ports} ports: "
                "give a rank or more, and at most a port for each"
            )
        rates = (self.near_bytes_per_ns, self.far_bytes_per_ns, self.own_bytes_per_ns)
        if min(rates) <= 0 or min(self.near_ns, self.far_ns, self.post_ns) < 0:
            raise UserError("a network's rates are above 0, and its latencies not below")

    def __str__(self) -> str:
        return (
            f"hosts of {self.ranks_per_host} ranks, {self.near_bytes_per_ns:g} GB/s and "
            f"{self.near_ns / 1e3:g} us inside; {self.ports} x {8 * self.far_bytes_per_ns:g} Gb/s a host and "
            f"{self.far_ns / 1e3:g} us between"
        )


SPREADING = (
    Operation.ALL_REDUCE,
    Operation.ALL_GATHER,
    Operation.BROADCAST,
    Operation.SCATTER,
    Operation.BARRIER,
)
"""In which all ranks need something of one and the same."""


def bound_ns(request: Request, placement: Placement, nbytes: float) -> float:
    """Return the lower bound of an algorithm. Raises `ProgramError` if it is not simulated at scale."""
    n, operation = placement.n, request.operation
    if n == 1:
        return 0.0
    match request.algorithm:
        case "ring":
            return _ring(placement, nbytes, rounds=2 if operation is Operation.ALL_REDUCE else 1)
        case "tree":
            tree = balanced_tree(n, request.root)
            return _trees((tree,), placement, nbytes, operation)
        case "double_tree":
            return _trees(two_trees(n), placement, nbytes, operation)
        case "hierarchical" | "hierarchical_tree":
            return _over_hosts(request, placement, nbytes)
        case "bruck":
            return _bruck(placement, nbytes)
        case "dissemination":
            return _rounds_way_ns(placement)
        case "direct":
            return _direct(request, placement, nbytes)
        case "eager":
            return _eager(request, placement, nbytes)
        case _:
            raise ProgramError(f"no bound is known for {request.algorithm!r}")


def least_ns(operation: Operation, placement: Placement, nbytes: float, root: int = 0) -> float:
    """Return the time that no algorithm can undercut.

    Between hosts: what has to leave or enter a host over its ports (for an all-reduce twice what a
    reduce-scatter sends, since it is one and an all-gather), and the route of one byte: one latency, or, if
    one rank's input has to reach all, the time until a message can have reached all hosts (`_reach_ns`). In
    one host: what has to move from rank to rank, by all of them together, at the rate within.
    """
    fabric, n, sizes = placement.fabric, placement.n, Counter(placement.hosts)
    share = (n - 1) / n
    if len(sizes) == 1:
        if operation is Operation.BARRIER:
            return fabric.near_ns * (n > 1)
        by_rank = n if operation in (Operation.GATHER, Operation.SCATTER) else 1
        return max(share / by_rank * nbytes / fabric.near_bytes_per_ns, fabric.near_ns * (n > 1))
    others = max((n - size) / n for size in sizes.values())
    at_root = (n - sizes[placement.hosts[root]]) / n
    exchanged = max(size * (n - size) / n for size in sizes.values())
    crossing = {
        Operation.ALL_REDUCE: 2 * (len(sizes) - 1) / len(sizes),
        Operation.ALL_GATHER: others,
        Operation.REDUCE_SCATTER: others,
        Operation.BROADCAST: 1.0,
        Operation.REDUCE: 1.0,
        Operation.GATHER: at_root,
        Operation.SCATTER: at_root,
        Operation.ALL_TO_ALL: exchanged,
        Operation.BARRIER: 0.0,
    }[operation]
    way = _reach_ns(len(sizes), fabric) if operation in SPREADING else fabric.far_ns
    return max(crossing * nbytes / (fabric.ports * fabric.far_bytes_per_ns), way)


def _reach_ns(hosts: int, fabric: Fabric) -> float:
    """Return when, at best, all hosts can have heard of one rank's input."""
    reading = 2 * fabric.far_ns + fabric.post_ns
    if not fabric.post_ns:
        return min(fabric.far_ns, reading)
    delay = max(1, int(fabric.far_ns // fabric.post_ns))  # in posts, rounded down: it is a bound
    reached = [1.0]
    while reached[-1] < hosts and len(reached) * fabric.post_ns < reading:
        at = len(reached)
        reached.append(reached[-1] + (fabric.ranks_per_host * reached[at - 1 - delay] if at > delay else 0.0))
    return min(reading, max(fabric.far_ns, (len(reached) - 1) * fabric.post_ns))


def _ring(placement: Placement, nbytes: float, *, rounds: int) -> float:
    fabric, n, hosts = placement.fabric, placement.n, len(set(placement.hosts))
    hops = rounds * (n - 1)
    far = rounds * (hosts - 1) if hosts > 1 else 0  # a round goes over all edges but one
    way = far * fabric.far_ns + (hops - far) * fabric.near_ns
    rate = fabric.far_bytes_per_ns if hosts > 1 else fabric.near_bytes_per_ns
    return max(way, hops / n * nbytes / rate)


def _trees(trees: tuple[BinaryTree, ...], placement: Placement, nbytes: float, operation: Operation) -> float:
    fabric, hosts, ports = placement.fabric, placement.hosts, placement.ports
    up, down = operation is not Operation.BROADCAST, operation is not Operation.REDUCE
    leaving, coming, busy_ns = Counter[int](), Counter[int](), [0.0] * placement.n
    for tree in trees:
        for node, parent in enumerate(tree.parents):
            if parent < 0:
                continue
            far = hosts[node] != hosts[parent]
            rate = fabric.far_bytes_per_ns if far else fabric.near_bytes_per_ns
            if up:
                busy_ns[node] += 1 / rate  # it puts its sum
                busy_ns[parent] += 3 / fabric.own_bytes_per_ns  # it reads two sums, and adds them
            if up and down:
                busy_ns[parent] += 1 / rate  # it puts the result
                busy_ns[node] += 1 / fabric.own_bytes_per_ns  # it takes that out of its slot
            elif down and not far:
                busy_ns[node] += 1 / rate  # it reads the result
            for source, target in ((node, parent),) * (far and up) + ((parent, node),) * (far and down):
                leaving[ports[source]] += 1
                coming[ports[target]] += 1
    crossing = max(0, *leaving.values(), *coming.values()) if leaving else 0
    way = max(_way_ns(tree, placement) for tree in trees)
    return max((up + down) * way, max(crossing / fabric.far_bytes_per_ns, *busy_ns) * nbytes / len(trees))


def _way_ns(tree: BinaryTree, placement: Placement) -> float:
    """Return the latencies from the root to the most distant node."""
    fabric, hosts = placement.fabric, placement.hosts
    farthest, level = 0.0, [(tree.root, 0.0)]
    while level:
        farthest = max(farthest, *(way for _, way in level))
        level = [
            (child, way + (fabric.near_ns if hosts[child] == hosts[node] else fabric.far_ns))
            for node, way in level
            for child in tree.children[node]
        ]
    return farthest


def _over_hosts(request: Request, placement: Placement, nbytes: float) -> float:
    """Reduce a slice over the host, between hosts, read the other slices: one after the other."""
    fabric = placement.fabric
    hosts = hosts_of(request.n, request.hosts)
    slices, count = min(map(len, hosts)), len(hosts)
    inside = (min(map(len, hosts)) - 1 + slices - 1) / slices * nbytes / fabric.near_bytes_per_ns
    if count == 1:
        return inside
    users = Counter(placement.ports[rank] for host in hosts for rank in host[:slices])
    tree = balanced_tree(count)
    if request.algorithm == "hierarchical":
        way, edges = 2 * (count - 1) * fabric.far_ns, 2 * (count - 1) / count
    else:
        # A sum up and a result down for each child, and one of each for the parent: as much out as in.
        most = max(len(tree.children[h]) + (tree.parents[h] >= 0) for h in range(count))
        way, edges = 2 * tree.height * fabric.far_ns, float(most)
    busiest = max(users.values()) * edges * nbytes / slices / fabric.far_bytes_per_ns
    return inside + max(way, busiest)


def _distances(n: int) -> list[int]:
    return [1 << k for k in range((n - 1).bit_length())]


def _rounds_way_ns(placement: Placement) -> float:
    """In a round all ranks hear of those so far behind, and of all that these had heard."""
    fabric, hosts = placement.fabric, placement.host_array
    at: NDArray[np.float64] = np.zeros(placement.n)
    for distance in _distances(placement.n):
        latency = np.where(hosts != np.roll(hosts, distance), fabric.far_ns, fabric.near_ns)
        at = np.maximum(at, np.roll(at, distance) + latency)
    return float(at.max())


def _bruck(placement: Placement, nbytes: float) -> float:
    fabric, n, hosts = placement.fabric, placement.n, placement.host_array
    block = nbytes / n
    leaving: NDArray[np.float64] = np.zeros(placement.port_count)
    near_ns: NDArray[np.float64] = np.zeros(n)
    to_go = np.arange(n)
    for k, distance in enumerate(_distances(n)):
        moved = int((to_go >> k & 1).sum()) * block
        far = hosts != np.roll(hosts, -distance)
        np.add.at(leaving, placement.port_array[far], moved)
        near_ns += np.where(far, moved / fabric.far_bytes_per_ns, moved / fabric.near_bytes_per_ns)
    busiest = max(float(leaving.max()) / fabric.far_bytes_per_ns, float(near_ns.max()))
    return max(_rounds_way_ns(placement), busiest)


def _direct(request: Request, placement: Placement, nbytes: float) -> float:
    fabric, n = placement.fabric, placement.n
    sizes = Counter(placement.hosts)
    way = 3 * fabric.far_ns if len(sizes) > 1 else fabric.near_ns
    match request.operation:
        case Operation.ALL_REDUCE:
            return 2 * max(way, _pairs_ns(placement, nbytes / n))
        case Operation.ALL_GATHER | Operation.REDUCE_SCATTER | Operation.ALL_TO_ALL:
            return max(way, _pairs_ns(placement, nbytes / n))
        case operation:
            block = nbytes / n if operation in (Operation.GATHER, Operation.SCATTER) else nbytes
            return max(way, _root_ns(request, placement, block))


def _pairs_ns(placement: Placement, block: float) -> float:
    """Return the bound if every rank gets a block of every other."""
    fabric, n, sizes = placement.fabric, placement.n, Counter(placement.hosts)
    coming = Counter[int]()
    for host, port in zip(placement.hosts, placement.ports, strict=True):
        coming[port] += n - sizes[host]
    near = (max(sizes.values()) - 1) * block / fabric.near_bytes_per_ns
    return max(near, max(coming.values()) * block / fabric.far_bytes_per_ns)


def _root_ns(request: Request, placement: Placement, block: float) -> float:
    """Return the bound if the root gives every other rank `block` bytes, or gets as many."""
    fabric, n, sizes = placement.fabric, placement.n, Counter(placement.hosts)
    siblings = sizes[placement.hosts[request.root]] - 1
    port = (n - 1 - siblings) * block / fabric.far_bytes_per_ns
    if request.operation in (Operation.BROADCAST, Operation.SCATTER):
        return max(port, min(siblings, 1) * block / fabric.near_bytes_per_ns)
    near = 0.0 if request.algorithm == "eager" else siblings * block / fabric.near_bytes_per_ns
    added = 2 * (n - 1) * block / fabric.own_bytes_per_ns if request.operation is Operation.REDUCE else 0.0
    return max(port, near + added)


def _eager(request: Request, placement: Placement, nbytes: float) -> float:
    fabric, n = placement.fabric, placement.n
    way = fabric.far_ns if len(set(placement.hosts)) > 1 else fabric.near_ns
    posts = (n - 1) * fabric.post_ns
    match request.operation:
        case Operation.ALL_REDUCE:
            return max(way, posts, _pairs_ns(placement, nbytes))
        case Operation.ALL_GATHER | Operation.REDUCE_SCATTER | Operation.ALL_TO_ALL:
            return max(way, posts, _pairs_ns(placement, nbytes / n))
        case Operation.BROADCAST:
            return max(way, posts, _root_ns(request, placement, nbytes))
        case Operation.SCATTER:
            return max(way, posts, _root_ns(request, placement, nbytes / n))
        case Operation.GATHER:
            return max(way, _root_ns(request, placement, nbytes / n))
        case _:
            return max(way, _root_ns(request, placement, nbytes))
