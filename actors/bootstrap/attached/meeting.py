"""Decide how ranks attach: those of a host together, or not again at all (sans-I/O; for rank 0)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from zbmd.actors.bootstrap.attached.messages import Hello, Plan
from zbmd.actors.cluster.jobs.hosted_job import memory_domain
from zbmd.actors.cluster.local_deaths import pid_space
from zbmd.actors.view import RANKS_MAX

DIVIDER: Final = "|"
GUIDE: Final = "docs/GUIDE_BOOTSTRAP.md"


def host_name() -> str:
    """Return this host's name: ranks of one name share kernel, namespaces and user, so one supervisor."""
    return f"{memory_domain()}{DIVIDER}{pid_space()}{DIVIDER}{os.getuid()}"


def plan_of(greetings: Sequence[Hello], name: str, *, cookie: str) -> Plan:
    """Return what all ranks are to do; their greetings are in the order of the ranks.

    cookie: for a job on several hosts.
    """
    size = len(greetings)
    if size > RANKS_MAX:
        return Plan(problem=f"world_size: expected at most {RANKS_MAX} ranks, got {size}")
    job = greetings[0].job
    if job and all((h.job, h.rank, h.size) == (job, rank, size) for rank, h in enumerate(greetings)):
        return Plan(name=name, stays=True)
    found: dict[str, list[int]] = {}
    for rank, greeting in enumerate(greetings):
        found.setdefault(greeting.host, []).append(rank)
    hosts = tuple(tuple(ranks) for ranks in found.values())
    if len(hosts) == 1:
        return Plan(name=name, hosts=hosts)
    if problem := _divided(found) or _uneven(hosts):
        return Plan(
            problem=f"{problem}. `zbmd-node run --nnodes` runs them, also under this launcher: {GUIDE}"
        )
    return Plan(name=name, hosts=hosts, cookie=cookie)


def _divided(found: Mapping[str, Sequence[int]]) -> str:
    """Why processes that could share memory cannot: they do not see each other."""
    kernels: dict[str, Sequence[int]] = {}
    for host, ranks in found.items():
        other = kernels.setdefault(host.partition(DIVIDER)[0], ranks)
        if other is not ranks:
            return (
                f"ranks {other[0]} and {ranks[0]} are on one host, in other namespaces of processes or of "
                "other users: expected the same of both"
            )
    return ""


def _uneven(hosts: Sequence[Sequence[int]]) -> str:
    in_turn = [rank for ranks in hosts for rank in ranks] == list(range(sum(map(len, hosts))))
    if in_turn and len({len(ranks) for ranks in hosts}) == 1:
        return ""
    shown = "; ".join(f"{', '.join(map(str, ranks[:4]))}{' …' if ranks[4:] else ''}" for ranks in hosts[:4])
    return (
        f"the ranks are on {len(hosts)} hosts as {shown}: expected as many on each, one after the other, "
        "0 and up on the first"
    )
