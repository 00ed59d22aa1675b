"""A node's parts: its state directory, who may join, what stands in the way, and its thread."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cluster.thread_nodes import COOKIE, LOOPBACK, PATIENCE_S, Told, node
from support.processes.polling import until

from zbmd.actors.cluster.contracts import PROTOCOL_VERSION, Hail
from zbmd.actors.cluster.local_deaths import LocalDeaths, boot_id, pid_space, started
from zbmd.actors.cluster.messages import Beat
from zbmd.actors.cluster.node import join as door
from zbmd.actors.cluster.node.incarnations import IncarnationEnded, JoinDelayed, NodeConfig
from zbmd.actors.cluster.node.join import (
    JoinApplication,
    Joiner,
    JoinFailed,
    JoinTimedOut,
    advertised,
    find_member,
    has_namesake,
    own_addresses,
    refuse_join,
)
from zbmd.actors.cluster.node.node import ClusterNode
from zbmd.actors.cluster.node.persistent_state import NodeState, StateBusy, StateError, state_path
from zbmd.actors.cluster.peer_links import node_key
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import fingerprints
from zbmd.transport.clock.deadlines import SECOND_NS, derive
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpAddress, TcpSettings, parse_address

OTHER_COOKIE = b"the cookie of another test's nodes"


# --- the state directory --------------------------------------------------------------------------------


def test_lives_grow_and_the_id_stays(tmp_path: Path) -> None:
    where = tmp_path / "new" / "state"
    first = NodeState.open(where)
    key = first.new_incarnation()
    assert where.stat().st_mode & 0o777 == 0o700
    assert first.new_incarnation() == NodeKey(key.id, key.incarnation + 1)
    first.remember(["a:1", "b:2"])
    first.close()
    second = NodeState.open(where)
    assert second.new_incarnation() == NodeKey(key.id, key.incarnation + 2)
    assert second.join_addresses == ("a:1", "b:2")
    second.close()


def test_two_nodes_cannot_have_one_state_directory(tmp_path: Path) -> None:
    state = NodeState.open(tmp_path / "state")
    state.running_at("10.0.0.1:29400")
    with pytest.raises(
        StateBusy, match=rf"pid {os.getpid()} at 10.0.0.1:29400 runs with the state directory"
    ):
        NodeState.open(tmp_path / "state")
    state.close()
    NodeState.open(tmp_path / "state").close()


def test_a_state_directory_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"cannot be used \(.*\): make it writable, or set ZBMD_STATE_DIR"):
        NodeState.open(tmp_path / "file" / "state")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(StateError, match=r"can be written by others .mode 0777.: `chmod 700"):
        NodeState.open(tmp_path / "shared")
    (tmp_path / "shared").chmod(0o700)
    (tmp_path / "shared" / "node.json").write_text('{"id": 0, "incarnation": 1}')
    with pytest.raises(StateError, match="does not hold a node's state"):
        NodeState.open(tmp_path / "shared")


def test_where_the_state_is() -> None:
    assert state_path({"ZBMD_STATE_DIR": "/x"}) == Path("/x")
    assert state_path({"XDG_STATE_HOME": "/s"}, hostname="h") == Path("/s/zbmd/h")
    assert state_path({"XDG_STATE_HOME": "relative"}, hostname="h").parts[-2:] == ("zbmd", "h")


# --- who may join ---------------------------------------------------------------------------------------


def application(**changes: Any) -> JoinApplication:
    given: dict[str, Any] = {
        "node_id": 5,
        "name": "n5",
        "host": "10.0.0.5",
        "recovery_budget_ns": 0,
        **changes,
    }
    return JoinApplication(**given)


def test_what_stands_against_a_node() -> None:
    me = Node(NodeKey(1, 3), "10.0.0.1:29400", "n1")
    view = ClusterView(epoch=2, nodes=(me, Node(NodeKey(2, 1), "10.0.0.2:29400", "n2")))

    def said(application: JoinApplication) -> tuple[str, bool]:
        found = refuse_join(application, view, me, "10.0.0.1", SECOND_NS)
        assert found is not None
        return found.reason, found.passes

    assert refuse_join(application(), view, me, "10.0.0.1", SECOND_NS) is None
    assert refuse_join(application(recovery_budget_ns=SECOND_NS), view, me, "10.0.0.1", SECOND_NS) is None
    reason, passes = said(application(name="n2"))
    assert (
        passes and "n2 (node2#1) at 10.0.0.2:29400 has the name 'n2' already. Give --name another" in reason
    )
    assert refuse_join(application(name="n2", node_id=2), view, me, "10.0.0.1", SECOND_NS) is None, (
        "its next life"
    )
    reason, passes = said(application(host="127.0.1.1"))
    assert not passes and "known at 127.0.1.1, which on every other host means that host itself" in reason
    assert refuse_join(application(host="::1"), view, me, "127.0.0.1", SECOND_NS) is None, "all on one host"
    reason, passes = said(application(recovery_budget_ns=2 * SECOND_NS))
    assert not passes and "the cluster's recovery budget is 1s, this node's 2s" in reason


@pytest.mark.parametrize(
    ("wanted", "run", "words"),
    [
        (
            "the run B",
            "the run A",
            "it belongs to the run A, and this node was started for the run B. Two runs",
        ),
        ("the run B", "", "there for any job, and this node was started for the run B: give its job"),
        ("", "the run A", "it belongs to the run A, which has a cluster of its own"),
    ],
)
def test_a_node_of_another_run_is_refused_for_good(wanted: str, run: str, words: str) -> None:
    me = Node(NodeKey(1, 3), "10.0.0.1:29400", "n1")
    view = ClusterView(epoch=1, nodes=(me,))
    found = refuse_join(application(run=wanted), view, me, "10.0.0.1", SECOND_NS, run=run)
    assert found is not None and not found.passes and words in found.reason
    assert refuse_join(application(run=run), view, me, "10.0.0.1", SECOND_NS, run=run) is None
    assert has_namesake(Node(NodeKey(7, 1), "", "n1"), view) == me
    assert has_namesake(me, view) is None


def test_which_address_the_others_are_told() -> None:
    loop, lan, ib = (TcpAddress(host=host, port=5) for host in ("127.0.0.1", "10.0.0.1", "192.168.7.1"))
    assert advertised((lan, ib, loop), None) == lan
    assert advertised((lan, ib, loop), "192.168.7.1") == ib, "by which it reaches the cluster"
    assert advertised((lan, loop), "127.0.0.1") == lan, "others may come from elsewhere"
    assert advertised((loop,), "127.0.0.1") == loop
    assert advertised((lan,), "10.9.9.9") == lan


# --- nodes ----------------------------------------------------------------------------------------------


async def test_a_loop_that_is_busy_for_two_seconds_makes_nobody_suspect(tmp_path: Path) -> None:
    async with node(tmp_path, "n1") as (one, told_one):
        await told_one.acts_on(1)
        async with node(tmp_path, "n2", one.me.address) as (two, told_two):
            epochs = (await told_two.acts_on(2)).view.epoch, (await told_one.acts_on(2)).view.epoch
            begun_ns = time.monotonic_ns()
            while time.monotonic_ns() < begun_ns + SECOND_NS:
                hashlib.pbkdf2_hmac("sha256", b"busy", b"", 10_000)  # the loop of both, without the GIL
            while time.monotonic_ns() < begun_ns + 2 * SECOND_NS:
                sum(range(1000))  # and with it
            reply = one._inside.members()
            assert [member.state for member in reply.members if member.node != one.me] == ["heard"]
            assert not one._inside._living().machine._word.suspected
            await asyncio.sleep(0)
            assert (two.view.epoch, one.view.epoch) == epochs
            assert not any(isinstance(e, IncarnationEnded) for e in (*told_one.events, *told_two.events))


async def test_the_last_view_is_remembered_however_slow_the_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node that comes back would found a cluster of its own."""
    writes, store = threading.Event(), NodeState.remember

    def remember(state: NodeState, join_addresses: Iterable[str]) -> None:
        writes.wait()
        store(state, join_addresses)

    def remembered() -> int:
        found = json.loads((tmp_path / "one" / "node.json").read_bytes())
        return len(found.get("doors", ()))

    monkeypatch.setattr(NodeState, "remember", remember)
    try:
        async with node(tmp_path, "one") as (_, told_one):
            address = (await told_one.acts_on(1)).me.address
            async with node(tmp_path, "two", address), node(tmp_path, "three", address):
                await told_one.acts_on(3)
                writes.set()
                async with asyncio.timeout(PATIENCE_S):
                    await until(lambda: remembered() == 2)
    finally:
        writes.set()


