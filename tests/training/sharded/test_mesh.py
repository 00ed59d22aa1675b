"""Meshes of ranks: coordinates, groups, and sizes that do not fit the world."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.checkpoint.sharded import shared_out
from zbmd.training.job.mesh import Mesh
from zbmd.transport.errors import UserError

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
NAMES = ("dp", "pp", "tp", "ep")


def mesh_of(sizes: list[int]) -> Mesh:
    return Mesh(NAMES[: len(sizes)], tuple(sizes))


@given(sizes=SIZES)
def test_ranks_and_coordinates_are_each_others_inverse(sizes: list[int]) -> None:
    mesh = mesh_of(sizes)
    for rank in range(mesh.world_size):
        assert mesh.rank(mesh.coordinates(rank)) == rank
    assert Mesh.parse(str(mesh), mesh.world_size) == mesh


@given(sizes=SIZES, draw=st.data())
def test_groups_cut_the_world_along_their_axes(sizes: list[int], draw: st.DataObject) -> None:
    mesh = mesh_of(sizes)
    along = draw.draw(st.lists(st.sampled_from(mesh.axes), unique=True))
    groups = mesh.groups(*along)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        assert list(group) == sorted(group)
        places = [mesh.coordinates(rank) for rank in group]
        assert all(
            place[axis] == places[0][axis] for place in places for axis in mesh.axes if axis not in along
        )
        assert all(mesh.group_of(rank, *along) == group for rank in group)


@given(axes=st.permutations(["dp", "fsdp", "pp", "tp"]), sizes=st.tuples(*[st.integers(1, 3)] * 4))
def test_who_shares_a_state_lies_together_among_those_that_divide_the_data(
    axes: list[str], sizes: tuple[int, int, int, int]
) -> None:
    mesh = Mesh(tuple(axes), sizes)
    assert mesh.data_ranks == mesh.size("dp") * mesh.size("fsdp") and mesh.sharded_axis == "fsdp"
    for group in mesh.groups("dp", "fsdp"):
        assert sorted(map(mesh.data_place, group)) == list(range(mesh.data_ranks))
    keys = mesh.state_keys()
    for group in mesh.groups("fsdp"):
        places = sorted(map(mesh.data_place, group))
        assert places == list(range(places[0], places[0] + len(group))) and places[0] % len(group) == 0
        assert len({keys[rank] for rank in group}) == len(group)


@pytest.mark.parametrize(
    ("text", "called", "axis", "alike"),
    [
        ("fsdp=2,tp=2", "dp=2,tp=2", "dp", False),
        ("dp=2,tp=2", "dp=2,tp=2", "dp", False),
        ("dp=2,fsdp=2", "dp=2,fsdp=2", "fsdp", True),
        ("dp=1,fsdp=4", "dp=1,fsdp=4", "fsdp", True),
    ],
)
def test_without_dp_fsdp_is_what_dp_is_to_a_sharded_state(
    text: str, called: str, axis: str, alike: bool
) -> None:
    mesh = Mesh.parse(text, 4).with_data_axis()
    assert (str(mesh), mesh.sharded_axis, mesh.has_shards_alike) == (called, axis, alike)


def test_three_axes_lie_as_usual() -> None:
    mesh = Mesh.of(8, {"dp": 2, "pp": -1, "tp": 2})
    assert str(mesh) == "dp=2,pp=2,tp=2"
    assert mesh.coordinates(5) == {"dp": 1, "pp": 0, "tp": 1}
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.group_of(6, "dp") == (2, 6)
    assert mesh.group_of(6, "dp", "tp") == (2, 3, 6, 7)
    assert (mesh.size("pp"), mesh.size("ep")) == (2, 1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Mesh.of(6, {"dp": 2, "tp": 2}), "has 4 ranks, and there are 6: start 4"),
        (
            lambda: Mesh.of(6, {"dp": -1, "tp": 4}),
            "does not divide 6 ranks: start a multiple of 4 of them, such as 8",
        ),
        (lambda: Mesh.of(6, {"dp": -1, "tp": -1}), "dp and tp are both -1"),
        (lambda: Mesh.of(6, {"dp": 0}), "dp has size 0"),
        (lambda: Mesh.of(1, {}), "1 to 8 axes"),
        (lambda: Mesh.parse("dp=2;tp=3", 6), "is not an axis"),
        (lambda: Mesh.parse("dp=2,dp=3", 6), "comes twice"),
        (lambda: Mesh.parse("", 1), "write it as dp=2,pp=2,tp=2"),
        (lambda: mesh_of([2, 2]).coordinates(4), "rank 4 is not in the mesh"),
        (lambda: mesh_of([2, 2]).rank({"dp": 0}), "give a coordinate on each"),
        (lambda: mesh_of([2, 2]).rank({"dp": 0, "pp": 2}), "coordinate 2 is not on axis pp"),
        (lambda: mesh_of([2, 2]).groups("tp"), "no axis tp"),
    ],
)
def test_what_does_not_fit_is_told(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


@given(sizes=st.lists(st.integers(0, 50), max_size=12), ranks=st.integers(1, 5))
def test_replicas_write_each_piece_once_and_share_out_the_work(sizes: list[int], ranks: int) -> None:
    found = shared_out(sizes, ranks)
    assert sorted(at for one in found for at in one) == list(range(len(sizes)))
    most = max(sum(sizes[at] for at in one) for one in found)
    assert most <= sum(sizes) / ranks + max(sizes, default=0)


@given(sizes=SIZES)
def test_ranks_that_differ_only_along_dp_have_one_state_key(sizes: list[int]) -> None:
    mesh = mesh_of(sizes)
    keys = mesh.state_keys()
    assert len(set(keys)) * mesh.size("dp") == mesh.world_size
    for group in mesh.groups("dp"):
        assert len({keys[rank] for rank in group}) == 1


@pytest.mark.parametrize(
    ("text", "ranks_per_host", "replicated"),
    [
        ("dp=2,pp=2", 4, True),  # one host: they outlive a rank, and nothing here outlives the host
        ("dp=2,pp=2", 2, True),  # each state is on both hosts
        ("dp=2,pp=2", 3, False),  # ranks 0 and 2, with one state, share a host
        ("pp=2,dp=2", 2, False),
        ("pp=2,tp=2", 4, False),
        ("dp=4", 1, True),
        ("dp=2,fsdp=2", 2, True),  # each shard is on both hosts
        ("fsdp=2,dp=2", 2, False),
        ("dp=1,fsdp=4", 4, False),
    ],
)
def test_replicas_stand_for_each_other_where_a_host_may_be_lost(
    text: str, ranks_per_host: int, replicated: bool
) -> None:
    assert Mesh.parse(text, 4).has_replicas(ranks_per_host) is replicated
