"""Reports of ranks at the start of an epoch: the versions that they hold, and copies of others' shards."""

from __future__ import annotations

from dataclasses import dataclass

SLOTS = 2
NO_DIGEST = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A complete copy of the shard of the rank at place `ward`, or of that part of a cut."""

    ward: int
    version: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The versions that a rank holds at the start of an epoch. `own`: of its shard by slot; None: incomplete.

    `known`: the highest version that it knows to be committed, `digest`: of its shard of it, if it voted for
    that. `first`: the version that it can begin with, from a seed or a checkpoint.
    """

    own: tuple[int | None, int | None]
    known: int
    copies: tuple[Copy | None, Copy | None]
    first: int = 0
    digest: int = NO_DIGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The location of a shard: a slot of the rank at `place`.

    `own`: whether it is a slot of that rank's own shard, and not of a copy; `digest` is `NO_DIGEST` if nobody
    here voted for it.
    """

    place: int
    slot: int
    digest: int
    own: bool = False