async def test_a_joiner_takes_the_clusters_budget(tmp_path: Path) -> None:
    async with node(tmp_path, "n1", budget_ns=2 * SECOND_NS) as (one, told):
        await told.acts_on(1)
        async with node(tmp_path, "n2", one.me.address) as (two, told_two):
            await told_two.acts_on(2)
            assert two._inside.deadlines == derive(2 * SECOND_NS)
        with pytest.raises(JoinFailed, match="the cluster's recovery budget is 2s, this node's 3s"):
            await run_briefly(tmp_path, "n3", one.me.address, budget_ns=3 * SECOND_NS)


async def run_briefly(directory: Path, name: str, *joins: str, **options: Any) -> None:
    """Start a node that is not let in, and raise what it raises."""
    config = NodeConfig(
        name=name,
        listen=LOOPBACK,
        joins=tuple(parse_address(join) for join in joins),
        cookie=options.get("cookie", COOKIE),
        recovery_budget_ns=options.get("budget_ns"),
    )
    async with asyncio.timeout(120):
        await ClusterNode(config, NodeState.open(directory / name), lambda _: None).run()


async def test_clusters_with_different_cookies_on_one_network(tmp_path: Path) -> None:
    async with node(tmp_path, "n1") as (one, told):
        await told.acts_on(1)
        with pytest.raises(JoinFailed, match=r"a cluster with another cookie. On a member .*zbmd-node token"):
            await run_briefly(tmp_path, "n2", one.me.address, cookie=OTHER_COOKIE)


