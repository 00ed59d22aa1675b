"""What the simulated job of `commit` is made of: messages, memory, and what outlives a process.

What a step computes is the scenario's choice (`Contents`): here a hash chain, in
`zbmd.training.replicated.scenario` the training itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from zbmd.actors import view as membership
from zbmd.collectives.commit import events as cm
from zbmd.collectives.commit.machine import StepCommit
from zbmd.transport import sim


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """The node tells a rank that all members of the view of `epoch` are linked."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """A rank has lost its links to another, which lives."""

    member: cm.MemberId


Message: TypeAlias = (
    Parted
    | membership.Joined
    | membership.InstallView
    | membership.Linked
    | Enter
    | cm.ReportReceived
    | cm.VoteReceived
    | cm.FinishReceived
    | cm.GaveUpReceived
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOptions:
    """One run: `world_size` ranks, `steps` steps, `kills` SIGKILLs at random moments, then calm."""

    world_size: int = 4
    steps: int = 12
    kills: int = 3
    shrink: bool = False
    corrupting: bool = False
    """A pull now and then brings other bits than it read, as bad memory does: it must be noticed."""
    late: bool = False
    """One rank joins the others at their work."""


class Slots(Protocol):
    """The two slots of one incarnation of a rank: peers can read them, also after its death."""

    def digest(self, slot: int) -> bytes:
        """Of what the slot holds now."""
        ...

    def tear(self, slot: int) -> None:
        """Write something into it that is no version, as work under way does."""
        ...

    def enter(self, work: cm.RunStep) -> None:
        """Begin a step: do what needs no other rank. Its target is torn from here on."""
        ...

    def step(self, work: cm.RunStep) -> bool:
        """End the step, which all members have entered. False if a lost member cuts it short."""
        ...

    def copy(self, source: Slots, source_slot: int, slot: int) -> None:
        """Pull what a slot of a member holds into one of ours."""
        ...

    def recall(self, version: int, slot: int) -> None:
        """Read the preserved `version` back."""
        ...


class Contents(Protocol):
    """What versions hold, and what a step makes of them."""

    def digest_of(self, version: int) -> bytes:
        """Of the one content that `version` may have."""
        ...

    def open(self, member: cm.MemberId) -> Slots:
        """The slots of a new incarnation: 0 holds version 0."""
        ...


ContentsOf: TypeAlias = "Callable[[sim.Simulation[Message]], Contents]"
"""Makes the contents of a job in a simulation."""


def oracle(version: int) -> bytes:
    """The one content that `version` may have: a hash chain, as a step is a function of the one before."""
    content = b"initial"
    for step in range(1, version + 1):
        content = _advance(content, step)
    return content


def _advance(content: bytes, version: int) -> bytes:
    return hashlib.blake2b(content + version.to_bytes(4, "little"), digest_size=16).digest()


class HashSlots(Slots):
    """Slots of a hash chain; a content is its own digest."""

    def __init__(self) -> None:
        self.held = [oracle(0), b"unwritten"]

    def digest(self, slot: int) -> bytes:
        """See `Slots`."""
        return self.held[slot]

    def tear(self, slot: int) -> None:
        """See `Slots`."""
        self.held[slot] = b"torn"

    def enter(self, work: cm.RunStep) -> None:
        """See `Slots`."""
        self.tear(work.slot)

    def step(self, work: cm.RunStep) -> bool:
        """See `Slots`."""
        self.held[work.slot] = _advance(self.held[1 - work.slot], work.version)
        return True

    def copy(self, source: Slots, source_slot: int, slot: int) -> None:
        """See `Slots`."""
        self.held[slot] = source.digest(source_slot)

    def recall(self, version: int, slot: int) -> None:
        """See `Slots`."""
        self.held[slot] = oracle(version)


class HashChain(Contents):
    """The simplest job whose versions can be told apart."""

    def __init__(self, simulation: sim.Simulation[Message]) -> None:
        """It needs nothing of the simulation."""

    def digest_of(self, version: int) -> bytes:
        """See `Contents`."""
        return oracle(version)

    def open(self, member: cm.MemberId) -> Slots:
        """See `Contents`."""
        return HashSlots()


@dataclass(slots=True)
class World:
    """What outlives a process: its memory, the commit log, and who has entered which step."""

    options: CommitOptions
    contents: Contents
    slots: dict[cm.MemberId, Slots] = field(default_factory=dict[cm.MemberId, Slots])
    entered: dict[tuple[int, int], set[int]] = field(default_factory=dict[tuple[int, int], set[int]])
    workers: dict[tuple[int, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[int, int], tuple[int, ...]]
    )
    """By epoch and version, who computes: all members must say the same."""
    abandoned: set[int] = field(default_factory=set[int])
    """Epochs in which a member goes along no more: its peers' operations end."""
    committed_max: int = 0
    finished: set[int] = field(default_factory=set[int])
    preserved: bool = False
    state_lost: bool = False
    corrupted: bool = False
    corruption_noticed: bool = False
    machines: dict[cm.MemberId, StepCommit] = field(default_factory=dict[cm.MemberId, StepCommit])
