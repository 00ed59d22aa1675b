"""Time-outs that are put off while a rank of the job is in a debugger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from zbmd.transport.clock.patience import EXTENDED_NS, PATIENCE, patient_timeout
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native import _native
from zbmd.transport.native._native import now_ns

SHORT_NS = 1_000_000


def _until(end_ns: int) -> None:
    while now_ns() < end_ns:
        pass


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    yield
    PATIENCE.until_ns = 0


async def test_a_wait_times_out_once_the_patience_is_over() -> None:
    with pytest.raises(TimeoutError):
        async with patient_timeout(SHORT_NS / 1e9):
            await asyncio.Event().wait()
    PATIENCE.until_ns = end_ns = now_ns() + 100 * SHORT_NS
    with pytest.raises(TimeoutError):
        async with patient_timeout(SHORT_NS / 1e9):
            await asyncio.Event().wait()
    assert now_ns() >= end_ns


async def test_it_may_be_extended_while_it_waits_and_what_is_done_in_time_is_no_error() -> None:
    async with patient_timeout(SHORT_NS / 1e9):
        began_ns = now_ns()
        assert PATIENCE.extend() >= began_ns + EXTENDED_NS
        await asyncio.to_thread(_until, began_ns + 10 * SHORT_NS)
    assert PATIENCE.left_ns(0) > 0


def test_a_native_wait_is_as_patient_as_its_segment() -> None:
    with closing(Segment.create(slot=0, incarnation=1, arena_bytes=1 << 16, inbox_bytes=1 << 12)) as segment:
        end_ns = now_ns() + 100 * SHORT_NS
        segment.extend_waits(end_ns)
        found = _native.wait(segment.base, 1, 0, 1, deadline_ns=now_ns() + SHORT_NS)
        assert (found, now_ns() >= end_ns) == (_native.WAIT_DEADLINE, True)