async def test_a_name_that_is_taken_is_told_at_once(tmp_path: Path) -> None:
    async with node(tmp_path, "n1") as (one, told):
        await told.acts_on(1)
        (tmp_path / "other").mkdir()
        async with node(tmp_path / "other", "n1", one.me.address) as (_, told_two):
            event = await told_two.until(lambda e: isinstance(e, JoinDelayed))
            assert isinstance(event, JoinDelayed)
            assert "has the name 'n1' already. Give --name another" in event.text


async def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = NodeConfig(
            name="n1",
            listen=TcpAddress(host="127.0.0.1", port=taken.getsockname()[1]),
            cookie=COOKIE,
        )
        with pytest.raises(UserError, match=r"cannot listen at 127.0.0.1:\d+: the port is in use"):
            await ClusterNode(config, NodeState.open(tmp_path), lambda _: None).run()


async def test_ipv6_alone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.fail("this machine has no IPv6 loopback: the test cannot be run")
    told = Told(), Told()
    listen = TcpAddress(host="::1", port=0)
    first = ClusterNode(
        NodeConfig(name="a", listen=listen, cookie=COOKIE), NodeState.open(tmp_path / "a"), told[0]
    )
    running = [asyncio.create_task(first.run())]
    await told[0].acts_on(1)
    assert first.me.address.startswith("[::1]:")
    joins = (parse_address(first.me.address),)
    second = ClusterNode(
        NodeConfig(name="b", listen=listen, joins=joins, cookie=COOKIE),
        NodeState.open(tmp_path / "b"),
        told[1],
    )
    running.append(asyncio.create_task(second.run()))
    await told[1].acts_on(2)
    for task in running:
        task.cancel()
    await asyncio.wait(running)


# --- doors ----------------------------------------------------------------------------------------------


def seeker(**changes: Any) -> Joiner:
    given: dict[str, Any] = {
        "node_id": 9,
        "name": "n9",
        "host": "127.0.0.1",
        "recovery_budget_ns": 0,
        "cookie": COOKIE,
        "settings": TcpSettings(),
        "deadlines": derive(),
        **changes,
    }
    return Joiner(**given)


