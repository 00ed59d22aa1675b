"""Decide how ranks attach: those of a host together, or not again at all (sans-I/O; for rank 0)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zbmd.actors.bootstrap.attached.messages import Hello, Plan
from zbmd.actors.cluster.jobs.hosted_job import memory_domain
from zbmd.actors.cluster.local_deaths import pid_space
from zbmd.actors.view import RANKS_MAX


def host_name() -> str:
    """Return this host's name: ranks of one name share kernel, namespaces and user, so one supervisor."""
    return f"{memory_domain()}/{pid_space()}/{os.getuid()}"


def plan_of(greetings: Sequence[Hello], name: str) -> Plan:
    """Return what all ranks are to do; their greetings are in the order of the ranks."""
    size = len(greetings)
    if size > RANKS_MAX:
        return Plan(problem=f"world_size: expected at most {RANKS_MAX} ranks, got {size}")
    job = greetings[0].job
    if job and all((h.job, h.rank, h.size) == (job, rank, size) for rank, h in enumerate(greetings)):
        return Plan(name=name, stays=True)
    hosts: dict[str, list[int]] = {}
    for rank, greeting in enumerate(greetings):
        hosts.setdefault(greeting.host, []).append(rank)
    if len(hosts) > 1:
        return Plan(problem=_of_several_hosts(list(hosts.values())))
    return Plan(name=name, hosts=tuple(tuple(ranks) for ranks in hosts.values()))


def _of_several_hosts(hosts: Sequence[Sequence[int]]) -> str:
    shown = ", ".join(f"rank {ranks[0]}" for ranks in hosts[:4])
    return (
        f"the ranks are on {len(hosts)} hosts, or in other namespaces or of other users ({shown} … have "
        "one each): under launchers other than `zbmd-node run`, all ranks must share a host. Start them by "
        "`zbmd-node run --nnodes` (under torchrun, Slurm or mpirun too: docs/GUIDE_BOOTSTRAP.md)"
    )
