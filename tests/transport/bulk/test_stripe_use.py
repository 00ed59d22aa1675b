"""The number of stripes in use: more only while their buffers, and not the path, keep them back."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.bulk.stripe_io import BUSY_US_MIN, StripeReason, StripeUse, StripeWork, read_work

STRIPES = 8


class Path:
    """Stripes of which the used ones work; `kept_back` is the part of that time that buffers cost."""

    def __init__(self) -> None:
        self.work = {number: StripeWork(busy_us=0, kept_back_us=0) for number in range(STRIPES)}

    def send(self, used: int, *, busy_us: int, kept_back: float) -> dict[int, StripeWork]:
        for number in range(used):
            before = self.work[number]
            self.work[number] = StripeWork(
                busy_us=before.busy_us + busy_us,
                kept_back_us=before.kept_back_us + round(busy_us * kept_back),
            )
        return dict(self.work)


def test_stripes_are_added_while_buffers_keep_them_back_and_no_more_once_the_path_is_full() -> None:
    path, use = Path(), StripeUse(1)
    assert use.look(path.send(1, busy_us=250_000, kept_back=0.9)) == (2, StripeReason.BUFFERS)
    assert use.look(path.send(2, busy_us=250_000, kept_back=0.8)) == (4, StripeReason.BUFFERS)
    for _ in range(5):
        assert use.look(path.send(4, busy_us=250_000, kept_back=0.1)) == (4, StripeReason.PATH)
    assert use.look(path.send(4, busy_us=250_000, kept_back=0.9)) == (STRIPES, StripeReason.BUFFERS)
    assert use.look(path.send(STRIPES, busy_us=250_000, kept_back=0.9)) == (STRIPES, StripeReason.ALL)


def test_little_traffic_is_added_up_until_it_tells_something() -> None:
    path, use = Path(), StripeUse(1)
    assert use.look(path.send(1, busy_us=BUSY_US_MIN - 1, kept_back=1)) == (1, StripeReason.TOO_LITTLE)
    assert use.look(path.work) == (1, StripeReason.TOO_LITTLE), "time alone is no traffic"
    assert use.look(path.send(1, busy_us=1, kept_back=1)) == (2, StripeReason.BUFFERS)


@given(st.lists(st.tuples(st.integers(0, 1_000_000), st.floats(0, 1)), max_size=40), st.integers(1, STRIPES))
def test_stripes_are_never_taken_back_and_never_more_than_there_are(
    looks: list[tuple[int, float]], at_first: int
) -> None:
    path, use, before = Path(), StripeUse(at_first), at_first
    for busy_us, kept_back in looks:
        count, _ = use.look(path.send(before, busy_us=busy_us, kept_back=kept_back))
        assert before <= count <= min(2 * before, STRIPES) and count == use.count
        before = count


async def test_the_kernel_tells_who_waits_for_the_window_of_a_peer_that_does_not_read() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sender:
        sender.setblocking(False)
        await loop.sock_connect(sender, server.getsockname())
        reader, _ = server.accept()
        with reader, pytest.raises(BlockingIOError):
            while True:
                sender.send(bytes(1 << 20))
        work = read_work(sender)
        while not work.kept_back_us:
            await asyncio.sleep(0)
            work = read_work(sender)
        assert work.busy_us >= work.kept_back_us > 0
