"""Many links in one process: what an idle one costs, and what happens when descriptors run out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable, Generator

import pytest
from structlog.testing import capture_logs
from support.links.link_harness import Ear, ShmHarness, Who

from zbmd.transport.errors import OutOfDescriptors, PeerLost
from zbmd.transport.frames import FrameHeader
from zbmd.transport.identity import Identity
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.shm.connect import Endpoint, link_pair, listen
from zbmd.transport.shm.link import link_memory_bytes

Fork = Callable[[Callable[[], None]], int]
LINKS = 1000
IDLE_LINK_BYTES_MAX = 256 << 10
DESCRIPTORS_AN_END = 3
SPARE_DESCRIPTORS = 200
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
HARNESS = ShmHarness("uvloop")


@contextlib.contextmanager
def descriptors_max(count: int) -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(count, before[1])))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def first_free() -> int:
    """The lowest free descriptor: with a limit of one more, it is the last that can be had."""
    fd = os.dup(0)
    os.close(fd)
    return fd


def own_memory_bytes() -> int:
    """This process's own pages, without shared memory."""
    with open("/proc/self/status") as status:
        kib = next(line.split()[1] for line in status if line.startswith("RssAnon"))
    return int(kib) * 1024


def test_a_thousand_links_in_one_process() -> None:
    limits = LinkLimits()

    async def main() -> None:
        accepted: list[LinkSide] = []
        listener, address = await HARNESS.listen(accepted.append, Who(name="b", limits=limits))
        dialed = [await HARNESS.dial(address, Who(name="a", limits=limits))]
        before_bytes = own_memory_bytes()
        for _ in range(LINKS):
            dialed.append(await HARNESS.dial(address, Who(name="a", limits=limits)))
        both_ends_bytes = (own_memory_bytes() - before_bytes) / LINKS
        shared_bytes = -(-link_memory_bytes(limits.ring_bytes) // PAGE_BYTES) * PAGE_BYTES
        assert both_ends_bytes + shared_bytes <= IDLE_LINK_BYTES_MAX
        ears = [Ear(link) for link in dialed]
        for link in accepted:
            link.on_frame = echo(link)
        for number, link in enumerate(dialed):
            link.send(number.to_bytes(4, "little"))
        for number, ear in enumerate(ears):
            assert await ear.frames(1) == [number.to_bytes(4, "little")]
        for link in dialed:
            link.close()
        assert [await ear.end() for ear in ears] == [None] * len(ears)
        listener.close()
        await listener.wait_closed()
        for link in accepted:
            link.close()

    with descriptors_max(2 * DESCRIPTORS_AN_END * LINKS + SPARE_DESCRIPTORS):
        HARNESS.run_loop(main())


def echo(link: LinkSide) -> Callable[[FrameHeader, memoryview], None]:
    return lambda _, payload: link.send(bytes(payload))


@pytest.mark.parametrize("free", range(4))
def test_a_dialer_without_descriptors_is_told_and_leaves_nothing(fork: Fork, free: int) -> None:
    ready, announce = os.pipe()

    async def listening() -> None:
        came: asyncio.Future[LinkSide] = asyncio.get_running_loop().create_future()
        listener, address = await HARNESS.listen(came.set_result, Who(name="b", limits=LinkLimits()))
        os.write(announce, address.encode())
        await Ear(await came).end()
        listener.close()
        await listener.wait_closed()

    pid = fork(lambda: HARNESS.run_loop(listening()))
    os.close(announce)
    address = os.read(ready, 200).decode()
    os.close(ready)

    async def main() -> None:
        with descriptors_max(first_free() + free), pytest.raises(OutOfDescriptors) as caught:
            await HARNESS.dial(address, Who(name="a", limits=LinkLimits()))
        assert address in str(caught.value) and "ulimit -n" in str(caught.value)
        link = await HARNESS.dial(address, Who(name="a", limits=LinkLimits()))
        link.close()

    HARNESS.run_loop(main())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("free", range(1, 4))
def test_a_listener_without_descriptors_refuses_and_goes_on(fork: Fork, free: int) -> None:
    ready, announce = os.pipe()

    async def listening() -> None:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[LinkSide] = loop.create_future()
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        listener, address = await HARNESS.listen(came.set_result, Who(name="b", limits=LinkLimits()))
        loop.add_signal_handler(signal.SIGUSR1, resource.setrlimit, resource.RLIMIT_NOFILE, before)
        with capture_logs() as logs:
            # One for the connection: what is left is too little for the three of a link.
            resource.setrlimit(resource.RLIMIT_NOFILE, (first_free() + free, before[1]))
            os.write(announce, address.encode())
            await Ear(await came).end()
        refused = [entry for entry in logs if entry["event"] == "connection refused"]
        assert {entry["kind"] for entry in refused} == {"OutOfDescriptors"}
        assert "ulimit -n" in refused[0]["reason"]
        listener.close()
        await listener.wait_closed()

    pid = fork(lambda: HARNESS.run_loop(listening()))
    os.close(announce)
    address = os.read(ready, 200).decode()
    os.close(ready)

    async def main() -> None:
        with pytest.raises(PeerLost):
            await HARNESS.dial(address, Who(name="a", limits=LinkLimits()))
        os.kill(pid, signal.SIGUSR1)
        # The signal is handled on the listener's loop, before or after the next connection.
        while True:
            try:
                link = await HARNESS.dial(address, Who(name="a", limits=LinkLimits()))
                break
            except PeerLost:
                continue
        link.close()

    HARNESS.run_loop(main())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("free", range(6))
def test_a_pair_or_a_listener_without_descriptors_leaves_nothing(free: int) -> None:
    who = Identity(name="a", pid=os.getpid(), uid=os.getuid(), incarnation=1)
    endpoint = Endpoint(identity=who, cookie=bytes(32))

    async def main() -> None:
        with descriptors_max(first_free() + free), pytest.raises(OutOfDescriptors, match="ulimit -n"):
            link_pair(endpoint, endpoint)
        with descriptors_max(first_free()), pytest.raises(OutOfDescriptors, match="the listener at"):
            listen("zbmd-test-without-descriptors", lambda link: None, endpoint)
        for link in link_pair(endpoint, endpoint):
            link.close()

    HARNESS.run_loop(main())
