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
from zbmd.training.sharded.redundancy import (
    Redundancy,
    code_of,
    confined,
    has_replicas,
    redundancy_of,
    unused_bytes,
)
from zbmd.transport.errors import UserError

MESH = Mesh.parse("pp=6", 6)
NBYTES = 6400


def launched(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], *, ranks_min: int = 0) -> None:
    """Make this process a rank of a job of six hosts; nodes of these domains were here when it was given.

    ranks_min: so few may be left.
    """
    nodes = [Node(NodeKey(at, 1), f"h{at}:1", f"h{at}", name) for at, name in enumerate(names)]
    environment = RankEnvironment(
        rank=0,
        world_size=6,
        local_world_size=1,
        incarnation=1,
        job=7,
        node_address="n",
        ranks_min=ranks_min,
    )
    given = with_domains(JobSpec(job=7, target="job.py"), nodes).environment
    for name, value in {**environment.variables(), **dict(given)}.items():
        monkeypatch.setenv(name, value)


def chosen(redundancy: str, mesh: Mesh = MESH) -> Redundancy:
    return redundancy_of(
        TrainOptions(mesh=str(mesh), out=Path("out"), redundancy=redundancy), mesh, shrinks=False
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
    alone = iter(range(len(names)))
    assert domains_in(domains_text(names)) == tuple(name or f"alone {next(alone)}" for name in names)


DP2, DP3 = Mesh.parse("dp=2,pp=3", 6), Mesh.parse("dp=3,pp=2", 6)


@pytest.mark.parametrize(
    ("mesh", "racks", "why"),
    [
        (DP2, "aaabbb", ""),
        (DP3, "aabbcc", ""),
        (DP3, "aaaabb", ""),
        (DP2, "abcabc", "a holds the state of rank 0, 3 and all of its copies"),
        (DP3, "ababab", "a holds the state of rank 0, 2, 4 and all of its copies"),
        (DP2, "aaaaaa", ""),
        (DP3, "ab", "nodes that come later may be in any failure domain"),
        (DP3, "abcde", ""),
        (DP2, "", ""),
    ],
)
def test_replicas_of_one_failure_domain_have_a_copy_in_another(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh, racks: str, why: str
) -> None:
    launched(monkeypatch, tuple(racks))
    found = chosen("auto", mesh)
    assert (found.kind, has_replicas(mesh, "auto")) == (("buddy", False) if why else ("replica", True))
    assert found.why.startswith(f"{why}: a rank in another one has one more") or not why
    assert chosen("replica", mesh).kind == "replica" and has_replicas(mesh, "replica"), "it was asked for"


def test_views_that_may_be_smaller_keep_to_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, tuple("abcabc"), ranks_min=3)
    found = chosen("auto", DP2)
    assert found.kind == "replica" and "the loss of one may end the run at its last checkpoint" in found.why
    assert chosen("buddy", DP2).kind == "buddy" and not has_replicas(DP2, "buddy"), "it was asked for"
    launched(monkeypatch, tuple("aaabbb"), ranks_min=3)
    with pytest.raises(UserError, match="hold the same already"):
        chosen("buddy", DP2)


@given(st.data())
def test_what_is_not_confined_survives_each_domain(data: st.DataObject) -> None:
    dp, pp = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    names = data.draw(st.lists(st.sampled_from("abc"), min_size=dp * pp, max_size=dp * pp))
    states = Mesh.parse(f"dp={dp},pp={pp}", dp * pp).with_one_state()
    lost = [
        name for name in set(names) if any(all(names[rank] == name for rank in ranks) for ranks in states)
    ]
    found = confined(states, names)
    if len(set(names)) < 2:
        assert found is None
    elif found is None:
        assert not lost
    else:
        assert found[0] in lost and {names[rank] for rank in found[1]} == {found[0]}


@given(dp=st.integers(2, 4), pp=st.integers(1, 4), data=st.data())
def test_hosts_numbered_domain_by_domain_keep_replicas_apart(dp: int, pp: int, data: st.DataObject) -> None:
    """If no domain has more hosts than a replica of the model."""
    sizes, left = list[int](), dp * pp
    while left:
        sizes.append(data.draw(st.integers(1, min(pp, left))))
        left -= sizes[-1]
    names = [str(number) for number, size in enumerate(sizes) for _ in range(size)]
    assert confined(Mesh.parse(f"dp={dp},pp={pp}", dp * pp).with_one_state(), names) is None


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
