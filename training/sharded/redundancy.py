"""The redundancy of a run: replicas, buddies, an erasure code, files or none; and why."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zbmd.actors.rank.environment import RankEnvironment, links_wanted
from zbmd.training.job.mesh import Mesh
from zbmd.training.redundancy.coded.driver import SCRATCH_BYTES
from zbmd.training.redundancy.coded.field import SHARDS_MAX
from zbmd.training.redundancy.coded.machine import Code
from zbmd.training.redundancy.coded.placement import grouped, room_bytes
from zbmd.training.redundancy.holdings import SLOTS
from zbmd.training.sharded.options import TrainOptions
from zbmd.transport.errors import UserError

AUTO, BUDDY, REPLICA, NONE, CODED, FILE = "auto", "buddy", "replica", "none", "ec", "file"
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


def domains_of(mesh: Mesh) -> tuple[int, ...]:
    """Return the host of each rank of a mesh, by number, as its launcher starts them."""
    launched = RankEnvironment.read(os.environ)
    here = mesh.world_size if launched is None else launched.ranks_per_host
    each = 1 if links_wanted(os.environ) != "auto" else here
    return tuple(rank // each for rank in range(mesh.world_size))


def redundancy_of(options: TrainOptions, mesh: Mesh, *, shrinks: bool) -> Redundancy:
    """Return the redundancy that a recipe asks for, or the best one. shrinks: whether views may be smaller.

    Raises `UserError` for one that the mesh does not have.
    """
    domains, asked = domains_of(mesh), options.redundancy
    hosts, has_replicas = max(domains) + 1, mesh.has_replicas(domains.count(0))
    recuts = options.recuts(mesh) and shrinks
    if options.offload is not None:
        if asked != AUTO:
            raise UserError("--redundancy: with --offload the state is in files: omit one of both.")
        return Redundancy(kind=FILE, why="the state is in files, which outlive their ranks")
    if options.shards_over_all(mesh):
        has_replicas = False
    if asked == REPLICA and not has_replicas:
        raise UserError(
            f"--redundancy replica: no two ranks of {mesh} hold the same on two hosts: give more dp."
        )
    if asked == BUDDY and has_replicas:
        raise UserError(f"--redundancy buddy: ranks along dp of {mesh} hold the same already: omit it.")
    if asked in (BUDDY, REPLICA, NONE):
        return Redundancy(kind=asked, why="it was asked for")
    if asked != AUTO:
        return _coded(asked, mesh, domains, why="it was asked for", refused=has_replicas, recuts=recuts)
    if mesh.world_size == 1:
        return Redundancy(kind=NONE, why="there is one rank; its memory and checkpoints remain")
    if has_replicas:
        return Redundancy(kind=REPLICA, why="ranks along dp hold the same")
    if hosts >= HOSTS_FOR_CODE and not recuts:
        text = f"{CODED}:{CODE_OF_MANY[0]}+{CODE_OF_MANY[1]}"
        why = f"{hosts} hosts hold different states, of which two may be lost for half a copy"
        return _coded(text, mesh, domains, why=why, refused=False, recuts=False)
    where = "another host" if hosts > 1 else "another rank"
    return Redundancy(kind=BUDDY, why=f"each state is on one rank: {where} has a copy")


def _coded(
    text: str, mesh: Mesh, domains: Sequence[int], *, why: str, refused: bool, recuts: bool
) -> Redundancy:
    found = _CODED.fullmatch(text)
    assert found is not None, "it was parsed"
    data, parity = int(found[1]), int(found[2])
    if refused:
        raise UserError(f"--redundancy {text}: ranks along dp of {mesh} hold the same already: omit it.")
    if recuts:
        raise UserError(f"--redundancy {text}: a state that is recut has buddies: give --on-loss replace.")
    least = min((group.parity for group in grouped(domains, data=data, parity=parity)), default=0)
    if least < parity:
        raise UserError(
            f"--redundancy {text}: expected {parity + 1} or more hosts for the shards of each group, got "
            f"{max(domains) + 1}: give fewer parities, or more hosts."
        )
    return Redundancy(kind=CODED, why=why, data=data, parity=parity)


def code_of(redundancy: Redundancy, mesh: Mesh, nbytes: int) -> Code | None:
    """Return the code of a run whose largest state has `nbytes`; None for another redundancy."""
    if redundancy.kind != CODED:
        return None
    groups = grouped(domains_of(mesh), data=redundancy.data, parity=redundancy.parity)
    room = room_bytes(groups, nbytes)
    return Code(data=redundancy.data, parity=redundancy.parity, nbytes=nbytes, room=room)


def arena_bytes(code: Code | None) -> int:
    """Return the bytes of arena that a code needs beside the state."""
    return 0 if code is None else SLOTS * code.room + SCRATCH_BYTES + (1 << 16)
