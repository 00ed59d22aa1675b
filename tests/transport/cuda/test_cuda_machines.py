"""Device memory: the machines by themselves, and under the real driver on modelled devices."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices.cuda_harness import CudaModelHarness, ModelArray
from support.devices.cuda_model import DeviceRace, ModelHost, ModelProcess, Undefined
from support.links.region_harness import FAR, NEAR, Ends

from zbmd.transport.cuda.api import CopyRoute, CudaFault, DeviceFacts, choose_copy_route
from zbmd.transport.cuda.array import DeviceHandle, EventHandle, decode_handle, encode_handle, span_of
from zbmd.transport.cuda.copies import (
    CellAsked,
    CopiesCloseAsked,
    CopyAsked,
    CopyOutcome,
    CudaCopies,
    Drained,
    Event,
    Faulted,
    FinishCopy,
    Issue,
    LetGo,
    PeerGone,
    SetPeerCell,
    SignalAsked,
)
from zbmd.transport.cuda.opened import (
    AllGone,
    Close,
    Disuse,
    MemoryOpened,
    Open,
    OpenedMemory,
    TakenBack,
    Use,
)
from zbmd.transport.cuda.region import DeviceExports
from zbmd.transport.errors import LocalProtocolError, PeerLost, RemoteProtocolError, UserError
from zbmd.transport.native import _native

CHANNEL = 3
steps = st.sampled_from(["copy", "told copy", "notify", "drain", "drain", "drain"])


@given(
    script=st.lists(steps, max_size=40),
    end=st.sampled_from(["close", "gone", "fault", "gone, fault"]),
    at=st.integers(0, 40),
)
def test_copies_are_handed_back_once_drained_and_told_in_order(script: list[str], end: str, at: int) -> None:
    machine = CudaCopies()
    under_way: list[int] = []
    asked: list[int] = []
    told: list[int] = []
    finished: Counter[int] = Counter()
    numbers = itertools.count(1)
    open_, faulted = True, False

    def handle(event: Event) -> None:
        for action in machine.handle(event, now_ns=0):
            match action:
                case Issue(operation=operation):
                    under_way.append(operation)
                case SetPeerCell(value=value):
                    told.append(value)
                    assert not {number for number in under_way if number < value}, (
                        "told before it had drained"
                    )
                case FinishCopy(operation=operation, outcome=outcome):
                    finished[operation] += 1
                    assert outcome is CopyOutcome.FAULT or operation not in under_way, (
                        "handed back under a copy"
                    )
                    assert open_ or outcome is not CopyOutcome.DONE
                case LetGo():
                    assert faulted or not under_way
                case _:
                    pass

    for index, step in enumerate([*script, *["drain"] * len(script)]):
        if index == at:
            for word in end.split(", "):
                ends = {"close": CopiesCloseAsked(), "gone": PeerGone(), "fault": Faulted(why="sticky")}
                open_, faulted = open_ and word == "close", faulted or word == "fault"
                handle(ends[word])
        number = next(numbers)
        if step == "drain":
            if under_way:
                handle(Drained(operation=under_way.pop(0)))
            continue
        channel = None if step == "copy" else 0
        event = CellAsked(channel=0, value=number)
        try:
            handle(event if step == "notify" else CopyAsked(operation=number, channel=channel, value=number))
        except LocalProtocolError:
            assert index >= at, "refused while it was open"
            continue
        if step != "copy":
            asked.append(number)
    while under_way:
        handle(Drained(operation=under_way.pop(0)))
    assert told == asked[: len(told)]
    assert open_ is False or told == asked
    assert set(finished.values()) <= {1}


def test_signals_only_grow_and_have_channels_of_their_own() -> None:
    machine = CudaCopies()
    machine.handle(CopyAsked(operation=0, channel=1, value=1), now_ns=0)
    with pytest.raises(LocalProtocolError, match="behind copies"):
        machine.handle(SignalAsked(channel=1, value=2), now_ns=0)
    machine.handle(SignalAsked(channel=2, value=2), now_ns=0)
    with pytest.raises(LocalProtocolError, match="only grow"):
        machine.handle(SignalAsked(channel=2, value=2), now_ns=0)
    with pytest.raises(LocalProtocolError, match="used for signals"):
        machine.handle(CellAsked(channel=2, value=3), now_ns=0)


@given(
    script=st.lists(st.tuples(st.sampled_from(["use", "disuse", "take"]), st.integers(0, 4)), max_size=60),
    gone_at=st.integers(0, 60),
)
def test_memory_is_open_while_it_is_used_and_closed_once(script: list[tuple[str, int]], gone_at: int) -> None:
    machine = OpenedMemory(opened_max=3)
    users: Counter[bytes] = Counter()
    open_: set[bytes] = set()

    def handle(event: Use | Disuse | TakenBack | AllGone) -> None:
        for action in machine.handle(event, now_ns=0):
            match action:
                case Open(memory=memory):
                    assert memory not in open_ and len(open_) < 3
                    open_.add(memory)
                    machine.handle(MemoryOpened(memory=memory, address=memory[0]), now_ns=0)
                case Close(memory=memory):
                    assert not users[memory]
                    open_.remove(memory)

    for index, (word, number) in enumerate(script):
        memory = bytes([number])
        if index == gone_at:
            handle(AllGone())
        if word == "use":
            try:
                handle(Use(memory=memory))
            except (LocalProtocolError, UserError):
                continue
            users[memory] += 1
            assert machine.address(memory) == number
        elif word == "disuse" and users[memory]:
            users[memory] -= 1
            handle(Disuse(memory=memory))
        elif word == "take":
            handle(TakenBack(memory=memory))
    handle(AllGone())
    for memory, count in users.items():
        for left in reversed(range(count)):
            users[memory] = left
            handle(Disuse(memory=memory))
    assert not open_ and not len(machine)


# -- the model finds what is not ordered -----------------------------------------------------------------


def pair() -> tuple[ModelHost, ModelProcess, ModelProcess]:
    host = ModelHost(seed=3)
    return host, host.process(0), host.process(0)


@pytest.mark.parametrize("waits", [False, True])
def test_the_model_finds_a_read_before_the_event_has_been_waited_for(waits: bool) -> None:
    """Whatever order it runs them in; and not once the reader's stream has waited."""
    host, owner, reader = pair()
    memory = owner.malloc(64)
    event = owner.event_create(interprocess=True)
    stream = owner.stream_create()
    owner.compute(memory, 64, lambda data: data.fill(7), stream)
    owner.event_record(event, stream)
    opened = reader.ipc_open_mem_handle(owner.ipc_get_mem_handle(memory), 0)
    their_event = reader.ipc_open_event_handle(owner.ipc_get_event_handle(event))
    into = np.zeros(64, np.uint8)
    if waits:
        reader.stream_wait_event(reader.default_stream, their_event)
    reader.memcpy_async(_native.address_of(into), opened, 64, reader.default_stream)
    if waits:
        reader.stream_synchronize(reader.default_stream)
        assert set(into.tolist()) == {7}
    else:
        with pytest.raises(DeviceRace, match="wait for its event"):
            host.drain()


