"""The promises of every transport's regions: `zbmd.transport.memory.region.RemoteRegion`."""

from __future__ import annotations

import asyncio
import itertools
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices.cuda_harness import CudaModelHarness
from support.links.region_harness import FAR, NEAR, Ends, RegionHarness, Sizes
from support.links.region_harness import HARNESSES as OF_THE_HOST
from support.rdma.rdma_world import given_devices

from zbmd.transport.errors import (
    LocalProtocolError,
    OutOfMemory,
    PeerLost,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.memory.memfd import HEADROOM_BYTES, available_memory
from zbmd.transport.memory.region import RegionHandle, RemoteRegion
from zbmd.transport.memory.segment import Segment
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native import _native
from zbmd.transport.sim.storage import SimMemory

THREADS = 4
LATER_EPOCH = 1 << 32
RELEASED_BYTES = 4096
OK = _native.WAIT_OK

HARNESSES = OF_THE_HOST if given_devices() else (*OF_THE_HOST, CudaModelHarness(1), CudaModelHarness(2))
over_all = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)


def pattern(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


async def outcome_of(transfer: Transfer) -> ZbmdError | None:
    try:
        await transfer
    except ZbmdError as error:
        return error
    return None


async def put(region: RemoteRegion, src: object, offset: int = 0, *, value: int, channel: int = 0) -> None:
    await region.put(np.frombuffer(src, np.uint8), offset, channel=channel, value=value)  # type: ignore[call-overload]


@over_all
def test_bytes_of_many_sizes_arrive_before_their_notification(harness: RegionHarness) -> None:
    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, 1 << 20)
        for value, nbytes in enumerate((0, 1, 7, 64, 4095, 4096, 65_537, (1 << 20) - 1, 1 << 20), 1):
            src = pattern(nbytes, value)
            await region.put(src, channel=0, value=value)
            assert await ends.far.wait(NEAR, 0, value) == OK
            assert np.array_equal(target[:nbytes], src)
            into = np.zeros(nbytes, np.uint8)
            await region.get(into)
            assert np.array_equal(into, src)

    harness.run(scenario)


@pytest.mark.optional
@pytest.mark.parametrize("harness", [h for h in HARNESSES if h.blocks], ids=lambda harness: harness.name)
def test_a_gibibyte(harness: RegionHarness) -> None:
    nbytes = harness.large_bytes
    needed = 3 * nbytes + 4 * HEADROOM_BYTES
    if available_memory().nbytes < needed:
        pytest.skip(f"needs {needed} bytes of memory")

    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, nbytes)
        src = np.zeros(nbytes, np.uint8)
        marks = np.arange(0, nbytes, (1 << 20) + 1)
        src[marks] = 1 + marks % 251
        transfer = region.put(src, channel=0, value=1)
        assert await ends.far.wait(NEAR, 0, 1) == OK
        await transfer
        assert np.array_equal(target[marks], src[marks]) and int(target[-1]) == int(src[-1])
        assert int(np.count_nonzero(target)) == len(marks)

    harness.run(scenario, Sizes(arena_bytes=0, inbox_bytes=nbytes))


@over_all
@settings(max_examples=4 if given_devices() else 20)
@given(
    puts=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 100), st.booleans()), min_size=1, max_size=12)
)
def test_puts_and_notifications_take_effect_in_their_order(
    harness: RegionHarness, puts: list[tuple[int, int, bool]]
) -> None:
    """Unaligned and overlapping ranges, each seen as the model has it once its notification is there."""

    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, 400)
        model = np.zeros(400, np.uint8)
        transfers: list[Transfer] = []
        for value, (offset, nbytes, notified) in enumerate(puts, 1):
            src = pattern(nbytes, value)
            model[offset : offset + nbytes] = src
            told = value if notified else 0
            transfers.append(region.put(src, offset, channel=0, value=told))
            if not notified:
                region.notify(0, value)
        assert await ends.far.wait(NEAR, 0, len(puts)) == OK
        assert np.array_equal(target, model)
        for transfer in transfers:
            await transfer
        region.notify(0, 0)
        region.notify(1, 1)
        assert await ends.far.wait(NEAR, 1, 1) == OK
        assert await ends.far.wait(NEAR, 0, len(puts)) == OK, "a cell only grows"

    harness.run(scenario)


@over_all
def test_tasks_put_at_once(harness: RegionHarness) -> None:
    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, 10 * 1000)

        async def task(number: int) -> None:
            for round_ in range(5):
                src = np.full(1000, 10 * number + round_, np.uint8)
                await region.put(src, number * 1000, channel=number, value=round_ + 1)

        await asyncio.gather(*(task(number) for number in range(10)))
        for number in range(10):
            assert await ends.far.wait(NEAR, number, 5) == OK
            assert set(target[number * 1000 : (number + 1) * 1000].tolist()) == {10 * number + 4}

    harness.run(scenario)


