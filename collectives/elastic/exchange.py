"""How the members of a view meet in an elastic group, ahead of any operation: what all tell, and agree on."""

from __future__ import annotations

from typing import NamedTuple

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.peer_reading import Reading
from zbmd.collectives.repair.wire import ExchangedReport, MeasuredModel, decode_report, encode_report, pinned


class Met(NamedTuple):
    """What each has told, in their order, the costs that they choose by, and whether they read each other."""

    told: list[ExchangedReport]
    measured: MeasuredModel | None
    reading: Reading


def meet(c: Communicator, mine: ExchangedReport, known: Reading, *, ranks: int, deadline_ns: int) -> Met:
    """On the data-plane thread of all members. known: what this one told the number of, of a job of `ranks`.

    Raises as an all-gather, and `RemoteProtocolError`.
    """
    rows = c.all_gather(encode_report(mine, ranks=ranks), deadline_ns=deadline_ns)
    told = [decode_report(row, rank) for rank, row in zip(c.members, rows, strict=True)]
    # Who has tried it together need not again, whoever of them is gone: a repair is not the time for it.
    if known.number and all(one.reading == known.number for one in told):
        c.read_peers(known)
    else:
        c.try_reading(deadline_ns=deadline_ns)
    return Met(told, pinned(c, (one.measured for one in told), deadline_ns), c.reading)
