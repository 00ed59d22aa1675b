"""Tables that go to a pipe are as wide as they need."""

from __future__ import annotations

import pytest

from zbmd.actors.cluster.node.contracts import MemberInfo, MembersReply
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.tools.cli.console import screen_for_tables
from zbmd.tools.node import cluster as node_members


def test_no_name_or_address_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    node = Node(NodeKey(7, 123456789), "[2001:db8:1234:5678:9abc:def0:1234:5678]:29400", "n" * 64)
    member = MemberInfo(
        node=node,
        state="not observed",
        heard_ms=100_000,
        limit_ms=400_000,
        links_dialed=4,
        links_accepted=4,
        skew_ms=-86_400_000,
        release="0.1.0",
        proven_by_kernel=False,
        why="",
    )
    reply = MembersReply(
        answered_by=node,
        state="member",
        known=3,
        entered=3,
        recovery_budget_ns=10**9,
        heartbeat_ns=50 * 10**6,
        members=(member,),
        quorum="",
        story=(),
        dropped=0,
    )
    node_members.show(reply, screen_for_tables())
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "not observed" in line]
    assert all(text in row for text in (node.name, node.address, "123456789", "4 out 4 in", "behind"))
