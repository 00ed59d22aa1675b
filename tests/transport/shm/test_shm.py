"""shm links between processes: segments handed over, and addresses that do not answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine

import numpy as np
import pytest
import uvloop

from zbmd.transport.errors import (
    DeadlineExceeded,
    LocalProtocolError,
    PeerLost,
    ZbmdError,
)
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Link
from zbmd.transport.memory.segment import Segment
from zbmd.transport.shm.connect import Endpoint, dial, listen
from zbmd.transport.shm.link import ShmLink

Fork = Callable[[Callable[[], None]], int]
Run = Callable[[Coroutine[None, None, None]], None]
COOKIE = b"a cookie of the tests, 32 bytes "


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


@pytest.fixture
def address() -> str:
    return f"zbmd-test-{os.getpid()}-{os.urandom(4).hex()}"


def endpoint(name: str, incarnation: int = 1, segment: Segment | None = None) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=incarnation, job=7)
    return Endpoint(identity=identity, cookie=COOKIE, segment=segment)


class Peer:
    """A forked child that listens at `address` and runs `serve(link)` on the first link."""

    def __init__(
        self, fork: Fork, run: Run, address: str, who: Endpoint, serve: Callable[[ShmLink], Awaitable[None]]
    ) -> None:
        ready, announce = os.pipe()

        async def main() -> None:
            first: asyncio.Future[ShmLink] = asyncio.get_running_loop().create_future()
            listener = listen(address, first.set_result, who)
            os.write(announce, b"!")
            await serve(await first)
            listener.close()

        self.pid = fork(lambda: run(main()))
        assert os.read(ready, 1) == b"!"
        os.close(ready)
        os.close(announce)

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


async def closed(link: Link) -> ZbmdError | None:
    """Wait for the link's end; return what `on_closed` was given, once."""
    end: asyncio.Future[ZbmdError | None] = asyncio.get_running_loop().create_future()
    link.on_closed = end.set_result
    return await end


def test_segments_are_exchanged_at_hello(fork: Fork, run: Run, address: str) -> None:
    ours = Segment.create(slot=0, incarnation=5, arena_bytes=1 << 16, inbox_bytes=4096)
    theirs = Segment.create(slot=1, incarnation=6, arena_bytes=1 << 16, inbox_bytes=4096)

    async def serve(link: ShmLink) -> None:
        assert link.peer.name == "rank0" and link.peer.pid == os.getppid()
        peer_segment = link.peer_segment
        assert peer_segment is not None and (peer_segment.slot, peer_segment.incarnation) == (0, 5)
        numbers = theirs.arena.from_array(np.arange(100))
        offset = theirs.arena.offset_of(numbers)
        assert offset is not None
        link.send(offset.to_bytes(8, "little"))
        assert await closed(link) is None

    peer = Peer(fork, run, address, endpoint("rank1", 6, theirs), serve)

    async def main() -> None:
        link = await dial(address, endpoint("rank0", 5, ours))
        assert link.peer.name == "rank1" and link.peer.pid == peer.pid
        offset: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        link.on_frame = lambda header, payload: offset.set_result(int.from_bytes(payload, "little"))
        assert link.peer_segment is not None and link.peer_segment.pid == os.getpid()
        view = link.peer_segment.arena_view(await offset, 800)
        assert np.frombuffer(view, np.int64).tolist() == list(range(100))
        link.close()

    run(main())
    assert peer.exit_code() == 0
    ours.close()
    theirs.close()


def test_nobody_listens(run: Run, address: str) -> None:
    async def main() -> None:
        with pytest.raises(PeerLost, match="nobody listens"):
            await dial(address, endpoint("rank0"))

    run(main())


def test_a_listener_that_never_answers_is_left_at_the_deadline(run: Run, address: str) -> None:
    async def main() -> None:
        listener = listen(address, lambda link: None, endpoint("node"))
        # Nobody accepts: the connection waits in the backlog, and so does the hello.
        asyncio.get_running_loop().remove_reader(listener._sockets[0].fileno())
        with pytest.raises(ZbmdError, match="deadline has passed"):
            await dial(address, endpoint("rank0"), timeout_ns=2_000_000)
        listener.close()

    run(main())


def test_a_full_backlog_is_retried_until_the_deadline(
    run: Run, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zbmd.transport.shm.connect.BACKLOG", 0)

    async def main() -> None:
        listener = listen(address, lambda link: None, endpoint("node"))
        asyncio.get_running_loop().remove_reader(listener._sockets[0].fileno())
        waiting = asyncio.ensure_future(dial(address, endpoint("rank0")))
        await asyncio.wait([waiting], timeout=0)
        with pytest.raises(DeadlineExceeded, match="did not accept in time"):
            await dial(address, endpoint("rank1"), timeout_ns=5_000_000)
        waiting.cancel()
        await asyncio.wait([waiting])
        listener.close()

    run(main())


def test_addresses_that_cannot_be_listened_at(run: Run, address: str) -> None:
    async def main() -> None:
        listener = listen(address, lambda link: None, endpoint("node"))
        with pytest.raises(LocalProtocolError, match="cannot listen"):
            listen(address, lambda link: None, endpoint("node"))
        for bad in ("", "x" * 108):
            with pytest.raises(LocalProtocolError, match="1 to 107 bytes"):
                listen(bad, lambda link: None, endpoint("node"))
        listener.close()
        listener.close()
        listen(address, lambda link: None, endpoint("node")).close()

    run(main())
