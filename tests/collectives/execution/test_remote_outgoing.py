"""Memory for copies that are sent: kept, and never overwritten while it is under way."""

from __future__ import annotations

from zbmd.collectives.execution.remote_outgoing import PLACE_BYTES_MIN, PLACES_MAX, Outgoing, Place
from zbmd.transport.memory.transfer import Transfer


def test_memory_is_taken_again_once_its_put_is_done_and_not_before() -> None:
    outgoing = Outgoing()
    first = outgoing.take(5000)
    assert first.array.nbytes == 8192
    assert outgoing.take(8000) is first, "nothing was put from it"
    first.transfer = Transfer()
    second = outgoing.take(5000)
    assert second is not first
    second.transfer = Transfer()
    first.transfer.finish()
    assert outgoing.take(6000) is first
    second.transfer.finish()
    small = outgoing.take(8193)
    assert small not in (first, second) and outgoing.take(1).array.nbytes == 8192


def test_so_many_are_kept_and_no_more() -> None:
    outgoing = Outgoing()
    places: list[Place] = []
    while len(places) < PLACES_MAX:
        places.append(outgoing.take(PLACE_BYTES_MIN))
        places[-1].transfer = Transfer()
    extra = outgoing.take(1)
    assert extra not in places and outgoing.take(1) is not extra, "all are under way: it is not kept"
    places[3].transfer.finish()
    larger = outgoing.take(PLACE_BYTES_MIN + 1)  # in place of the one that is free
    assert outgoing.take(PLACE_BYTES_MIN + 1) is larger and outgoing.take(1) is larger
