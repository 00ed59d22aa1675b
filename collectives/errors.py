"""Typed errors of collective operations."""

from __future__ import annotations

from enum import Enum

from zbmd.transport.errors import PeerLost, ZbmdError


class CollectiveError(ZbmdError):
    """The root of the errors raised by a collective operation."""


class MembersLost(PeerLost):
    """Members of the group died during an operation. `ranks` are all that are known; `peer` the first."""

    def __init__(self, ranks: tuple[int, ...], reason: str) -> None:
        super().__init__(f"rank{ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}", reason)
        self.peer = ranks[0]
        self.ranks = ranks


class OperationAborted(CollectiveError):
    """The operation was ended by `abort()`, here or on a peer; its output is not to be used."""


class InputsOverwritten(CollectiveError):
    """A member died in an operation in place: compute its input again and call it once more, in the same
    group. All who live get this error, of the same operation."""


class NotReplaced(CollectiveError):
    """An operation was to wait for a replacement, and this job replaces nobody. All who live get it."""


class Desynchronised(CollectiveError):
    """Ranks of one group called different operations: a bug in the program that calls them.

    All ranks of the group get it. `calls` maps each rank of the job that is in the group to the call it made,
    as text, as far as it is known. `detail`: what does not fit, where the calls themselves do not show it.
    """

    def __init__(self, message: str, calls: dict[int, str], detail: str = "") -> None:
        super().__init__(message)
        self.calls = calls
        self.detail = detail


class EpochExhausted(CollectiveError):
    """The group has used up an epoch's notification counter: install a new epoch to go on."""


class ProgramError(CollectiveError):
    """A program's text or a request for a program is malformed."""


class Flaw(Enum):
    """A kind of error in a set of programs."""

    MALFORMED = "malformed"
    OUT_OF_BOUNDS = "operand out of bounds"
    NOT_ACCESSIBLE = "operand not accessible"
    UNINITIALISED = "reads a place that holds nothing"
    WRONG_CHUNK = "mixes chunks"
    DUPLICATE = "a contribution counts twice"
    DEADLOCK = "deadlock"
    RACE = "data race"
    OVERWRITTEN = "overwritten before it was consumed"
    UNCONSUMED = "never consumed"
    UNBALANCED = "notifications do not balance"
    WRONG_OUTPUT = "output does not hold its contributions"
    WRONG_ORDER = "output is reduced in another order"
    PARTIAL_OUTPUT = "reduces what is no end result into the output"
    UNFINISHED = "output holds a copy of a sum that was never finished"
    NOT_SYNCHRONISED = "may complete before another rank has begun"


class VerificationError(CollectiveError):
    """A set of programs is wrong. `rank` and `index` name the instruction, `flaw` the kind."""

    def __init__(self, flaw: Flaw, rank: int, index: int | None, detail: str) -> None:
        at = "at its end" if index is None else f"instruction {index}"
        super().__init__(f"rank {rank}, {at}: {flaw.value}: {detail}")
        self.flaw = flaw
        self.rank = rank
        self.index = index
