"""The redundancy of a run: replicas, buddies, an erasure code, files or none; and why."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zbmd.actors.rank.environment import DOMAINS_VARIABLE, JobEnvironment, domains_in, links_wanted
from zbmd.training.job.mesh import Mesh
from zbmd.training.redundancy.coded.driver import SCRATCH_BYTES
from zbmd.training.redundancy.coded.field import SHARDS_MAX
from zbmd.training.redundancy.coded.machine import Code
from zbmd.training.redundancy.coded.placement import ALIGNMENT, grouped, room_bytes, shortage
from zbmd.training.redundancy.holdings import SLOTS
from zbmd.training.sharded.options import TrainOptions
from zbmd.transport.errors import UserError

AUTO, BUDDY, REPLICA, NONE, CODED, FILE = "auto", "buddy", "replica", "none", "ec", "file"
APART: Final = (
    "Ranks along dp hold the same for no memory if their hosts are in different domains: number the hosts "
    "domain by domain (--node-rank)"
)
NAMED_MAX: Final = 8
"""Ranks of a state."""
HOSTS_FOR_CODE: Final = 6
"""A job on as many hosts gets a code by itself."""
CODE_OF_MANY: Final = (4, 2)
_CODED: Final = re.compile(r"ec:(\d{1,3})\+(\d{1,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """The protection of a run against lost ranks. data, parity: of a code; why: for people."""

    kind: str
    why: str
    data: int = 0
    parity: int = 0

    def __str__(self) -> str:
        name = f"{CODED}:{self.data}+{self.parity}" if self.kind == CODED else self.kind
        return f"{name}: {self.why}"


def parse_redundancy(text: str) -> str:
    """Return the value of `--redundancy`. Raises `UserError` for anything else."""
    found = _CODED.fullmatch(text)
    shards = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if text in (AUTO, BUDDY, REPLICA, NONE) or (min(shards) > 0 and sum(shards) <= SHARDS_MAX):
        return text
    raise UserError(f"expected auto, replica, buddy, ec:K+M such as ec:4+2, or none, got {text!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Domains:
    """Failure domains, as far as they are known before ranks meet. hosts: the number of each rank's.

    names: the domain of each rank, if nodes are placed in their order; None: nobody has named one; empty: not
    all are known, since not all nodes were here when the job was given.
    """

    hosts: tuple[int, ...]
    names: tuple[str, ...] | None

    @property
    def numbered(self) -> tuple[str, ...]:
        """The hosts, as names."""
        return tuple(f"host {number}" for number in self.hosts)

    @property
    def count(self) -> int:
        """The number of domains that are known to be there."""
        return len(set(self.hosts if self.names is None else self.names))


def domains_of(mesh: Mesh) -> Domains:
    """Return the failure domains of the ranks of a mesh: those that users have named, or their hosts.

    All ranks of a job know the same of them, however late they start.
    """
    launched = JobEnvironment.read_job(os.environ)
    here = mesh.world_size if launched is None else launched.ranks_per_host
    each = 1 if links_wanted(os.environ) != "auto" else here
    hosts = tuple(rank // each for rank in range(mesh.world_size))
    given = domains_in(os.environ.get(DOMAINS_VARIABLE, ""))
    if launched is None or not given:
        return Domains(hosts=hosts, names=None)
    names = tuple(name for name in given for _ in range(here)) if len(given) == launched.hosts else ()
    return Domains(hosts=hosts, names=names)


def confined(states: Sequence[Sequence[int]], names: Sequence[str]) -> tuple[str, tuple[int, ...]] | None:
    """Return a failure domain that holds a state and all of its copies, and the ranks that hold that.

    None: no loss of one domain takes a state, or there is one domain. states: the ranks of each; names: the
    domain of each rank.
    """
    if len(set(names)) < 2:
        return None
    for ranks in states:
        where = {names[rank] for rank in ranks}
        if len(where) == 1:
            return where.pop(), tuple(ranks)
    return None


def _may_be_confined(mesh: Mesh) -> str:
    """Return why replicas along `dp` may be lost with one failure domain that a user has named; "": they
    cannot.
    """
    launched, given = JobEnvironment.read_job(os.environ), domains_in(os.environ.get(DOMAINS_VARIABLE, ""))
    if launched is None or not given:
        return ""
    states, each = mesh.with_one_state(), launched.ranks_per_host
    if len(given) == launched.hosts:
        found = confined(states, [name for name in given for _ in range(each)])
        if found is None:
            return ""
        domain, ranks = found
        shown = ", ".join(map(str, ranks[:NAMED_MAX])) + (", …" if ranks[NAMED_MAX:] else "")
        return f"{domain} holds the state of rank {shown} and all of its copies"
    most = max(Counter(given).values()) + launched.hosts - len(given)
    fewest = min(len({rank // each for rank in ranks}) for ranks in states)
    return "" if most < fewest else "nodes that come later may be in any failure domain"


def has_replicas(mesh: Mesh, redundancy: str) -> bool:
    """Return whether ranks along `dp` stand for each other. redundancy: as it was asked for.

    They do if no host has all that hold a state, and no failure domain. The latter does not count where views
    may be smaller, which buddies exclude, unless these are asked for.
    """
    launched = JobEnvironment.read_job(os.environ)
    shrinks = launched is not None and 0 < launched.ranks_min < launched.world_size
    apart = redundancy == REPLICA or (shrinks and redundancy != BUDDY) or not _may_be_confined(mesh)
    return apart and mesh.has_replicas(domains_of(mesh).hosts.count(0))


def redundancy_of(options: TrainOptions, mesh: Mesh, *, shrinks: bool) -> Redundancy:
    """Return the redundancy that a recipe asks for, or the best one. shrinks: whether views may be smaller.

    Raises `UserError` for one that the mesh does not have.
    """
    domains, asked = domains_of(mesh), options.redundancy
    hosts, replicated = max(domains.hosts) + 1, has_replicas(mesh, asked)
    recuts = options.recuts(mesh) and shrinks
    if options.offload is not None:
        if asked != AUTO:
            raise UserError("--redundancy: with --offload the state is in files: omit one of both.")
        return Redundancy(kind=FILE, why="the state is in files, which outlive their ranks")
    if options.shards_over_all(mesh):
        replicated = False
    if asked == REPLICA and not replicated:
        raise UserError(
            f"--redundancy replica: no two ranks of {mesh} hold the same on two hosts: give more dp."
        )
    if asked == BUDDY and replicated:
        raise UserError(f"--redundancy buddy: ranks along dp of {mesh} hold the same already: omit it.")
    if asked in (BUDDY, REPLICA, NONE):
        return Redundancy(kind=asked, why="it was asked for")
    if asked != AUTO:
        return _coded(asked, mesh, domains, why="it was asked for", refused=replicated, recuts=recuts)
    if mesh.world_size == 1:
        return Redundancy(kind=NONE, why="there is one rank; its memory and checkpoints remain")
    why = "" if options.shards_over_all(mesh) else _may_be_confined(mesh)
    if replicated and why:
        lost = "the loss of one may end the run at its last checkpoint"
        return Redundancy(kind=REPLICA, why=f"{why}: {lost}. {APART}, or give --redundancy buddy")
    if replicated:
        return Redundancy(kind=REPLICA, why="ranks along dp hold the same")
    if why and has_replicas(mesh, REPLICA):
        return Redundancy(kind=BUDDY, why=f"{why}: a rank in another one has one more. {APART}")
    data, parity = CODE_OF_MANY
    fits = not shortage(domains.names or domains.numbered, data=data, parity=parity)
    if domains.count >= HOSTS_FOR_CODE and fits and not recuts:
        text, what = f"{CODED}:{data}+{parity}", "hosts" if domains.names is None else "failure domains"
        why = f"{domains.count} {what} hold different states, of which two may be lost for half a copy"
        return _coded(text, mesh, domains, why=why, refused=False, recuts=False)
    if domains.names is not None:
        return Redundancy(
            kind=BUDDY, why="each state is on one rank: one in another failure domain has a copy"
        )
    where = "another host" if hosts > 1 else "another rank"
    return Redundancy(kind=BUDDY, why=f"each state is on one rank: {where} has a copy")


def _coded(text: str, mesh: Mesh, domains: Domains, *, why: str, refused: bool, recuts: bool) -> Redundancy:
    found = _CODED.fullmatch(text)
    assert found is not None, "it was parsed"
    data, parity = int(found[1]), int(found[2])
    if refused:
        raise UserError(f"--redundancy {text}: ranks along dp of {mesh} hold the same already: omit it.")
    if recuts:
        raise UserError(f"--redundancy {text}: a state that is recut has buddies: give --on-loss replace.")
    if domains.names != () and (
        found_out := shortage(domains.names or domains.numbered, data=data, parity=parity)
    ):
        raise UserError(
            f"--redundancy {found_out}. Give fewer parities, or more hosts in other failure domains."
        )
    return Redundancy(kind=CODED, why=why, data=data, parity=parity)


def code_of(redundancy: Redundancy, mesh: Mesh, nbytes: int) -> Code | None:
    """Return the code of a run whose largest state has `nbytes`; None for another redundancy."""
    if redundancy.kind != CODED:
        return None
    domains = domains_of(mesh)
    if domains.names is None:
        room = room_bytes(grouped(domains.hosts, data=redundancy.data, parity=redundancy.parity), nbytes)
    else:  # who joins, or takes a lost node's place, may be in any: the smallest groups need most
        room = redundancy.parity * -(-nbytes // ALIGNMENT) * ALIGNMENT
    return Code(data=redundancy.data, parity=redundancy.parity, nbytes=nbytes, room=room)


def arena_bytes(code: Code | None) -> int:
    """Return the bytes of arena that a code needs beside the state."""
    return 0 if code is None else SLOTS * code.room + SCRATCH_BYTES + (1 << 16)


def unused_bytes(code: Code | None, mesh: Mesh) -> int:
    """Return how much of `arena_bytes` no page is taken for, as far as the failure domains are known."""
    domains = domains_of(mesh)
    if code is None or not domains.names:
        return 0
    numbers = [domains.names.index(name) for name in domains.names]
    return SLOTS * (code.room - room_bytes(grouped(numbers, data=code.data, parity=code.parity), code.nbytes))
