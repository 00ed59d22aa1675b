"""Memory for copies that are sent: kept, and never overwritten while it is under way."""

from __future__ import annotations

from zbmd.collectives.execution.remote_sending import (
    SEND_BUFFER_BYTES_MIN,
    SEND_BUFFERS_MAX,
    Outgoing,
    SendBuffer,
)
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
    buffers: list[SendBuffer] = []
    while len(buffers) < SEND_BUFFERS_MAX:
        buffers.append(outgoing.take(SEND_BUFFER_BYTES_MIN))
        buffers[-1].transfer = Transfer()
    extra = outgoing.take(1)
    assert extra not in buffers and outgoing.take(1) is not extra, "all are under way: it is not kept"
    buffers[3].transfer.finish()
    larger = outgoing.take(SEND_BUFFER_BYTES_MIN + 1)  # in place of the one that is free
    assert outgoing.take(SEND_BUFFER_BYTES_MIN + 1) is larger and outgoing.take(1) is larger
