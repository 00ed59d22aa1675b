"""The split of an elastic group as one of its operations."""

from __future__ import annotations

from zbmd.actors.rank.member import Worker
from zbmd.collectives.commit.events import MemberId
from zbmd.collectives.native._stepper import COUNTER_MAX
from zbmd.collectives.programs.channels import Offer
from zbmd.collectives.repair.events import Call, Inputs, OnLoss
from zbmd.collectives.repair.operations_shared import AllGather
from zbmd.collectives.repair.splits import SplitLedger, Wish, agree_on, row_of
from zbmd.transport.memory.arena import Arena
from zbmd.transport.native._native import load_cell


class SplitJob(AllGather):
    """All members tell each other what they ask for; who returns has entered what came of it in `ledger`."""

    def __init__(
        self, arena: Arena, wish: Wish, offer: Offer, on_loss: OnLoss, number: int, ledger: SplitLedger
    ) -> None:
        super().__init__(arena, row_of(wish, offer), on_loss, Inputs.PRESERVE)
        self.call = Call(
            text=f"{wish.text} #{number}, {on_loss.value}", on_loss=on_loss, inputs=Inputs.PRESERVE
        )
        self._wish, self._ledger = wish, ledger

    def returned(self, contributors: tuple[int, ...]) -> None:
        """See `Job`. Raises as `agree_on`, on all members alike."""
        self._ledger.made(agree_on(self._wish, self.value, contributors))


def has_ended(worker: Worker, member: MemberId, channel: int, base: int) -> bool:
    """Whether this member of a sub-group that is closed here has closed it, too, or is gone."""
    peer = worker.peers.get(member.rank)
    if (
        peer is None
        or peer.incarnation != member.incarnation
        or worker.segment.lost_mask() >> member.rank & 1
    ):
        return True
    cell = load_cell(worker.segment.base, member.rank, channel)
    return cell & COUNTER_MAX == COUNTER_MAX and cell >> 32 > base
