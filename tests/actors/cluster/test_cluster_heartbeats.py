"""The heartbeats of whole nodes: over stripes, over links where there is none, and what a beat proves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster.thread_nodes import node
from support.tcp.tcp_certificates import job_tls

from zbmd.actors.cluster.heartbeats.driver import CALM_PACE_BUDGETS, PACE_BUDGETS, Heartbeats, beat_keys
from zbmd.actors.cluster.node.incarnations import IncarnationEnded, ViewEntered
from zbmd.actors.cluster.node.node import ClusterNode
from zbmd.transport.clock.deadlines import SECOND_NS
from zbmd.transport.handshake.session_setup import control_session, stripe_session
from zbmd.transport.identity import PeerInfo, Side
from zbmd.transport.secure.protection import Protection, Secrets, Session
from zbmd.transport.tcp.address import TcpSettings

BUDGET_NS = SECOND_NS
"""A beat on a busy machine may come later than a tenth of it."""
LONG_BUDGET_NS = 60 * SECOND_NS
"""No look comes while a test runs."""
TIMEOUT_S = 180.0


def inside(node: ClusterNode, look: Callable[[Heartbeats], bool]) -> asyncio.Future[bool]:
    """Look at a node's heartbeats, on its thread."""

    async def there() -> bool:
        return look(node._inside._living().beats)

    assert node._inner is not None
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), node._inner))


async def until(node: ClusterNode, look: Callable[[Heartbeats], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await inside(node, look):
            pass  # asked again: there and back takes its time


def has_stripes(beats: Heartbeats) -> bool:
    return not beats.lacking()


def drop_stripes(beats: Heartbeats) -> bool:
    """As the network would."""
    for key in list(beats._stripes):
        beats.drop_stripe(key)
    return bool(beats.lacking())


@pytest.mark.parametrize("protection", list(Protection))
async def test_nodes_beat_over_stripes_and_make_new_ones(tmp_path: Path, protection: Protection) -> None:
    tls = job_tls() if protection is Protection.TLS else None
    settings = TcpSettings(protection=protection, tls=tls)
    async with node(tmp_path, "n1", budget_ns=BUDGET_NS, settings=settings) as (one, told_one):
        await told_one.acts_on(1)
        async with node(tmp_path, "n2", one.me.address, settings=settings) as (two, told_two):
            epoch = (await told_two.acts_on(2)).view.epoch
            for each in (one, two):
                await until(each, has_stripes)
                sent = [0]

                def beats_go_on(beats: Heartbeats, sent: list[int] = sent) -> bool:
                    sent[0] = sent[0] or beats._native.beats_sent + 10
                    return beats._native.beats_sent >= sent[0]

                await until(each, beats_go_on)
            assert await inside(one, drop_stripes)
            await until(two, has_stripes)
            await until(one, has_stripes)
            assert one.view.epoch == two.view.epoch == epoch, "nobody was suspected meanwhile"
            assert not any(
                isinstance(event, IncarnationEnded) for event in (*told_one.events, *told_two.events)
            )


async def test_a_cluster_with_a_job_is_looked_at_more_often(tmp_path: Path) -> None:
    """The lease that goes with it ends sooner, so it is renewed at once."""
    async with node(tmp_path, "n1", budget_ns=LONG_BUDGET_NS) as (one, told):
        await told.acts_on(1)

        def looks_after(beats: Heartbeats, busy: bool) -> int:
            """Recovery budgets to the next look, to the nearest."""
            beats.watch(beats._subjects, beats._observers, busy=busy)
            return round((beats._pacing.when() - beats._loop.time()) * 1e9 / LONG_BUDGET_NS)

        for busy, budgets in ((False, CALM_PACE_BUDGETS), (True, PACE_BUDGETS), (False, CALM_PACE_BUDGETS)):
            assert await inside(one, lambda beats, b=busy, n=budgets: looks_after(beats, b) == n)


async def test_a_node_whose_thread_stands_still_is_left_behind(tmp_path: Path) -> None:
    """Its native thread lives, and its links; its lease is over."""
    async with node(tmp_path, "n1", budget_ns=BUDGET_NS) as (one, told_one):
        await told_one.acts_on(1)
        async with node(tmp_path, "n2", one.me.address), node(tmp_path, "n3", one.me.address) as (three, _):
            epoch = (await told_one.acts_on(3)).view.epoch
            await until(three, has_stripes)
            key, released = three.me.key, threading.Event()
            assert three._inner is not None
            three._inner.call_soon_threadsafe(released.wait, TIMEOUT_S)
            try:
                left = await told_one.until(
                    lambda event: isinstance(event, ViewEntered) and event.view.epoch > epoch
                )
                assert (
                    isinstance(left, ViewEntered) and not left.view.holds(key) and len(left.view.nodes) == 2
                )
            finally:
                released.set()


def test_the_keys_of_a_stripe_are_its_own() -> None:
    peer = PeerInfo(name="node2", pid=1, uid=0, incarnation=1, contracts={})

    def session(side: Side, stripe_secret: bytes) -> tuple[Session, Session]:
        control = control_session(Secrets(b"c" * 32, side), Protection.MAC, peer)
        return control, stripe_session(Secrets(stripe_secret, side), control, 0)

    dialer, listener = (beat_keys(*session(side, b"l" * 32)) for side in (Side.DIALER, Side.LISTENER))
    assert (dialer.send, dialer.receive) == (listener.receive, listener.send)
    assert dialer.send != dialer.receive and len(dialer.send) == 16
    other = beat_keys(*session(Side.DIALER, b"m" * 32))
    assert not {other.send, other.receive} & {dialer.send, dialer.receive}
    control, stripe = session(Side.DIALER, b"l" * 32)
    assert beat_keys(replace(control, protection=Protection.NONE, keys=None), stripe) == dialer