async def test_a_firewall_that_drops_silently_is_told_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full drops what knocks, as a firewall does."""
    real_dial = tcp.dial

    async def impatient(address: TcpAddress, endpoint: Endpoint, **options: Any) -> Any:
        return await real_dial(address, endpoint, timeout_ns=50_000_000, **options)

    monkeypatch.setattr(tcp, "dial", impatient)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        where = TcpAddress(host="127.0.0.1", port=port)
        told: list[str] = []
        with pytest.raises(JoinFailed) as failed:
            await find_member([where], seeker(), told.append, 100_000_000)
        for filler in fillers:
            filler.close()
    assert f"{where} did not answer in time: the host is down, or a firewall drops what we send" in str(
        failed.value
    )
    assert f"TCP port {port} is open there (`zbmd-node doctor --peer {where}`)" in str(failed.value)
    assert len(told) == 1


async def test_nobody_there_and_a_name_that_nobody_knows() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        empty = TcpAddress(host="127.0.0.1", port=gone.getsockname()[1])
    unknown = TcpAddress(host="no-such-host.invalid", port=1)
    with pytest.raises(JoinFailed) as failed:
        await find_member([empty, unknown], seeker(), lambda _: None, 1)
    assert f"{empty}: nobody listens at its address" in str(failed.value)
    assert "Check its spelling, DNS and /etc/hosts" in str(failed.value)


async def test_who_founds_waits_for_a_member_and_for_nobody_else(tmp_path: Path) -> None:
    """A founder that comes back, and is not let in at once, would split the cluster if it founded another."""
    founds = seeker(founds=True)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        empty = TcpAddress(host="127.0.0.1", port=gone.getsockname()[1])
    with pytest.raises(JoinFailed, match="nobody listens") as failed:
        await find_member([empty], founds, lambda _: None, 3600 * SECOND_NS)
    assert not isinstance(failed.value, JoinTimedOut)
    async with node(tmp_path, "n1") as (one, told):
        await told.acts_on(1)
        namesake = seeker(founds=True, name="n1")  # as if the one before it had not been missed yet
        with pytest.raises(JoinTimedOut, match="has the name 'n1' already"):
            await find_member(
                [empty, parse_address(one.me.address)], namesake, lambda _: None, SECOND_NS // 2
            )
        found = await find_member([empty, parse_address(one.me.address)], founds, lambda _: None, SECOND_NS)
        assert found.node == one.me


async def test_contracts_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**fingerprints(), "zbmd.cluster.beat/1": "0000000000000000"}
    async with node(tmp_path, "n1") as (one, told):
        await told.acts_on(1)
        monkeypatch.setattr(door, "fingerprints", lambda: changed)
        with pytest.raises(JoinFailed, match="it runs another release of zbmd: run the same on all nodes"):
            await find_member([parse_address(one.me.address)], seeker(), lambda _: None, SECOND_NS)


async def test_which_doors_are_ones_own() -> None:
    here = TcpAddress(host="127.0.0.1", port=29400)
    named = TcpAddress(host="localhost", port=29400)
    other_port = TcpAddress(host="127.0.0.1", port=29401)
    everywhere = TcpAddress(host="", port=29400)
    assert await own_addresses([here, named, other_port], everywhere, SECOND_NS) == (here, named)
    assert await own_addresses([here], TcpAddress(host="127.0.0.1", port=0), SECOND_NS) == ()
    elsewhere = TcpAddress(host="192.0.2.1", port=29400)
    assert await own_addresses([elsewhere], everywhere, SECOND_NS) == ()


async def test_a_join_address_that_is_our_own(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listen = TcpAddress(host="127.0.0.1", port=port)
    config = NodeConfig(name="n1", listen=listen, joins=(listen,), cookie=COOKIE)
    with pytest.raises(UserError, match=f"--join 127.0.0.1:{port} is this node itself"):
        await ClusterNode(config, NodeState.open(tmp_path), lambda _: None).run()


async def test_a_host_name_that_means_loopback_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hosts(_: TcpAddress, __: int) -> set[str]:
        return {"127.0.1.1"}

    monkeypatch.setattr(door, "_hosts", hosts)
    config = NodeConfig(name="n1", listen=TcpAddress(host="myhost", port=29400), cookie=COOKIE)
    with pytest.raises(UserError, match=r"on this host myhost means 127.0.1.1 \(/etc/hosts\)"):
        await ClusterNode(config, NodeState.open(tmp_path), lambda _: None).run()


# --- links ----------------------------------------------------------------------------------------------


def hail(key: NodeKey, **changes: Any) -> Hail:
    given: dict[str, Any] = {
        "node": Node(key, "127.0.0.1:1", "raw"),
        "protocol": PROTOCOL_VERSION,
        "release": "other",
        "wall_ns": time.time_ns(),
        "boot_id": "",
        "pid_space": "",
        "pid": 0,
        "started": 0,
        **changes,
    }
    return Hail(**given)


@asynccontextmanager
async def raw_link(one: ClusterNode, key: NodeKey) -> AsyncGenerator[tuple[Any, asyncio.Future[Any]]]:
    """A link to a node from a process that calls itself a node, and when it has ended."""
    identity = Identity(
        name=f"node{key.id}", pid=os.getpid(), uid=os.getuid(), incarnation=key.incarnation, contracts={}
    )
    link = await tcp.dial(one.me.address, Endpoint(identity=identity, cookie=COOKIE))
    ended: asyncio.Future[ZbmdError | None] = asyncio.get_running_loop().create_future()
    link.on_closed = lambda error: ended.set_result(error)
    link.on_frame = lambda header, payload: None
    try:
        yield link, ended
    finally:
        link.close()


async def test_a_node_that_begins_wrongly_loses_its_link_and_nothing_else(tmp_path: Path) -> None:
    key = NodeKey(12345, 1)
    beginnings = [
        msgspec.msgpack.encode(Beat(known=1, entered=1)),
        msgspec.msgpack.encode(hail(key, protocol=PROTOCOL_VERSION + 1)),
        msgspec.msgpack.encode(hail(NodeKey(12345, 2))),
        b"no contract",
    ]
    async with node(tmp_path, "n1") as (one, told):
        await told.acts_on(1)
        for beginning in beginnings:
            async with raw_link(one, key) as (link, ended), asyncio.timeout(120):
                link.send(beginning)
                await ended
        async with raw_link(one, one.me.key) as (_, ended), asyncio.timeout(120):
            await ended  # it calls itself what the node is called
        async with raw_link(one, key) as (link, ended):
            link.send(msgspec.msgpack.encode(hail(key)))
            link.send(msgspec.msgpack.encode(Beat(known=0, entered=0)))
            await link.flush()
            assert not ended.done()
        assert one.view.epoch == 1


def test_who_is_a_node() -> None:
    assert node_key("node7", 3) == NodeKey(7, 3)
    for name in ("node07", "node", "node-1", "rank7", "visitor-7", "node99999999999999999999"):
        assert node_key(name, 1) is None
    assert node_key("node7", 0) is None


async def test_the_kernel_tells_of_the_end_of_a_process(tmp_path: Path) -> None:
    child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    ends: asyncio.Queue[NodeKey] = asyncio.Queue()
    deaths = LocalDeaths(ends.put_nowait)
    at = started(child.pid)

    def watch(key: NodeKey, **changes: Any) -> bool:
        given: dict[str, Any] = {
            "boot": boot_id(),
            "space": pid_space(),
            "pid": child.pid,
            "started_ticks": at,
            **changes,
        }
        return deaths.watch(key, **given)

    assert watch(NodeKey(1, 1))
    assert not watch(NodeKey(2, 1), boot="another host")
    assert not watch(NodeKey(3, 1), started_ticks=at + 1), "the number of another process"
    assert not watch(NodeKey(4, 1), pid=os.getpid())
    child.kill()
    async with asyncio.timeout(120):
        assert await ends.get() == NodeKey(1, 1)
        await child.wait()
    assert not watch(NodeKey(5, 1)), "gone, and what has proven it was somebody else"
    deaths.close()
