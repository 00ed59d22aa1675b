"""A member's word in the agreement on the next view.

Single-decree Paxos (Lamport, "Paxos made simple", 2001), one decree for each view, with the quorums of
`members.quorum`. A life that ends never comes back with the same key, so nothing need be on disk.
"""

from __future__ import annotations

from zbmd.actors.cluster.messages import Accepted, Ballot
from zbmd.actors.cluster.view import Change


class Acceptor:
    """The word of one member on what follows one view."""

    def __init__(self) -> None:
        self.promised: Ballot | None = None
        self.accepted: Accepted | None = None

    def prepare(self, ballot: Ballot) -> Ballot | None:
        """Promise to take no ballot older than this; the ballot in the way, if a newer one was promised."""
        if self.promised is not None and ballot < self.promised:
            return self.promised
        self.promised = ballot
        return None

    def accept(self, ballot: Ballot, change: Change) -> Ballot | None:
        """Accept the change; the ballot in the way, if a newer one was promised."""
        refused = self.prepare(ballot)
        if refused is None:
            self.accepted = Accepted(ballot=ballot, change=change)
        return refused
