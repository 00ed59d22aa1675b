"""Heartbeats by one-sided writes, between nodes that have a device each; a third of this host has none."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from support.cluster.thread_nodes import Told, node
from support.processes.forked import Fork
from support.rdma.rdma_world import given_devices

from zbmd.actors.cluster.node.incarnation import Incarnation
from zbmd.actors.cluster.node.incarnations import MemberSuspected, ViewEntered
from zbmd.actors.cluster.node.node import ClusterNode
from zbmd.actors.cluster.node.persistent_state import NodeState
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.rank.environment import LINKS_VARIABLE
from zbmd.transport.host.link_choice import DEVICES_VARIABLE

BUDGET_NS = 5_000_000_000
SILENCES_HELD = 2
"""For so many times the silence that is suspect the GIL is held; a lease is longer."""
BEATS_HELD = 2 * SILENCES_HELD
"""At least so many come meanwhile, on a machine however slow: one would keep off half the suspicions."""
BEATS_BEFORE = 4
PATIENCE_S = 120.0
MEASURED_S = 0.2
WORDS_BYTES_MAX = 100
CLONE_NEWPID = 0x20000000
Found = TypeVar("Found")


def busy(turns: int) -> float:
    """One call into C, which gives nobody the GIL; how many seconds it took."""
    began_s = time.monotonic()
    sum(itertools.repeat(0, turns))
    return time.monotonic() - began_s


def hold(seconds: float) -> float:
    """Hold the GIL for about so long; how long it was."""
    turns = 1_000
    while (took_s := busy(turns)) < MEASURED_S:
        turns *= 2
    return busy(int(turns * seconds / took_s))


class OtherNode:
    """A node in a process of its own, forked ahead of the node that it joins: to import again takes long.

    It has numbers of processes of its own, as on another host, so that nobody here receives its death. That
    wants root.
    """

    def __init__(self, fork: Fork, directory: Path, name: str, devices: str) -> None:
        child_reads, self._tells = os.pipe()
        self._hears, child_writes = os.pipe()

        def main() -> None:
            os.close(self._tells)
            os.environ[DEVICES_VARIABLE] = devices
            asyncio.run(self._serve(directory, name, child_reads, child_writes))

        def as_on_another_host() -> None:
            if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):  # for who is forked from now on
                raise OSError(ctypes.get_errno(), "a namespace of processes of its own wants root")
            pid = fork(main)
            os.write(child_writes, str(pid).encode())
            os.waitpid(pid, 0)

        fork(as_on_another_host)
        os.close(child_reads)
        os.close(child_writes)
        self._process = os.pidfd_open(int(os.read(self._hears, WORDS_BYTES_MAX)))

    @staticmethod
    async def _serve(directory: Path, name: str, reads: int, writes: int) -> None:
        """Join the given node, and then hold the GIL for so many seconds as it reads."""
        with os.fdopen(reads) as told, os.fdopen(writes, "w", buffering=1) as say:
            async with node(directory, name, told.readline().strip()) as (_, heard):
                await heard.acts_on(2)
                print("in", file=say)
                while line := await asyncio.to_thread(told.readline):
                    print(hold(float(line)), file=say)

    async def ask(self, words: str) -> str:
        """Its answer."""
        os.write(self._tells, f"{words}\n".encode())
        answer = await asyncio.to_thread(os.read, self._hears, WORDS_BYTES_MAX)
        assert answer, "it has ended"
        return answer.decode()

    def stop(self) -> None:
        signal.pidfd_send_signal(self._process, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        signal.pidfd_send_signal(self._process, signal.SIGKILL)
        assert select.select([self._process], [], [], PATIENCE_S)[0]

    def close(self) -> None:
        for fd in (self._tells, self._hears, self._process):
            os.close(fd)


@pytest.fixture
def names(tmp_path: Path) -> tuple[str, str]:
    """Of two nodes: of two halves the one with the lower id goes on, so that comes first."""
    ids: dict[int, str] = {}
    for name in ("some", "other"):
        state = NodeState.open(tmp_path / name)
        ids[state.new_incarnation().id] = name  # and it is kept from now on
        state.close()
    lower, higher = sorted(ids)
    return ids[lower], ids[higher]


@pytest.fixture
def other(fork: Fork, tmp_path: Path, names: tuple[str, str]) -> Iterator[OtherNode]:
    """It has the second device."""
    made = OtherNode(fork, tmp_path, names[1], "@".join(given_devices()[-1]))
    yield made
    made.close()


async def look(node: ClusterNode, at: Callable[[Incarnation], Found]) -> Found:
    """Look at its life, on its thread."""

    async def there() -> Found:
        return at(node._inside._living())

    assert node._inner is not None
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), node._inner))


async def until(node: ClusterNode, holds: Callable[[Incarnation], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await look(node, holds):
            pass  # asked again: there and back takes its time


def suspected(told: Told) -> list[MemberSuspected]:
    return [event for event in told.events if isinstance(event, MemberSuspected)]


async def both(one: ClusterNode, told: Told, other: OtherNode) -> NodeKey:
    """The other has joined, and beats go by RDMA; who it is."""
    await told.acts_on(1)
    await other.ask(str(one.me.address))
    await told.acts_on(2)
    await until(one, lambda life: bool(life.rdma_routes.by_rdma()))
    await until(
        one,
        lambda life: min(life.beats._native.sent_by_way, life.beats._native.come_by_way) >= BEATS_BEFORE,
    )
    (peer,) = (each.key for each in one.view.nodes if each.key != one.me.key)
    return peer


async def test_a_node_whose_python_stands_still_is_heard_and_a_host_that_does_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], other: OtherNode
) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "@".join(given_devices()[0]))
    async with node(tmp_path, names[0], budget_ns=BUDGET_NS) as (one, told):
        peer = await both(one, told, other)
        epoch = one.view.epoch
        limit_ns = await look(one, lambda life: life.beats.silence(peer)[1])
        come = await look(one, lambda life: life.beats._native.come_by_way)
        held_s = float(await other.ask(str(SILENCES_HELD * limit_ns / 1e9)))
        assert held_s > limit_ns / 1e9, "it has not stood still for long enough to be suspected"
        assert await look(one, lambda life: life.beats._native.come_by_way) >= come + BEATS_HELD
        assert not suspected(told) and one.view.epoch == epoch
        other.stop()  # a host that stands still: nothing of it is proven
        await told.until(lambda event: isinstance(event, MemberSuspected))
        assert [event.key for event in suspected(told)] == [peer]
        other.kill()
        await told.until(lambda event: isinstance(event, ViewEntered) and event.view.epoch > epoch)


async def test_a_node_that_is_killed_alone_is_suspected_at_the_limit_of_its_silence_and_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], other: OtherNode
) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "@".join(given_devices()[0]))
    async with node(tmp_path, names[0], budget_ns=BUDGET_NS) as (one, told):
        peer = await both(one, told, other)
        epoch = one.view.epoch

        def kill_and_look(life: Incarnation) -> tuple[int | None, int]:
            other.kill()  # on the loop that judges: nothing is suspected between this and the look
            return life.beats.silence(peer)

        silent_ns, limit_ns = await look(one, kill_and_look)
        assert silent_ns is not None
        killed_ns = time.monotonic_ns()
        await told.until(lambda event: isinstance(event, MemberSuspected))
        noticed_ms = (time.monotonic_ns() - killed_ns + silent_ns) / 1e6
        (suspicion,) = suspected(told)
        said = re.fullmatch(r"not heard for (\d+) ms", suspicion.reason)
        assert suspicion.key == peer and said is not None, suspicion
        # No sooner: that its stripe was closed proves nothing between hosts.
        print(f"limit {limit_ns / 1e6:.0f} ms; suspected after {said[1]}, told after {noticed_ms:.0f} ms")
        assert int(said[1]) >= limit_ns // 1_000_000
        acting = await told.until(lambda event: isinstance(event, ViewEntered) and event.view.epoch > epoch)
        assert isinstance(acting, ViewEntered) and [each.key for each in acting.view.nodes] == [one.me.key]


async def test_without_a_device_beats_go_by_tcp_and_both_know_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, "@".join(given_devices()[0]))
    async with node(tmp_path, "one", budget_ns=BUDGET_NS) as (one, told):
        await told.acts_on(1)
        monkeypatch.setenv(LINKS_VARIABLE, "tcp")
        async with node(tmp_path, "two", one.me.address) as (two, _):
            await told.acts_on(2)
            for each in (one, two):
                await until(each, lambda life: any("=tcp on " in why for _, why in life.rdma_routes._told))
                await until(each, lambda life: life.beats._native.beats_sent > 3)
                assert await look(each, lambda life: life.beats._native.sent_by_way) == 0
