"""Death notice, with real processes and real kills."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native import _native
from zbmd.transport.shm.death_notice import DeathNotice, DeathWatch, LifeThread

Fork = Callable[[Callable[[], None]], int]


@contextmanager
def segments(count: int) -> Generator[list[Segment]]:
    made = [Segment.create(slot=slot, incarnation=1, arena_bytes=0, inbox_bytes=0) for slot in range(count)]
    try:
        yield made
    finally:
        for segment in made:
            segment.close()


class Victim:
    """A child that lives, in `segment`, until it is asked to leave or is killed."""

    def __init__(self, fork: Fork, segment: Segment) -> None:
        self.segment = segment
        ready_read, ready_write = os.pipe()
        leave_read, self._leave = os.pipe()

        def main() -> None:
            life = LifeThread(segment)
            os.write(ready_write, b"!")
            os.close(self._leave)
            os.read(leave_read, 1)
            life.goodbye()

        self.pid = fork(main)
        assert os.read(ready_read, 1) == b"!"
        for fd in (ready_read, ready_write, leave_read):
            os.close(fd)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        os.write(self._leave, b"!")

    def reap(self) -> int:
        os.close(self._leave)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def attach(segment: Segment) -> PeerSegment:
    return PeerSegment.attach(segment.fds, slot=segment.slot)


async def noticed(own: Segment, peers: list[PeerSegment], then: Callable[[], None]) -> dict[int, DeathNotice]:
    """Watch `peers`, do `then`, and return the notices once there is one for each."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    notices: dict[int, DeathNotice] = {}

    def callback(slot: int, notice: DeathNotice) -> None:
        assert slot not in notices
        notices[slot] = notice
        if len(notices) == len(peers):
            done.set()

    watch = DeathWatch(own, loop)
    try:
        for peer in peers:
            watch.watch(peer, callback)
        then()
        await done.wait()
    finally:
        watch.close()
    return notices


def test_a_killed_peer_is_noticed_and_its_bit_is_set(fork: Fork) -> None:
    with segments(2) as (own, theirs):
        victim = Victim(fork, theirs)
        before_ns = _native.now_ns()
        notices = asyncio.run(noticed(own, [attach(theirs)], victim.kill))
        assert victim.reap() == -signal.SIGKILL
        assert before_ns <= notices[1].at_ns <= _native.now_ns()
        assert not notices[1].clean
        assert own.lost_mask() == 1 << 1


def test_a_peer_that_leaves_is_noticed_as_clean(fork: Fork) -> None:
    with segments(2) as (own, theirs):
        victim = Victim(fork, theirs)
        notices = asyncio.run(noticed(own, [attach(theirs)], victim.leave))
        assert victim.reap() == 0
        assert notices[1].clean
        assert own.lost_mask() == 1 << 1


@pytest.mark.parametrize("clean", [False, True])
def test_a_watch_that_comes_too_late_is_told_at_once(fork: Fork, clean: bool) -> None:
    with segments(2) as (own, theirs):
        victim = Victim(fork, theirs)
        (victim.leave if clean else victim.kill)()
        victim.reap()
        notices = asyncio.run(noticed(own, [attach(theirs)], lambda: None))
        assert notices[1].clean is clean


def test_every_watcher_of_one_victim_is_told_and_every_victim_of_one_watcher(fork: Fork) -> None:
    with segments(5) as (own, other, *theirs):
        victims = [Victim(fork, segment) for segment in theirs]

        async def main() -> list[dict[int, DeathNotice]]:
            def kill() -> None:
                for victim in victims:
                    victim.kill()

            peers = [attach(segment) for segment in theirs]
            ready = asyncio.Event()
            second = asyncio.ensure_future(noticed(other, [peers[0]], ready.set))
            await ready.wait()
            return [await noticed(own, peers, kill), await second]

        ours, others = asyncio.run(main())
        assert sorted(ours) == [2, 3, 4] and list(others) == [2]
        assert own.lost_mask() == 0b11100 and other.lost_mask() == 0b100
        for victim in victims:
            victim.reap()


