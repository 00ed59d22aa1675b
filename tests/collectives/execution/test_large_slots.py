"""Two hosts whose inboxes have room send each other up to 4 MiB with a descriptor, in messages of 1 MiB."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zbmd.collectives.errors import MembersLost, OperationAborted
from zbmd.collectives.execution.remote_sending import (
    PAIR_BYTES,
    PAIR_SPARE_BYTES,
    PART_BYTES,
    Slots,
    slot_payload_bytes,
)
from zbmd.collectives.native._stepper import COUNTER_MAX, DESCRIPTOR_HEADER_BYTES
from zbmd.transport.bulk.peer import BulkPeer
from zbmd.transport.errors import DeadlineExceeded
from zbmd.transport.native._native import now_ns

RunRanks = Callable[..., list[Any]]
Array = NDArray[np.float32]
ROOMY, SCANT = 2 * PAIR_BYTES + PAIR_SPARE_BYTES + (1 << 20), PAIR_BYTES
HOSTS = (0, 1)


def wide(p: Any) -> Any:
    """A communicator that has met once, and knows of slots."""
    c = p.communicator()
    c.barrier(deadline_ns=p.soon())
    return c


def values(rank: int, count: int) -> Array:
    return np.random.default_rng([rank, count]).standard_normal(count).astype(np.float32)


def every_operation(p: Any, c: Any, count: int, algorithm: str) -> list[bytes]:
    """A rank that returns changes what it gave at once, so what is sent later than that is found out."""
    found: list[bytes] = []
    soon = {"algorithm": algorithm, "deadline_ns": p.soon()}

    def took(result: Array | None, *given: Array) -> None:
        found.append(b"" if result is None else result.tobytes())
        for array in given:
            array.fill(77)

    for root in c.members:  # the second time by the fast path
        x = values(p.rank, count)
        took(c.all_reduce(x, np.empty_like(x), **soon), x)
        x = values(p.rank, count)
        took(c.all_reduce(x, **soon), x)
        x = values(p.rank, count)
        took(c.reduce(x, root, np.empty_like(x), **soon), x)
        x = values(p.rank, count)
        took(c.broadcast(x, root, **soon), x)
        x = values(p.rank, count // 2)
        took(c.gather(x, root, **soon), x)
        x = values(p.rank, count // 2)
        took(c.all_gather(x, **soon), x)
        blocks = values(p.rank, count).reshape(2, -1)
        took(c.reduce_scatter(blocks, np.empty_like(blocks[0]), **soon), blocks)
        blocks = values(p.rank, count).reshape(2, -1)
        took(c.all_to_all(blocks, np.empty_like(blocks), **soon), blocks)
        blocks = values(p.rank, count).reshape(2, -1)
        given = blocks if p.rank == root else None
        took(c.scatter(given, root, np.empty(count // 2, np.float32), **soon), blocks)
    return found


@pytest.mark.parametrize("at_once", [True, False])
def test_long_inputs_travel_in_parts(run_ranks: RunRanks, *, at_once: bool) -> None:
    """The bits are those of another program, whether the parts leave at once or not."""

    def body(p: Any) -> None:
        c = wide(p)
        assert c._executor.eager_bytes_max == slot_payload_bytes(2, large=True) == PAIR_BYTES
        sent, put_now = [0], BulkPeer.put_now

        def sometimes(*given: Any, **rest: Any) -> bool:
            sent[0] += 1
            return (at_once or sent[0] % 3 == 1) and put_now(*given, **rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BulkPeer, "put_now", sometimes)
            for count in (PART_BYTES // 4 + 2, PAIR_BYTES // 4):
                assert every_operation(p, c, count, "eager") == every_operation(p, c, count, "direct")
        assert sent[0] > 0 and c.fast_path.taken > 0

    run_ranks(2, body, hosts=HOSTS, inbox_bytes=(ROOMY, ROOMY), arena_bytes=64 << 20)


@pytest.mark.parametrize("inboxes", [(ROOMY, SCANT), (SCANT, ROOMY), (SCANT, SCANT)])
def test_slots_are_as_large_as_the_scantest_inbox_allows(run_ranks: RunRanks, inboxes: Sequence[int]) -> None:
    def body(p: Any) -> None:
        c = wide(p)
        limit = c._executor.eager_bytes_max
        assert limit == slot_payload_bytes(2) < PAIR_BYTES
        assert every_operation(p, c, limit // 4, "eager") == every_operation(p, c, limit // 4, "direct")

    run_ranks(2, body, hosts=HOSTS, inbox_bytes=inboxes, arena_bytes=64 << 20)


def test_a_second_group_leaves_room_for_others(run_ranks: RunRanks) -> None:
    """Large slots are made but where `PAIR_SPARE_BYTES` are left, and given back with the group."""

    def body(p: Any) -> list[int]:
        found: list[int] = []
        first = wide(p)
        second = p.communicator(channel=1)
        second.barrier(deadline_ns=p.soon())
        found = [first._executor.eager_bytes_max, second._executor.eager_bytes_max]
        assert p.segment.inbox.used_bytes < ROOMY - 6 * (1 << 20)
        return found

    small, large = slot_payload_bytes(2), slot_payload_bytes(2, large=True)
    assert run_ranks(2, body, hosts=HOSTS, inbox_bytes=(ROOMY, ROOMY)) == [[large, small]] * 2


def test_who_dies_between_two_parts_is_lost(run_ranks: RunRanks) -> None:
    """Nobody takes for a result what is in a slot without a descriptor."""

    def body(p: Any) -> bool:
        c = wide(p)
        x = np.full(PAIR_BYTES // 4, p.rank, np.float32)
        for _ in range(2):
            c.all_reduce(x.copy(), algorithm="eager", deadline_ns=p.soon())
        put_now = BulkPeer.put_now
        parts = [0]

        def dying(*given: Any, **rest: Any) -> bool:
            parts[0] += 1
            left = put_now(*given, **rest)
            if not left or parts[0] == 3:  # the rest of one that is busy goes another way
                os.kill(os.getpid(), signal.SIGKILL)
            return left

        with pytest.MonkeyPatch.context() as patch:
            if p.rank == 0:
                patch.setattr(BulkPeer, "put_now", dying)
            out = np.full_like(x, 9)
            with pytest.raises(MembersLost) as caught:
                c.all_reduce(x, out, algorithm="eager", deadline_ns=p.soon())
        return caught.value.ranks == (0,) and bool((out == 9).all())

    found = run_ranks(
        2, body, hosts=HOSTS, dies=frozenset((0,)), inbox_bytes=(ROOMY, ROOMY), arena_bytes=64 << 20
    )
    assert found == [None, True]


def test_who_gives_up_a_long_one_is_told_of_and_sends_what_it_had(run_ranks: RunRanks) -> None:
    """Its peer's plane reads on meanwhile; what comes of the operation that was given up is no result."""

    def body(p: Any) -> None:
        c = wide(p)
        x = np.full(PAIR_BYTES // 4, 1, np.float32)
        if p.rank == 0:
            with pytest.raises(DeadlineExceeded):
                c.all_reduce(x, algorithm="eager", deadline_ns=now_ns() + 1)
            x.fill(77)
        else:
            p.segment.wait(0, 0, 1 << 32 | COUNTER_MAX, deadline_ns=p.soon())
            with pytest.raises(OperationAborted):
                c.all_reduce(x, algorithm="eager", deadline_ns=p.soon())
            assert (x == 1).all()

    run_ranks(2, body, hosts=HOSTS, inbox_bytes=(ROOMY, ROOMY), arena_bytes=64 << 20)


def test_parts_go_in_front_of_the_descriptor(run_ranks: RunRanks) -> None:
    def body(p: Any) -> None:
        c = wide(p)
        x = np.zeros((2, PAIR_BYTES // 8), np.float32)
        sizes: list[int] = []
        put_now, send = BulkPeer.put_now, Slots.send

        def note(self: Any, handle: Any, src: memoryview, at: int, **rest: Any) -> bool:
            sizes.append(len(src))
            return put_now(self, handle, src, at, **rest)

        def first(*given: Any, **rest: Any) -> Any:
            sizes.clear()
            return send(*given, **rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BulkPeer, "put_now", note)
            patch.setattr(Slots, "send", first)
            c.all_to_all(x, algorithm="eager", deadline_ns=p.soon())
        # A member's own half alone; one that cannot leave now is copied, and put behind the descriptor.
        assert sizes and sizes[0] == PART_BYTES
        assert max(sizes) <= PAIR_BYTES // 2 + DESCRIPTOR_HEADER_BYTES

    run_ranks(2, body, hosts=HOSTS, inbox_bytes=(ROOMY, ROOMY), arena_bytes=64 << 20)