def test_the_model_finds_what_cuda_leaves_undefined() -> None:
    _, owner, reader = pair()
    memory = owner.malloc(64)
    opened = reader.ipc_open_mem_handle(owner.ipc_get_mem_handle(memory), 0)
    with pytest.raises(Undefined, match="another process has open"):
        owner.free(memory)
    reader.ipc_close_mem_handle(opened)
    owner.free(memory)
    with pytest.raises(Undefined, match="freed or closed"):
        reader.memcpy_async(memory, memory, 1, 1)
        reader.stream_synchronize(1)


# -- signals, with the real driver -----------------------------------------------------------------------


def offer(giver: Any, taker: Any) -> None:
    data = encode_handle(giver.peer.offer_event(giver.slot, giver.incarnation, CHANNEL))
    taker.peer.take_event(decode_handle(data, EventHandle, slot=giver.slot, incarnation=giver.incarnation))


def after(event: threading.Event, call: Callable[[int], None]) -> Callable[[int], None]:
    def made(argument: int) -> None:
        event.wait()
        call(argument)

    return made


@pytest.mark.parametrize("forgets", ["nothing", "the reader's wait", "the writer's wait"])
@pytest.mark.parametrize("devices", [1, 2])
def test_signals_order_streams_of_two_processes(forgets: str, devices: int) -> None:
    """Puts that are signalled before they are done, and read on a stream that waits.

    Where a wait is forgotten, no thread sees the end of a copy before the signal of it has been sent: that
    would order the two.
    """
    told = threading.Event()

    async def scenario(ends: Ends) -> None:
        near: Any = ends.near
        far: Any = ends.far
        if forgets != "nothing":
            for process in (near.process, far.process):
                process.event_synchronize = after(told, process.event_synchronize)
        try:
            await exchange(near, far)
        finally:
            told.set()

    async def exchange(near: Any, far: Any) -> None:
        offer(near, far)
        offer(far, near)
        target, src, total = (
            ModelArray(far.process, 64),
            ModelArray(near.process, 64),
            ModelArray(far.process, 64),
        )
        region = near.link.open_region(far.memory.regions.register(target))
        for value in range(1, 6):
            if value > 1:
                assert await near.wait(FAR, CHANNEL, value - 1) == _native.WAIT_OK
                if forgets != "the writer's wait":
                    near.peer.follow(near.process.default_stream, CHANNEL)
            near.process.compute(src.address, 64, lambda data, value=value: data.fill(value))
            region.put_behind(src, channel=CHANNEL, value=value)
            assert await far.wait(NEAR, CHANNEL, value) == _native.WAIT_OK
            if forgets != "the reader's wait":
                far.peer.follow(far.process.default_stream, CHANNEL)
            far.process.memcpy_async(total.address, target.address, 64, far.process.default_stream)
            far.peer.signal(CHANNEL, value, after=far.process.default_stream)
        assert set(total[:].tolist()) == {5}
        region.close()

    if forgets == "nothing":
        CudaModelHarness(devices).run(scenario)
        return
    with pytest.raises(CudaFault):
        CudaModelHarness(devices).run(scenario)