def test_a_native_wait_ends_when_a_peer_is_killed(fork: Fork) -> None:
    with segments(2) as (own, theirs):
        victim = Victim(fork, theirs)
        results: list[int] = []

        def parked_wait() -> None:
            results.append(_native.wait(own.base, 1, 0, 1, group_mask=1 << 1))

        waiter = threading.Thread(target=parked_wait)
        waiter.start()
        asyncio.run(noticed(own, [attach(theirs)], victim.kill))
        waiter.join()
        assert results == [_native.WAIT_LOST]
        victim.reap()


def test_the_bit_is_set_while_python_computes_and_the_loop_never_turns(fork: Fork) -> None:
    with segments(2) as (own, theirs):
        victim = Victim(fork, theirs)

        async def main() -> None:
            watch = DeathWatch(own, asyncio.get_running_loop())
            watch.watch(attach(theirs), lambda slot, notice: None)
            victim.kill()
            # Pure Python, without a turn of the loop: only the native thread can set the bit.
            while not own.lost_mask():
                sum(range(1000))
            watch.close()

        asyncio.run(main())
        assert own.lost_mask() == 1 << 1
        victim.reap()


def test_unwatch_ends_the_thread_and_leaves_the_peer_in_peace(fork: Fork) -> None:
    with segments(2) as (own, theirs):
        victim = Victim(fork, theirs)

        async def main() -> None:
            watch = DeathWatch(own, asyncio.get_running_loop())
            threads = len(os.listdir("/proc/self/task"))
            for _ in range(200):
                watch.watch(attach(theirs), lambda slot, notice: pytest.fail("unwatched"))
                watch.unwatch(1)
            watch.unwatch(1)
            assert len(os.listdir("/proc/self/task")) == threads
            watch.close()
            watch.close()
            with pytest.raises(LocalProtocolError, match="closed"):
                watch.watch(attach(theirs), lambda slot, notice: None)

        asyncio.run(main())
        assert own.lost_mask() == 0
        # The word of life still works after two hundred watchers: the next one gets the notice.
        assert not asyncio.run(noticed(own, [attach(theirs)], victim.kill))[1].clean
        victim.reap()


def test_a_replacement_in_the_same_slot_is_watched_anew(fork: Fork) -> None:
    with segments(2) as (own, first):
        second = Segment.create(slot=1, incarnation=2, arena_bytes=0, inbox_bytes=0)
        for segment in (first, second):
            victim = Victim(fork, segment)
            assert 1 in asyncio.run(noticed(own, [attach(segment)], victim.kill))
            assert own.lost_mask() == 1 << 1
            own.clear_lost(1)
            victim.reap()
        second.close()


def test_what_cannot_be_watched_is_refused() -> None:
    with segments(2) as (own, theirs):

        async def main() -> None:
            watch = DeathWatch(own, asyncio.get_running_loop())
            with pytest.raises(RemoteProtocolError, match="life thread"):
                watch.watch(attach(theirs), lambda slot, notice: None)
            with pytest.raises(LocalProtocolError, match="our own"):
                watch.watch(attach(own), lambda slot, notice: None)
            life = LifeThread(theirs)
            watch.watch(attach(theirs), lambda slot, notice: None)
            with pytest.raises(LocalProtocolError, match="unwatch it first"):
                watch.watch(attach(theirs), lambda slot, notice: None)
            watch.close()
            life.goodbye()
            life.goodbye()

        asyncio.run(main())


def test_one_callbacks_error_does_not_swallow_anothers_notice(fork: Fork) -> None:
    with segments(3) as (own, *theirs):
        victims = [Victim(fork, segment) for segment in theirs]

        async def main() -> list[object]:
            loop = asyncio.get_running_loop()
            reported: list[object] = []
            both = asyncio.Event()

            def handler(_: object, context: dict[str, object]) -> None:
                reported.append(context["exception"])
                if len(reported) == 2:
                    both.set()

            def callback(slot: int, notice: DeathNotice) -> None:
                raise ValueError(slot)

            loop.set_exception_handler(handler)
            watch = DeathWatch(own, loop)
            for segment in theirs:
                watch.watch(attach(segment), callback)
            for victim in victims:
                victim.kill()
            await both.wait()
            watch.close()
            return reported

        assert sorted(str(error) for error in asyncio.run(main())) == ["1", "2"]
        for victim in victims:
            victim.reap()