@over_all
def test_threads_put_at_once(harness: RegionHarness) -> None:
    if not harness.blocks:
        return  # a simulated process has one thread

    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, THREADS * 70_000)
        start = threading.Barrier(THREADS)

        def thread(number: int) -> None:
            start.wait()
            for round_ in range(50):
                src = np.full(70_000, number, np.uint8)
                region.put(src, number * 70_000, channel=number, value=round_ + 1).wait()
                region.notify(15, number * 50 + round_)

        await asyncio.gather(*(asyncio.to_thread(thread, number) for number in range(THREADS)))
        for number in range(THREADS):
            assert await ends.far.wait(NEAR, number, 50) == OK
            assert set(target[number * 70_000 : (number + 1) * 70_000].tolist()) == {number}
        assert await ends.far.wait(NEAR, 15, (THREADS - 1) * 50 + 49) == OK

    harness.run(scenario)


@over_all
def test_handles_that_are_forged_stale_out_of_bounds_or_read_only(harness: RegionHarness) -> None:
    async def refused(ends: Ends, handle: RegionHandle, offset: int = 0) -> None:
        """By whichever side finds it: at once, or by the transfer."""
        with pytest.raises(RemoteProtocolError):
            await ends.near.link.open_region(handle).put(b"12345678", offset, channel=0, value=1)

    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, 64)
        handle, change = region.handle, msgspec.structs.replace
        for forged in (
            change(handle, slot=handle.slot + 1),
            change(handle, incarnation=handle.incarnation + 1),
            change(handle, incarnation=handle.incarnation - 1),
            change(handle, offset=-8),
            change(handle, offset=1 << 62),
            change(handle, nbytes=-1),
            change(handle, nbytes=1 << 62),
            change(handle, writable=False),
            change(handle, key=-1),
            change(handle, key=1 << 32),
        ):
            await refused(ends, forged)
        for offset in (57, 64, -1, 1 << 63):
            await refused(ends, handle, offset)
        own = ends.near.memory.regions.register(ends.near.memory.inbox.empty(64, np.uint8))
        await refused(ends, own)
        read_only = ends.far.memory.regions.register(ends.far.memory.arena.empty(64, np.uint8))
        await refused(ends, read_only)
        assert not target.any()
        assert await ends.far.wait(NEAR, 0, 1, for_ns=1) == _native.WAIT_DEADLINE
        await put(region, b"12345678", value=1)
        assert await ends.far.wait(NEAR, 0, 1) == OK, "the link is none the worse for it"

    harness.run(scenario)


@over_all
def test_calls_of_no_use_are_refused_at_once(harness: RegionHarness) -> None:
    async def scenario(ends: Ends) -> None:
        _, region = ends.far.inbox(ends.near, 64)
        for channel, value in ((_native.CHANNELS, 1), (-1, 1), (0, -1), (0, 1 << 64)):
            with pytest.raises(LocalProtocolError):
                region.put(b"1", channel=channel, value=value)
            with pytest.raises(LocalProtocolError):
                region.notify(channel, value)
        with pytest.raises(LocalProtocolError):
            region.put(np.zeros((4, 4), np.uint8)[:, 1], channel=0, value=1)
        with pytest.raises(LocalProtocolError):
            region.get(b"read-only")
        region.close()
        region.close()
        for call in (lambda: region.notify(0, 1), lambda: region.put(b"1", channel=0, value=1)):
            with pytest.raises(LocalProtocolError, match="closed"):
                call()

    harness.run(scenario)


@over_all
def test_a_view_is_in_place_or_not_at_all(harness: RegionHarness) -> None:
    async def scenario(ends: Ends) -> None:
        array = ends.far.memory.arena.from_array(pattern(100))
        region = ends.near.link.open_region(ends.far.memory.regions.register(array))
        view = region.view(10, 20)
        assert (view is not None) == harness.shares_memory
        if view is not None:
            array[10] ^= 255
            assert view.readonly and bytes(view) == array[10:30].tobytes()
        with pytest.raises(RemoteProtocolError):
            region.view(90, 20)
        into = np.zeros(20, np.uint8)
        await region.get(into, 10)
        assert np.array_equal(into, array[10:30])

    harness.run(scenario)


@over_all
def test_a_put_to_the_dead_raises_and_a_replacement_gets_nothing_of_it(harness: RegionHarness) -> None:
    async def scenario(ends: Ends) -> None:
        old_target, region = ends.far.inbox(ends.near, 64)
        await put(region, b"before", value=1)
        assert await ends.far.wait(NEAR, 0, 1) == OK
        await ends.kill_far()
        with pytest.raises(PeerLost):
            await put(region, b"after", value=2)
        with pytest.raises(PeerLost):
            region.notify(0, 3)
        with pytest.raises(PeerLost):
            await region.get(bytearray(8))
        await ends.replace_far()
        target, fresh = ends.far.inbox(ends.near, 64)
        with pytest.raises(PeerLost):
            await put(region, b"old one", value=4)
        with pytest.raises(RemoteProtocolError):
            ends.near.link.open_region(region.handle)
        assert await ends.far.wait(NEAR, 0, 1, for_ns=1) == _native.WAIT_DEADLINE and not target.any()
        await put(fresh, b"new one", value=1)
        assert await ends.far.wait(NEAR, 0, 1) == OK and bytes(target[:7]) == b"new one"
        assert bytes(old_target[:6]) == b"before"

    harness.run(scenario)