# -- ownership -------------------------------------------------------------------------------------------


def test_an_array_lives_until_all_that_have_it_open_let_go() -> None:
    _, owner, _ = pair()
    exports = DeviceExports(owner, slot=NEAR, incarnation=1)
    array = ModelArray(owner, 64)
    handle = exports.register(array, writers=[2, 3])
    assert exports.register(array, writers=[4]) == handle
    assert exports.release(handle) == {2, 3, 4} and exports.held == 1
    exports.let_go(2, handle)
    exports.writer_gone(3)
    exports.let_go(4, handle)
    exports.let_go(4, handle)
    assert exports.held == 0 and exports.release(handle) == frozenset()


def test_an_array_across_allocations_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of torch's in expandable segments: CUDA says the range of the first part alone."""
    _, owner, _ = pair()
    array = ModelArray(owner, 64)
    base, _ = owner.address_range(array.address)
    monkeypatch.setattr(owner, "address_range", lambda address: (base, 48))
    with pytest.raises(LocalProtocolError, match="64 bytes cannot be registered: it lies in more than one"):
        DeviceExports(owner, slot=NEAR, incarnation=1).register(array)


def test_memory_that_is_taken_back_is_closed_once_its_regions_are() -> None:
    async def scenario(ends: Ends) -> None:
        near: Any = ends.near
        array, region = ends.far.inbox(ends.near, 64)
        target: Any = array
        said: list[str] = []
        near.peer.take_back(region.handle, lambda: said.append("closed"))
        with pytest.raises(LocalProtocolError, match="leaving"):
            near.link.open_region(region.handle)
        transfer = region.put(b"1" * 64, channel=0, value=1)
        assert not said
        region.close()
        await transfer
        near.peer.close()
        assert said == ["closed"]
        assert not target.process.host.find(target.address).opened

    CudaModelHarness(1).run(scenario)


@pytest.mark.parametrize("gone", [False, True])
def test_memory_is_not_closed_under_a_copy_whatever_becomes_of_the_peer(gone: bool) -> None:
    async def scenario(ends: Ends) -> None:
        near: Any = ends.near
        array, region = ends.far.inbox(ends.near, 64)
        target: Any = array
        with near.process.host.lock:  # the device does nothing until this ends
            transfer = region.put(b"1" * 64, channel=0, value=1)
            if gone:
                near.peer.abort()
            region.close()
            assert not transfer.done and target.process.host.find(target.address).opened
        if gone:
            with pytest.raises(PeerLost):
                await transfer
        else:
            await transfer
        near.peer.close()
        assert not target.process.host.find(target.address).opened
        assert near.process.host.failed is None

    CudaModelHarness(1).run(scenario)


