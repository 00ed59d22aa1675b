"""Messages between the nodes of a cluster about one job: view entry, and hang detection over hosts."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.actors.hangs.wire import Standing, Text
from zbmd.actors.view import RANKS_MAX


class HostLinked(Contract, id="zbmd.job.linked"):
    """To the other hosts of a job's view, the one of `epoch`.

    linked: all of its members that the sender runs are linked, and wait to enter it; else the sender has gone
    on to a later view and never will say so. ask: the sender waits for the receiver's own word.
    """

    job: int
    epoch: int
    linked: bool
    ask: bool = False


# --- hangs: each host's watchdogs are brought before one of the job's hosts, the judge (`hang_relay`) -----


class HangBeats(Contract, id="zbmd.job.hang_beats"):
    """To the judge, once a look: the watchdogs of these ranks and incarnations of ours run."""

    job: int
    ranks: Annotated[tuple[tuple[int, int], ...], msgspec.Meta(max_length=2 * RANKS_MAX)]


class HangStanding(Contract, id="zbmd.job.hang_standing"):
    """To the judge: where a rank of ours stands."""

    job: int
    rank: int
    incarnation: int
    standing: Standing


class HangSeen(Contract, id="zbmd.job.hang_seen"):
    """To the judge: how the process of a rank of ours looks from outside; `gone`: it has ended."""

    job: int
    rank: int
    incarnation: int
    words: Text
    gone: bool = False


class HangAsk(Contract, id="zbmd.job.hang_ask"):
    """From the judge: where does a rank of yours stand? outside: how does its process look?"""

    job: int
    rank: int
    incarnation: int
    outside: bool = False


class HangEnd(Contract, id="zbmd.job.hang_end"):
    """From the judge: end this rank of yours, as if it had died."""

    job: int
    rank: int
    incarnation: int


HangMessage: TypeAlias = HangBeats | HangStanding | HangSeen | HangAsk | HangEnd
