"""What an all-reduce by each algorithm cannot be faster than on a network, in the α-β model.

Three things bound a phase: the way of one chunk (latencies one after the other), the busiest port (its bytes
over its rate) and the busiest rank. Phases that a rank does one after the other add up. For the ring these
are the terms of Patarasuk and Yuan (JPDC 69(2), 2009), for trees those of Sanders, Speck and Träff (Parallel
Computing 35(12), 2009).
"""

from __future__ import annotations

import math
from collections import Counter

from zbmd.collectives.algorithms import Request
from zbmd.collectives.algorithms.hierarchical import hosts_of
from zbmd.collectives.algorithms.reduction_trees import BinaryTree, balanced_tree, two_trees
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.scale.placement import Placement


def bound_ns(request: Request, placement: Placement, nbytes: float) -> float:
    """Of `nbytes` a rank. Raises `ProgramError` for an algorithm that is not simulated at scale."""
    match request.algorithm:
        case "ring":
            return _ring(placement, nbytes)
        case "tree":
            return _trees((balanced_tree(request.n),), placement, nbytes)
        case "double_tree":
            return _trees(two_trees(request.n), placement, nbytes)
        case "hierarchical" | "hierarchical_tree":
            return _over_hosts(request, placement, nbytes)
        case _:
            raise ProgramError(f"no bound is known for {request.algorithm!r}")


def least_ns(placement: Placement, nbytes: float) -> float:
    """What no all-reduce of these hosts can be faster than: what has to leave and enter each host."""
    fabric, hosts = placement.fabric, len(set(placement.hosts))
    if hosts == 1:
        share = (placement.n - 1) / placement.n
        return max(share * nbytes / fabric.near_bytes_per_ns, fabric.near_ns if placement.n > 1 else 0.0)
    crossing = 2 * (hosts - 1) / hosts * nbytes / (fabric.ports * fabric.far_bytes_per_ns)
    return max(crossing, math.ceil(math.log2(hosts)) * fabric.far_ns)


def _ring(placement: Placement, nbytes: float) -> float:
    fabric, n, hosts = placement.fabric, placement.n, len(set(placement.hosts))
    hops = 2 * (n - 1)
    far = 2 * hosts - 2 if hosts > 1 else 0  # two rounds but two hops
    way = far * fabric.far_ns + (hops - far) * fabric.near_ns
    rate = fabric.far_bytes_per_ns if hosts > 1 else fabric.near_bytes_per_ns
    return max(way, hops / n * nbytes / rate)


def _trees(trees: tuple[BinaryTree, ...], placement: Placement, nbytes: float) -> float:
    fabric, hosts, ports = placement.fabric, placement.hosts, placement.ports
    crossing, busy_ns = Counter[int](), [0.0] * placement.n
    for tree in trees:
        for node, parent in enumerate(tree.parents):
            if parent < 0:
                continue
            far = hosts[node] != hosts[parent]
            if far:  # its sum up and the result down: as much leaves either port as comes in
                crossing[ports[node]] += 1
                crossing[ports[parent]] += 1
            rate = fabric.far_bytes_per_ns if far else fabric.near_bytes_per_ns
            busy_ns[node] += 2 / rate  # it puts the sum, and reads the result
            busy_ns[parent] += 3 / fabric.own_bytes_per_ns  # it reads two sums, and adds them
    busiest = max(crossing.values(), default=0) / fabric.far_bytes_per_ns
    way = max(_way_ns(tree, placement) for tree in trees)
    return max(2 * way, max(busiest, *busy_ns) * nbytes / len(trees))


def _way_ns(tree: BinaryTree, placement: Placement) -> float:
    """The latencies from the root to the node that is farthest away."""
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