def test_a_fault_of_the_device_ends_every_transfer() -> None:
    async def scenario(ends: Ends) -> None:
        near: Any = ends.near
        _, region = ends.far.inbox(ends.near, 64)
        near.process.dead = True  # every call fails from now on
        with pytest.raises(CudaFault):
            await region.put(b"1", channel=0, value=1)
        with pytest.raises(CudaFault):
            region.notify(0, 1)
        with pytest.raises(CudaFault):
            await region.get(bytearray(1))

    CudaModelHarness(1).run(scenario)


# -- facts and handles -----------------------------------------------------------------------------------


def facts(number: int, **changes: Any) -> DeviceFacts:
    values: dict[str, Any] = {
        "index": number,
        "uuid": bytes([number]) * 16,
        "name": "NVIDIA H100",
        "memory_bytes": 80 << 30,
        "pci": f"0000:0{number}:00.0",
        "unified_addressing": True,
        "ipc_events": True,
        "dma_buf": True,
    }
    return DeviceFacts(**{**values, **changes})


@pytest.mark.parametrize(
    ("theirs", "situation", "route", "words"),
    [
        (facts(1), {}, CopyRoute.SAME_DEVICE, "both compute on"),
        (facts(2), {}, CopyRoute.PEER, "by itself"),
        (facts(2), {"can_access_peer": False}, CopyRoute.THROUGH_HOST, "does not reach"),
        (facts(2), {"visible": False}, CopyRoute.STAGED, "CUDA_VISIBLE_DEVICES"),
        (facts(1), {"same_host": False}, CopyRoute.STAGED, "another host"),
        (facts(2, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb"), {}, CopyRoute.STAGED, "MIG"),
        (facts(2, wsl=True), {}, CopyRoute.STAGED, "WSL"),
        (facts(2, ipc_events=False), {}, CopyRoute.STAGED, "no events"),
    ],
)
def test_the_route_between_two_devices(
    theirs: DeviceFacts, situation: dict[str, bool], route: CopyRoute, words: str
) -> None:
    usual = {"same_host": True, "visible": True, "can_access_peer": True}
    choice = choose_copy_route(facts(1), theirs, **{**usual, **situation})
    assert choice.route is route and words in choice.reason


HANDLE = DeviceHandle(
    slot=1,
    incarnation=2,
    offset=0,
    nbytes=24,
    writable=True,
    device=bytes(16),
    memory=bytes(64),
    typestr="<f4",
    shape=(2, 3),
)


def test_a_handle_comes_back_as_it_was() -> None:
    assert decode_handle(encode_handle(HANDLE), DeviceHandle, slot=1, incarnation=2) == HANDLE


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (2, 4)},
        {"typestr": "|O8"},
        {"incarnation": 3},
        {"slot": 2},
        {"memory": bytes(63)},
        {"device": b""},
        {"offset": -1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_handle_that_does_not_fit_together_is_refused(changes: dict[str, Any]) -> None:
    forged = msgspec.structs.replace(HANDLE, **changes)
    with pytest.raises(RemoteProtocolError):
        decode_handle(encode_handle(forged), DeviceHandle, slot=1, incarnation=2)


@pytest.mark.parametrize(
    "changes",
    [{"strides": (8,)}, {"typestr": "|O8"}, {"mask": 1}, {"shape": (-1,)}, {"data": None}],
    ids=lambda changes: next(iter(changes)),
)
def test_an_array_that_is_not_contiguous_or_of_no_use_is_refused(changes: dict[str, Any]) -> None:
    interface = {"shape": (4,), "typestr": "<f4", "data": (1 << 40, False), "version": 3}
    array = SimpleNamespace(__cuda_array_interface__={**interface, **changes})
    with pytest.raises(LocalProtocolError):
        span_of(array)


def test_an_array_of_one_row_is_contiguous_whatever_its_stride() -> None:
    strided = {"shape": (1, 4), "typestr": "<f4", "data": (1 << 40, False), "strides": (99, 4), "stream": 2}
    span = span_of(SimpleNamespace(__cuda_array_interface__=strided))
    assert (span.nbytes, span.stream) == (16, 2)
