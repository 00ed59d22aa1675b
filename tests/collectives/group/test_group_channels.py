"""Channels of sub-groups: what members choose, each for itself, from what all of them offer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.collectives.programs.channels import (
    FAR_SUBGROUPS_MAX,
    STAMP_MAX,
    SUBGROUP_CHANNEL_FIRST,
    SUBGROUPS_MAX,
    Agreed,
    Channels,
    agree,
    title,
)
from zbmd.transport.errors import LocalProtocolError

RANKS = 5
Step = tuple[str, list[int], int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["make", "close"]),
        st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=RANKS, unique=True),
        st.integers(0, 100),
    ),
    max_size=120,
)


@given(steps, st.lists(st.booleans(), min_size=RANKS, max_size=RANKS))
def test_no_channel_is_in_two_groups_of_a_process_and_its_stamps_only_grow(
    history: list[Step], hosts: list[bool]
) -> None:
    processes = [Channels() for _ in range(RANKS)]
    alive: list[tuple[list[int], Agreed]] = []
    stamps: dict[tuple[int, int, int], int] = {}
    for what, members, number in history:
        if what == "close" and alive:
            gone, agreed = alive.pop(number % len(alive))
            for rank in gone:
                processes[rank].give_back(agreed.channel, lambda: True)
        elif what == "make":
            near = len({hosts[rank] for rank in members}) == 1
            agreed = agree([processes[rank].offer() for rank in members], one_host=near)
            assert agreed == agree([processes[rank].offer() for rank in reversed(members)], one_host=near)
            assert near or agreed.channel < SUBGROUP_CHANNEL_FIRST + FAR_SUBGROUPS_MAX
            for rank in members:
                processes[rank].take(agreed)
            for a in members:  # the cell of each pair of processes only grows
                for b in members:
                    assert stamps.get((a, b, agreed.channel), 0) < agreed.stamp
                    stamps[a, b, agreed.channel] = agreed.stamp
            alive.append((members, agreed))
        for rank in range(RANKS):
            used = [agreed.channel for group, agreed in alive if rank in group]
            assert len(used) == len(set(used))
        if len(alive) == FAR_SUBGROUPS_MAX:
            return


def test_a_process_that_has_no_channel_left_is_told_so() -> None:
    full, fresh = Channels(), Channels()
    for _ in range(SUBGROUPS_MAX):
        full.take(agree([full.offer()], one_host=True))
    for one_host in (True, False):
        with pytest.raises(LocalProtocolError, match="close one"):
            agree([full.offer(), fresh.offer()], one_host=one_host)
    full.give_back(SUBGROUP_CHANNEL_FIRST + 3, lambda: True)
    for one_host in (True, False):
        found = agree([full.offer(), fresh.offer()], one_host=one_host)
        assert found == Agreed(channel=SUBGROUP_CHANNEL_FIRST + 3, stamp=2)


def test_groups_of_one_host_leave_channels_to_those_over_several() -> None:
    channels = Channels()
    for _ in range(SUBGROUPS_MAX - FAR_SUBGROUPS_MAX):
        channels.take(agree([channels.offer()], one_host=True))
    for number in range(FAR_SUBGROUPS_MAX):
        agreed = agree([channels.offer()], one_host=False)
        assert agreed.channel == SUBGROUP_CHANNEL_FIRST + number
        channels.take(agreed)
    channels.give_back(SUBGROUP_CHANNEL_FIRST + FAR_SUBGROUPS_MAX, lambda: True)
    with pytest.raises(LocalProtocolError, match="over several hosts"):
        agree([channels.offer()], one_host=False)
    assert agree([channels.offer()], one_host=True).stamp == 2


def test_a_channel_is_taken_once_and_with_a_higher_stamp() -> None:
    channels = Channels()
    agreed = agree([channels.offer()], one_host=False)
    channels.take(agreed)
    with pytest.raises(LocalProtocolError, match="in use"):
        channels.take(agreed)
    channels.give_back(agreed.channel, lambda: True)
    with pytest.raises(LocalProtocolError, match="been used"):
        channels.take(agreed)


def test_a_channel_is_free_again_once_all_have_left_it() -> None:
    channels, here = Channels(), {"others": True}
    agreed = agree([channels.offer()], one_host=False)
    channels.take(agreed)
    channels.give_back(agreed.channel, lambda: not here["others"])
    assert agree([channels.offer()], one_host=False).channel == agreed.channel + 1
    here["others"] = False
    assert agree([channels.offer()], one_host=False) == Agreed(channel=agreed.channel, stamp=2)


def test_a_channel_whose_stamps_are_used_up_is_left_out() -> None:
    channels = Channels()
    channels.take(Agreed(channel=SUBGROUP_CHANNEL_FIRST, stamp=STAMP_MAX))
    channels.give_back(SUBGROUP_CHANNEL_FIRST, lambda: True)
    assert agree([channels.offer(), Channels().offer()], one_host=False).channel == SUBGROUP_CHANNEL_FIRST + 1


def test_a_group_is_called_by_its_epoch_or_by_its_channel() -> None:
    assert title(0, 3) == "epoch 3"
    assert title(SUBGROUP_CHANNEL_FIRST, 3) == f"sub-group {SUBGROUP_CHANNEL_FIRST}.3"