@over_all
def test_death_in_the_middle_of_puts_ends_every_transfer(harness: RegionHarness) -> None:
    """Each is done, or lost; none hangs; and each buffer may be reused then."""

    async def scenario(ends: Ends) -> None:
        _, region = ends.far.inbox(ends.near, 8 << 20)
        src = pattern(8 << 20)
        transfers = [region.put(src, channel=0, value=value) for value in range(1, 6)]
        await ends.kill_far()
        for transfer in transfers:
            error = await outcome_of(transfer)
            assert transfer.done and (error is None or isinstance(error, PeerLost))
        src[:] = 0

    harness.run(scenario, Sizes(inbox_bytes=8 << 20))


@over_all
def test_what_the_dead_had_put_is_whole_up_to_its_last_notification(harness: RegionHarness) -> None:
    async def scenario(ends: Ends) -> None:
        target, region = ends.near.inbox(ends.far, 20 * 1000)
        for number in range(20):
            region.put(np.full(1000, number + 1, np.uint8), number * 1000, channel=0, value=number + 1)
        await ends.kill_far()
        seen = 0
        while await ends.near.wait(FAR, 0, seen + 1, group_mask=1 << FAR) == OK:
            seen += 1
            assert set(target[(seen - 1) * 1000 : seen * 1000].tolist()) == {seen}
        before = target.copy()
        await ends.replace_far()
        _, fresh = ends.near.inbox(ends.far, 8)
        await put(fresh, b"1", channel=1, value=1)
        assert await ends.near.wait(FAR, 1, 1) == OK
        assert np.array_equal(target, before), "nothing of the dead lands once its slot is another's"

    harness.run(scenario)


@over_all
def test_a_cancelled_wait_leaves_the_transfer_and_its_buffer_alone(harness: RegionHarness) -> None:
    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, 8 << 20)
        transfers: list[Transfer] = []

        async def give_up() -> None:
            transfers.append(region.put(bytearray(b"x" * (8 << 20)), channel=0, value=1))
            await transfers[0]

        task = asyncio.ensure_future(give_up())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert await ends.far.wait(NEAR, 0, 1) == OK
        assert bytes(target[-3:]) == b"xxx" and int(target.min()) == ord("x")
        await transfers[0]

    harness.run(scenario, Sizes(inbox_bytes=8 << 20))


@over_all
def test_a_wait_ends_with_what_ended_it(harness: RegionHarness) -> None:
    async def scenario(ends: Ends) -> None:
        near = ends.near
        assert await near.wait(FAR, 0, 1, for_ns=1) == _native.WAIT_DEADLINE
        waiting = asyncio.ensure_future(near.wait(FAR, 0, 1))
        await asyncio.sleep(0)
        near.abort(0, 0)
        assert await waiting == _native.WAIT_ABORTED
        _, region = near.inbox(ends.far, 8)
        region.notify(1, LATER_EPOCH + 1)
        assert await near.wait(FAR, 1, 1) == _native.WAIT_ABORTED, "another group's value"
        lost = asyncio.ensure_future(near.wait(FAR, 2, 1, group_mask=1 << FAR))
        others = asyncio.ensure_future(near.wait(FAR, 2, 1, group_mask=1, for_ns=200_000_000))
        await asyncio.sleep(0)
        await ends.kill_far()
        assert await lost == _native.WAIT_LOST and near.memory.lost_mask() == 1 << FAR
        assert await others == _native.WAIT_DEADLINE

    harness.run(scenario)


@over_all
def test_released_memory_is_no_longer_reached_by_its_handle(harness: RegionHarness) -> None:
    """Over TCP the owner refuses, over RDMA its device; peers keep what they have mapped."""

    async def scenario(ends: Ends) -> None:
        target, region = ends.far.inbox(ends.near, RELEASED_BYTES)
        ends.far.memory.regions.release(region.handle)
        if not harness.owner_refuses:
            return
        with pytest.raises(RemoteProtocolError, match="no region"):
            await put(region, b"1" * RELEASED_BYTES, value=1)
        assert not target.any()
        assert await ends.far.wait(NEAR, 0, 1, for_ns=1) == _native.WAIT_DEADLINE

    harness.run(scenario)


def test_a_segment_larger_than_memory_is_refused_before_anything_is_allocated() -> None:
    before = available_memory().nbytes
    with pytest.raises(OutOfMemory) as told:
        Segment.create(slot=0, incarnation=1, arena_bytes=1 << 45, inbox_bytes=0)
    assert told.value.asked_bytes >= 1 << 45 > told.value.available_bytes
    assert available_memory().nbytes > before // 2
    with pytest.raises(OutOfMemory):
        SimMemory(limit_bytes=1000).allocate(1001)


def test_every_transport_has_a_name_of_its_own() -> None:
    assert all(a.name != b.name for a, b in itertools.combinations(HARNESSES, 2))
