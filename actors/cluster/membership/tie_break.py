"""Which half of a view may go on: the one with its lowest member, or the one whose member the witness "
"names."""

from __future__ import annotations

from collections.abc import Collection

from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.view import LOWEST_ID, ClusterView, Verdict, quorum


class TieBreak:
    """The rule of one cluster. witnessed: whether there is a witness, the same on all nodes."""

    def __init__(self, *, witnessed: bool) -> None:
        self._witnessed = witnessed
        self._gave: m.WitnessGave | None = None

    def gave(self, answer: m.WitnessGave) -> None:
        """The witness has named somebody for an epoch, or nobody."""
        if self._gave is None or answer.epoch >= self._gave.epoch:
            self._gave = answer

    def quorum(self, view: ClusterView, present: Collection[int], proven: Collection[int]) -> Verdict:
        """Whether those who are present may decide what follows `view`; see `members.quorum`."""
        if not self._witnessed:
            return quorum(view, present, proven, tie_breaker=LOWEST_ID)
        named: int | None = None
        if self._gave is not None and self._gave.epoch == view.epoch + 1 and self._gave.holder is not None:
            named = self._gave.holder.id if view.holds(self._gave.holder) else None
        return quorum(view, present, proven, tie_breaker=named)

    def question(self, view: ClusterView, verdict: Verdict) -> list[m.AskWitness]:
        """What to ask, if the witness may change a verdict."""
        return [m.AskWitness(epoch=view.epoch + 1)] if verdict.tied else []
