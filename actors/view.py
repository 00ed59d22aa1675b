"""A job's view: the incarnations of its ranks that take part, under an epoch that only grows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_RANK_NAME = re.compile(r"rank(\d{1,3})", re.ASCII)


def rank_name(rank: int) -> str:
    """Return the name of a rank's process, which is also its id as a supervised child."""
    return f"rank{rank}"


def rank_of(name: str) -> int | None:
    """Return the rank of a process name; None if it is not a rank's."""
    found = _RANK_NAME.fullmatch(name)
    return int(found[1]) if found is not None else None


RANKS_MAX = (
    1022  # slots 0..1021 of a segment (ZBMD_MAX_SLOTS in transport/native/segment.h); 1023 is the node's
)
EPOCH_MAX = 2**32 - 1


class OnLoss(Enum):
    """Policy for the loss of a rank."""

    REPLACE = "replace"
    SHRINK = "shrink"
    STOP = "stop"


class RankState(Enum):
    """State of a rank's current incarnation."""

    WAITING = "waiting"  # not forked yet
    STARTING = "starting"  # forked or being forked, not joined
    JOINED = "joined"
    FINISHED = "finished"  # ended normally
    LOST = "lost"  # ended otherwise; a replacement may be on its way


class Outcome(Enum):
    """The outcome of a run."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"  # by request


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberId:
    """A rank in one of its incarnations: a replacement of the rank has a greater one."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One live process of a view. `address`: of its listener on its own host.

    host: an opaque name of its host; members with the same name share memory. tcp_address: where members on
    other hosts dial it, `host:port`; empty if it does not listen there. domain: the failure domain that its
    host is in, as a user has named it; empty: the host is one.
    """

    rank: int
    incarnation: int
    address: str
    host: str = ""
    tcp_address: str = ""
    domain: str = ""

    @property
    def id(self) -> MemberId:
        """Return the rank and its incarnation."""
        return MemberId(rank=self.rank, incarnation=self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The members of `epoch`. `finished` and `lost`: ranks that will not come back."""

    epoch: int
    members: tuple[Member, ...]
    finished: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks, ascending."""
        return tuple(m.rank for m in self.members)

    def domain_names(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the failure domain of each of these members: its name, or the number of its host."""
        hosts = {host: at for at, host in enumerate(dict.fromkeys(one.host for one in self.members))}
        found = {one.rank: one.domain or f"host {hosts[one.host]}" for one in self.members}
        return tuple(found[rank] for rank in ranks)

    def domains(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the failure domain of each of these members, by number, in the order of `ranks`."""
        names = self.domain_names(ranks)
        numbers = {name: at for at, name in enumerate(dict.fromkeys(names))}
        return tuple(numbers[name] for name in names)

    @property
    def ids(self) -> tuple[MemberId, ...]:
        """The members' ranks and incarnations, in rank order."""
        return tuple(m.id for m in self.members)

    def member(self, rank: int) -> Member | None:
        """Return the member with this rank, or None."""
        return next((m for m in self.members if m.rank == rank), None)
