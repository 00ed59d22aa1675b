"""What the nodes of a cluster say to each other about a job."""

from __future__ import annotations

from zbmd.actors.contracts import Contract


class HostLinked(Contract, id="zbmd.job.linked"):
    """To the other hosts of a job's view, the one of `epoch`.

    linked: all of its members that the sender runs are linked, and wait to enter it; else the sender has gone
    on to a later view and never will say so. ask: the sender waits for the receiver's own word.
    """

    job: int
    epoch: int
    linked: bool
    ask: bool = False
