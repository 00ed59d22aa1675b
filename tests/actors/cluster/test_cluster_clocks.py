"""Nodes whose hosts' wall clocks differ: they form a cluster nevertheless, and a warning is printed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import structlog
from support.cluster.thread_nodes import node

from zbmd.actors.cluster.node.incarnation import (
    CLOCK_WARNINGS_MAX,
    CLOCKS_APART_NS_MAX,
    ClockWatch,
    clocks_apart,
)
from zbmd.actors.cluster.state.node_id import Node, NodeKey

HOUR_NS = 3_600_000_000_000
HERE = Node(NodeKey(1, 1), "10.0.0.1:29400", "n1")


@pytest.mark.parametrize(
    ("ahead_ns", "words"), [(3 * HOUR_NS, "3h ahead of"), (-CLOCKS_APART_NS_MAX - 1, "2min behind")]
)
def test_both_hosts_and_the_difference_are_told(ahead_ns: int, words: str) -> None:
    text = clocks_apart("n2 (10.0.0.2:29400)", "n1 (10.0.0.1:29400)", ahead_ns)
    assert text is not None
    assert f"the clock of n2 (10.0.0.2:29400) is {words} that of n1 (10.0.0.1:29400). Set" in text
    assert "timedatectl" in text and "take no harm" in text


@pytest.mark.parametrize("ahead_ns", [0, CLOCKS_APART_NS_MAX, -CLOCKS_APART_NS_MAX])
def test_a_difference_within_the_bound_is_not_told(ahead_ns: int) -> None:
    assert clocks_apart("n2", "n1", ahead_ns) is None


def test_each_node_is_told_of_once_and_so_many_at_most() -> None:
    watch = ClockWatch()
    nodes = [Node(NodeKey(i, life), "", f"n{i}") for i in range(2, CLOCK_WARNINGS_MAX + 9) for life in (1, 2)]
    told = [watch.heard(HERE, each, HOUR_NS) for each in nodes]
    assert sum(text is not None for text in told) == CLOCK_WARNINGS_MAX
    assert told[0] is not None and told[1] is None, "its next life has the same clock"
    assert ClockWatch().heard(HERE, nodes[0], 0) is None


async def test_nodes_whose_clocks_are_hours_apart_say_so_once_and_form_a_cluster(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with node(tmp_path, "n1") as (one, told_one):
            await told_one.acts_on(1)

            def ahead() -> int:
                return time.time_ns() + 5 * HOUR_NS

            async with node(tmp_path, "n2", one.me.address, wall_clock=ahead) as (two, told_two):
                await told_two.acts_on(2)
                await told_one.acts_on(2)
                names = [f"{each.me.name} ({each.me.address})" for each in (one, two)]
    warned = [line["event"] for line in lines if line["log_level"] == "warning"]
    said = [event for event in warned if "the clock of" in event]  # a stripe may be refused as its node ends
    # A clock is read when it is sent, so the difference that is heard is a little less, or a little more.
    assert len(said) == 2 and all("timedatectl" in text for text in said), said
    behind, forward = sorted(said, key=lambda text: "ahead of" in text)
    assert behind.startswith(f"the clock of {names[0]} is ") and f"behind that of {names[1]}." in behind
    assert forward.startswith(f"the clock of {names[1]} is ") and f"ahead of that of {names[0]}." in forward
