"""What the nodes of a cluster say to each other about a job."""

from __future__ import annotations

from zbmd.actors.contracts import Contract


class HostLinked(Contract, id="zbmd.job.linked"):
    """To the other hosts of a job's view: all members that the sender runs are linked, and wait to enter it.

    again: the sender lacks the receiver's own `HostLinked` for this epoch, and asks for it.
    """

    job: int
    epoch: int
    again: bool = False
