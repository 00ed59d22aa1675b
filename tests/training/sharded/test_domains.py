"""Failure domains that users name: what a run decides by them before its ranks have met."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.cluster.state.job_table import JobSpec
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import with_domains
from zbmd.actors.rank.environment import RankEnvironment, domains_in, domains_text
from zbmd.actors.view import RANKS_MAX, Member, View
from zbmd.training.job.mesh import Mesh
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.redundancy import Redundancy, code_of, redundancy_of, unused_bytes
from zbmd.transport.errors import UserError

MESH = Mesh.parse("pp=6", 6)
NBYTES = 6400


def launched(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    """Make this process a rank of a job of six hosts; nodes of these domains were here when it was given."""
    nodes = [Node(NodeKey(at, 1), f"h{at}:1", f"h{at}", name) for at, name in enumerate(names)]
    environment = RankEnvironment(
        rank=0, world_size=6, local_world_size=1, incarnation=1, job=7, node_address="n"
    )
    given = with_domains(JobSpec(job=7, target="job.py"), nodes).environment
    for name, value in {**environment.variables(), **dict(given)}.items():
        monkeypatch.setenv(name, value)


def chosen(redundancy: str) -> Redundancy:
    return redundancy_of(
        TrainOptions(mesh="pp=6", out=Path("out"), redundancy=redundancy), MESH, shrinks=False
    )


def test_hosts_are_the_domains_that_nobody_has_named(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, ("",) * 6)
    found = chosen("auto")
    assert str(found).startswith("ec:4+2: 6 hosts hold different states")
    code = code_of(found, MESH, NBYTES)
    assert code is not None and code.room == 2 * NBYTES // 4 and unused_bytes(code, MESH) == 0


def test_three_racks_of_two_hosts_keep_both_parities(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, ("r0", "r0", "r1", "r1", "r2", "r2"))
    code = code_of(chosen("ec:4+2"), MESH, NBYTES)
    assert code is not None
    assert [(one.data, one.parity) for one in code.groups((0, 0, 1, 1, 2, 2))] == [(1, 2), (1, 2)]
    assert chosen("auto").kind == "buddy", "a code of so few domains has no advantage over a copy"


def test_too_few_racks_are_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, ("r0", "r0", "r0", "r1", "r1", "r1"))
    with pytest.raises(
        UserError, match=r"ec:4\+2 needs 3 to 6 failure domains, there are 2: r0 \(3\), r1 \(3\)"
    ):
        chosen("ec:4+2")


def test_six_racks_cost_what_six_hosts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, ("r0", "r1", "r2", "r3", "r4", "r5"))
    found = chosen("auto")
    assert str(found).startswith("ec:4+2: 6 failure domains hold different states")
    code = code_of(found, MESH, NBYTES)
    assert code is not None and 2 * code.room - unused_bytes(code, MESH) == 2 * NBYTES // 4 * 2


def test_domains_of_nodes_that_are_not_here_yet_are_left_to_the_first_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched(monkeypatch, ("r0", "r1"))
    code = code_of(chosen("ec:4+2"), MESH, NBYTES)
    assert code is not None and code.room == 2 * NBYTES, "whichever domains come, there is room"
    assert chosen("auto").kind == "buddy"


@given(st.lists(st.sampled_from(("", "a", "rack-7", "x_.@-1")), max_size=20))
def test_domains_survive_their_way_through_the_environment(names: list[str]) -> None:
    found = domains_in(domains_text(names))
    alone = [f"alone {number}" for number in range(names.count(""))]
    assert sorted(found) == sorted([*filter(None, names), *alone])


@pytest.mark.parametrize("text", ["a", "a=", "a=0", "a=-1", "a=1,b", f"a={RANKS_MAX + 1}"])
def test_text_that_names_no_domains_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="ZBMD_DOMAINS: expected NAME=NODES"):
        domains_in(text)


def test_a_view_has_the_domains_of_its_members() -> None:
    named = {0: "r0", 1: "", 2: "r0", 3: "", 4: "host 1"}
    hosts = {0: "a", 1: "b", 2: "c", 3: "b", 4: "d"}
    members = tuple(
        Member(rank=rank, incarnation=1, address="", host=hosts[rank], domain=name)
        for rank, name in named.items()
    )
    view = View(epoch=1, members=members)
    assert view.domain_names((0, 1, 2, 3)) == ("r0", "host 1", "r0", "host 1")
    assert view.domains((1, 0, 2, 3)) == (0, 1, 1, 0)
