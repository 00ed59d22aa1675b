"""The network is asked for an address again, but not for ever, and only if nobody answered."""

from __future__ import annotations

import errno

import pytest

from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns
from zbmd.transport.rdma.message_device import LOOK_UPS, reach
from zbmd.transport.rdma.setup import QueuePairAt

HOUR_NS = 3600 * 10**9
PEER = QueuePairAt(gid=bytes(10) + b"\xff\xff\x0a\x00\x00\x02", lid=0, number=7, first_psn=1, mtu=5)


class Network:
    """Answers so, in turn."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)

    def look_up(self, peer: QueuePairAt) -> int:
        assert peer is PEER
        return self.answers.pop(0)


@pytest.mark.parametrize("lost", range(LOOK_UPS))
async def test_a_lost_question_is_asked_again(lost: int) -> None:
    network = Network(*[errno.ETIMEDOUT] * lost, 0)
    await reach("rxe0", network.look_up, PEER, now_ns() + HOUR_NS)
    assert not network.answers


async def test_an_address_that_nobody_has_is_told_as_such() -> None:
    network = Network(*[errno.ETIMEDOUT] * LOOK_UPS)
    with pytest.raises(UserError, match=rf"rxe0 cannot reach 10\.0\.0\.2: .* {LOOK_UPS} ×"):
        await reach("rxe0", network.look_up, PEER, now_ns() + HOUR_NS)
    assert not network.answers


async def test_it_is_not_asked_again_when_time_is_short() -> None:
    with pytest.raises(UserError, match="asked 1 ×"):
        await reach("rxe0", Network(errno.ETIMEDOUT).look_up, PEER, now_ns())


async def test_what_else_is_wrong_is_left_to_who_connects() -> None:
    network = Network(errno.ENETUNREACH)
    await reach("rxe0", network.look_up, PEER, now_ns() + HOUR_NS)
    assert not network.answers
