"""Reports, events and actions of a sharded state that is recut for each number of ranks (`resizing`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from zbmd.training.redundancy.holdings import Held, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The cut of a state: into `parts`, one a rank, in the epoch `made`. part: this rank's.

    On a mesh with other axes than `dp` a part is that of a place in the mesh of so many ranks.
    """

    made: int
    parts: int
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCut:
    """The report of a rank at the start of an epoch: what it holds of a cut. Wards of copies are its parts.

    older: what it keeps of the state as it was cut before; of that, `held.known` is the version that
    `held.digest` is of.
    """

    held: Held
    cut: Cut
    older: HeldCut | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSource:
    """The location of a part. older: it lies in what the rank keeps of the state as it was cut before.

    The place in `source` counts those that report beside the members, too, after these.
    """

    source: Source
    older: bool = False


class Span(NamedTuple):
    """Elements [start, start + length) of a slot of part `part` of a cut, which lie at `into` in another."""

    part: int
    start: int
    length: int
    into: int


class Resharding(NamedTuple):
    """The length of a slot in the cut before, and all that is read of its parts."""

    elements: int
    spans: Sequence[Span]


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredCut:
    """A new epoch: what all ranks that train hold, in the order of their places, and each one's host.

    beside: what others hold, which wait for another epoch. place: this rank's, in both together. epoch: its
    number.
    """

    held: tuple[HeldCut, ...]
    hosts: tuple[int, ...]
    place: int
    epoch: int
    beside: tuple[HeldCut, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharded:
    """The own part is there; `digest` of it. given: of the sources that lie here, in their order."""

    digest: int
    given: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """The digests of what others read at this rank, which waits: of the sources here, in their order."""

    given: tuple[int, ...]


# ---- actions


class Keeps(Enum):
    """The memory that is kept when a state is recut."""

    NOTHING = "nothing"
    OWN = "own"
    """That of the part as it was cut until now."""
    OLDER = "older"
    """That which was kept before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divide:
    """Make memory for part `part` of a state that is cut into `parts`, in place of the memory there.

    keeps: which memory is kept beside it, with its copies, until `Forget`; the other is given back.
    """

    parts: int
    part: int
    keeps: Keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """Put the own part of `version` together, from `sources` of a state that is cut into as many parts.

    Answer with `Resharded`.
    """

    version: int
    sources: tuple[CutSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lend:
    """Others read `sources` here, at a rank that waits: compute their digests. Answer with `Lent`."""

    sources: tuple[CutSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Give back the memory that was kept by `Divide`: all members have copies of the new parts."""
