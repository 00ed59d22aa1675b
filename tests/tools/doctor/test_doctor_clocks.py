"""`zbmd-node doctor --peer`: the clock of a real node beside a clock that is wrong by hours."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from support.cluster.thread_nodes import COOKIE, node

from zbmd.actors.cluster.node.incarnation import wall_ns
from zbmd.tools.doctor.peers import compare_clocks
from zbmd.tools.doctor.report import FindingState, Section
from zbmd.transport.handshake.cookie import store_cookie
from zbmd.transport.tcp.address import TcpAddress, parse_address

DAY_NS = 86_400_000_000_000
COOKIE_HERE = COOKIE.replace(b" ", b"-")


def slow() -> int:
    return time.time_ns() - 2 * DAY_NS


async def test_the_clocks_of_a_node_and_this_host_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    async with node(tmp_path, "n1", cookie=COOKIE_HERE) as (one, told):
        await told.acts_on(1)
        address = parse_address(one.me.address)
        without = await compare_clocks(address, "here")
        assert without.state is FindingState.NOTE and "no cookie here" in without.detail
        assert not (tmp_path / "cookie").exists(), "it only looks"
        store_cookie(COOKIE_HERE)
        same = await compare_clocks(address, "here")
        assert same.state is FindingState.OK and same.section is Section.LINKS, same
        assert same.detail.startswith(f"the clock of n1 ({address}) agrees with ours to ")
        apart = await compare_clocks(address, "here", clock_ns=slow)
        assert apart.state is FindingState.NOTE and "ahead of that of here" in apart.detail, apart
        assert f"n1 ({address})" in apart.detail and "timedatectl" in apart.advice


async def test_who_is_no_node_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    store_cookie(COOKIE_HERE)
    with socket.create_server(("127.0.0.1", 0)) as listens:
        address = TcpAddress(host="127.0.0.1", port=listens.getsockname()[1])
        found = await compare_clocks(address, "here", clock_ns=wall_ns, timeout_s=0.2)
    assert found.state is FindingState.NOTE and "does not answer as a node" in found.detail, found
