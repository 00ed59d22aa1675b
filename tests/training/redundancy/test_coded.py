"""The erasure code: any m of k + m shards are rebuilt to the same bits, and no domain has two of a stripe."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.native._kernels import code
from zbmd.training.redundancy.coded.field import (
    flat,
    inverse,
    parity_matrix,
    product,
    rebuilding_matrix,
)
from zbmd.training.redundancy.coded.placement import (
    ALIGNMENT,
    described,
    fitted,
    grouped,
    room_bytes,
    shortage,
)
from zbmd.transport.errors import LocalProtocolError

SIZES = (1, 63, 64, 127, 128, 1000)


def test_products_form_a_field() -> None:
    for a in range(256):
        assert product(a, 1) == a and product(a, 0) == 0
        assert a == 0 or product(a, inverse(a)) == 1
        for b in (2, 3, 0x1D, 0xFF):
            assert product(a, b) == product(b, a)
            assert product(a, b ^ 1) == product(a, b) ^ a
    with pytest.raises(LocalProtocolError):
        inverse(0)


@given(st.integers(1, 8), st.integers(1, 4), st.sampled_from(SIZES), st.integers(0, 2**32 - 1), st.data())
def test_any_lost_shards_are_rebuilt_to_the_same_bits(
    data: int, parity: int, size: int, seed: int, draw: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    shards = [random.integers(256, size=size, dtype=np.uint8) for _ in range(data)]
    parities = [np.empty(size, np.uint8) for _ in range(parity)]
    code(parities, shards, flat(parity_matrix(data, parity)))
    every = shards + parities
    lost = draw.draw(st.lists(st.integers(0, data + parity - 1), unique=True, max_size=parity))
    have = [one for one in range(data + parity) if one not in lost][:data]
    rebuilt = [np.full(size, 0xAA, np.uint8) for _ in lost]
    code(rebuilt, [every[one] for one in have], flat(rebuilding_matrix(data, parity, have, lost)))
    for one, found in zip(lost, rebuilt, strict=True):
        assert (found == every[one]).all()


@pytest.mark.parametrize(("data", "parity"), [(1, 1), (2, 2), (4, 2), (3, 3), (5, 4)])
def test_every_loss_of_a_small_code_can_be_solved(data: int, parity: int) -> None:
    for have in combinations(range(data + parity), data):
        want = [one for one in range(data + parity) if one not in have]
        rebuilding_matrix(data, parity, have, want)
    assert set(parity_matrix(data, 1)[0]) == {1}, "one parity is the XOR"
    with pytest.raises(LocalProtocolError):
        rebuilding_matrix(data, parity, range(data - 1), [0])


def test_the_kernel_refuses_what_does_not_fit() -> None:
    one, two = np.zeros(8, np.uint8), np.zeros(9, np.uint8)
    with pytest.raises(ValueError, match="bytes"):
        code([one], [one, two], b"\1\1")
    with pytest.raises(ValueError, match="matrix"):
        code([one], [one], b"\1\1")
    with pytest.raises(TypeError):
        code([np.zeros(8, np.float32)], [one], b"\1")  # type: ignore[list-item]
    one.flags.writeable = False
    with pytest.raises(TypeError):
        code([one], [two[:8]], b"\1")
    with pytest.raises(ValueError, match="there can be"):
        code([two], [], b"")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=64), st.integers(1, 8), st.integers(1, 4))
def test_placement_keeps_the_shards_of_a_stripe_apart(domains: list[int], data: int, parity: int) -> None:
    groups = grouped(domains, data=data, parity=parity)
    assert sorted(place for group in groups for place in group.members) == list(range(len(domains)))
    for group in groups:
        size = len(group.members)
        assert len({domains[place] for place in group.members}) == size, "one of each domain"
        assert size <= data + parity and group.data <= data and group.parity <= parity
        assert group.parity == min(parity, size - 1)
        had: Counter[tuple[int, int]] = Counter()
        parities: Counter[int] = Counter()
        for number in range(size):
            stripe = group.stripe(number)
            holders = [place for place, _ in stripe.data] + list(stripe.parity)
            assert sorted(holders) == sorted(group.members), "each member has one shard of each stripe"
            had.update(stripe.data)
            parities.update(stripe.parity)
            for place, block in stripe.data:
                assert group.stripe_of(place, block) == number
            for place in stripe.parity:
                assert number in group.parities_of(place)
        assert set(had.values()) <= {1} and len(had) == size * group.data, "each block is in one stripe"
        assert all(parities[place] == group.parity for place in group.members)
        for nbytes in (1, 1000, 4096):
            block = group.block_bytes(nbytes)
            assert block * group.data >= nbytes and block % ALIGNMENT == 0


def test_a_full_group_costs_what_the_code_says() -> None:
    nbytes = 1 << 20
    (group,) = grouped(range(6), data=4, parity=2)
    assert room_bytes([group], nbytes) == nbytes // 2, "1.5 times the state, where a buddy has 2"
    assert [one.members for one in grouped([0, 0, 1, 1, 2, 2], data=2, parity=1)] == [(0, 2, 4), (1, 3, 5)]
    assert room_bytes(grouped([0, 0], data=4, parity=2), nbytes) == 0, "one domain protects nothing"


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=24), st.integers(1, 6), st.integers(1, 3))
def test_a_shortage_of_domains_is_named_exactly_when_ranks_are_unprotected(
    names: list[str], data: int, parity: int
) -> None:
    numbers = [sorted(set(names)).index(name) for name in names]
    groups = grouped(numbers, data=data, parity=parity)
    text = shortage(names, data=data, parity=parity)
    assert bool(text) == any(group.parity < parity for group in groups)
    if text:
        assert text.startswith(f"ec:{data}+{parity} needs {parity + 1} to {data + parity} failure domains")
    else:  # whichever domain is lost with all of its ranks, each group loses one shard of a stripe at most
        assert all(len({numbers[at] for at in one.members}) == len(one.members) for one in groups)
        assert f"in one of {len(set(names))} domains" in described(names, data=data, parity=parity)


@given(st.permutations("aabbcc"), st.integers(1024, 1 << 20))
def test_memory_for_the_smallest_groups_is_enough_for_all_domains(names: list[str], nbytes: int) -> None:
    groups = grouped([sorted(set(names)).index(name) for name in names], data=4, parity=2)
    assert {group.parity for group in groups} == {2}, "three racks of two hosts survive the loss of two racks"
    room = 2 * -(-nbytes // ALIGNMENT) * ALIGNMENT
    assert fitted(groups, nbytes=nbytes, room=room) == groups
    by_hosts = room_bytes(grouped(range(6), data=4, parity=2), nbytes)
    assert {group.parity for group in fitted(groups, nbytes=nbytes, room=by_hosts)} != {2}, "the trap"


def test_a_shortage_has_its_numbers() -> None:
    assert shortage(["r0"] * 3 + ["r1"] * 3, data=4, parity=2) == (
        "ec:4+2 needs 3 to 6 failure domains, there are 2: r0 (3), r1 (3)"
    )
    assert shortage(["r0"] * 4 + ["r1", "r2"], data=4, parity=2) == (
        "ec:4+2 needs 3 to 6 failure domains of at most 2 of these 6 ranks each, got r0 (4), r1 (1), r2 (1)"
    )
