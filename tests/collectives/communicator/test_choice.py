"""The choice of an algorithm: by override, by the model, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, Operation, Request
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.cost_model import FORMULAS, MANY_HOSTS, ONE_HOST, Model
from zbmd.collectives.communicator.planning import (
    BY_SLOTS,
    SLOT_RANKS_MAX,
    VARIABLE,
    Call,
    Choice,
    GroupTraits,
    choose,
    plan_call,
)
from zbmd.collectives.errors import Desynchronised
from zbmd.collectives.execution.plan import CHUNK_BYTES
from zbmd.collectives.native._stepper import PUB_BYTES_MAX
from zbmd.collectives.programs.reductions import dtype_code
from zbmd.transport.errors import UserError

RunRanks = Callable[..., list[Any]]
ONLY = (Operation.BARRIER, Operation.ALL_REDUCE_SHARDS)


def chosen(
    operation: Operation,
    nbytes: int,
    *,
    n: int = 4,
    hosts: int = 1,
    model: Model = ONE_HOST,
    override: str = "",
) -> Choice:
    return choose(
        operation, n=n, nbytes=nbytes, published_bytes=nbytes, hosts=hosts, model=model, override=override
    )


def test_every_algorithm_has_a_formula() -> None:
    assert {kind for kind in ALGORITHMS if kind[0] not in ONLY} == set(FORMULAS)


@example(Operation.REDUCE, 1 << 25, 2, 1.0, 1e-3, False)
@given(
    operation=st.sampled_from(Operation),
    nbytes=st.integers(0, 1 << 32),
    n=st.integers(1, 64),
    alpha=st.floats(1, 1e6),
    beta=st.floats(1e-3, 10),
    several=st.booleans(),
)
def test_what_is_chosen_exists_and_is_the_cheapest(
    operation: Operation, nbytes: int, n: int, alpha: float, beta: float, several: bool
) -> None:
    hosts = max(1, n // 2) if several else 1
    model = Model(alpha_ns=alpha, beta_ns_per_byte=beta, cores=2)
    choice = chosen(operation, nbytes, n=n, hosts=hosts, model=model)
    assert (operation, choice.algorithm) in ALGORITHMS and choice.reason
    if operation in BY_SLOTS and 2 <= n <= SLOT_RANKS_MAX and hosts == 1 and nbytes > PUB_BYTES_MAX:
        pair = operation is Operation.ALL_REDUCE and n == 2
        assert choice.algorithm == ("swap" if pair else BY_SLOTS[operation]) and choice.in_arena == "direct"
    elif operation is Operation.REDUCE and n == 2 and hosts == 1 and nbytes >= n * CHUNK_BYTES:
        assert choice.algorithm == "shared"  # each of the two has one of the model's cores
    elif operation not in ONLY and nbytes > PUB_BYTES_MAX:
        assert choice.algorithm == min(choice.predicted_ns, key=lambda item: item[1])[0] != "eager"
    assert all(cost >= 0 for _, cost in choice.predicted_ns)
    if hosts == 1:
        assert not choice.algorithm.startswith("hierarchical")


def test_an_untuned_group_of_one_host_reads_in_place() -> None:
    for operation in Operation:
        for nbytes in (1 << 12, 1 << 20, 1 << 28):
            if operation not in ONLY:
                assert "direct" in {(found := chosen(operation, nbytes)).algorithm, found.in_arena}


def test_over_hosts_bytes_cross_as_seldom_as_they_can() -> None:
    for nbytes in (1 << 20, 1 << 26):
        assert (
            chosen(Operation.ALL_REDUCE, nbytes, n=16, hosts=4, model=MANY_HOSTS).algorithm == "hierarchical"
        )
        assert chosen(Operation.BROADCAST, nbytes, n=16, hosts=16, model=MANY_HOSTS).algorithm == "tree"


@pytest.mark.parametrize("nbytes", [1 << 16, 1 << 21, 1 << 24, 1 << 28])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_of_several_hosts_swap_nothing(n: int, nbytes: int) -> None:
    choice = choose(
        Operation.ALL_REDUCE,
        n=n,
        nbytes=nbytes,
        published_bytes=nbytes,
        hosts=n,
        model=MANY_HOSTS,
        override="",
        far=True,
    )
    assert "swap" not in {choice.algorithm, *dict(choice.predicted_ns)}
    if n == 2:
        assert choice.algorithm == "direct"


def test_an_override_goes_before_the_model() -> None:
    assert chosen(Operation.ALL_REDUCE, 1 << 20, override="ring").algorithm == "ring"
    assert chosen(Operation.BARRIER, 0, override="ring").algorithm == "dissemination"
    override = "all_reduce=double_tree, broadcast=tree"
    assert chosen(Operation.ALL_REDUCE, 4, override=override).algorithm == "double_tree"
    assert chosen(Operation.BROADCAST, 4, override=override).algorithm == "tree"
    assert chosen(Operation.REDUCE, 4, override=override).algorithm == "eager"
    assert override in chosen(Operation.BROADCAST, 4, override=override).reason
    assert chosen(Operation.ALL_REDUCE, 1 << 20, override="eager").algorithm == "shared"


@pytest.mark.parametrize("override", ["magic", "all_reduce=magic", "dance=ring", "broadcast=ring"])
def test_an_override_that_names_nothing_is_refused(override: str) -> None:
    with pytest.raises(UserError, match=VARIABLE):
        chosen(Operation.ALL_REDUCE, 4, override=override)


def test_all_ranks_pin_the_first_members_numbers(run_ranks: RunRanks) -> None:
    def body(p: Any) -> list[Any]:
        c: Communicator = p.communicator()
        first = c.tune(deadline_ns=p.soon())
        began = c.sequence
        again = p.communicator(channel=1).tune(deadline_ns=p.soon())
        assert again == first, "it measured again"
        assert first.alpha_ns > 0 and first.beta_ns_per_byte > 0 and first.gamma_ns_per_byte > 0
        return [first.alpha_ns, first.beta_ns_per_byte, first.gamma_ns_per_byte, first.cores, began]

    found = run_ranks(3, body)
    assert found[0] == found[1] == found[2]


def test_the_environment_decides_and_a_difference_is_told(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "all_reduce=ring")

    def body(p: Any) -> list[str]:
        c: Communicator = p.communicator()
        c.all_reduce(np.ones(5_000), deadline_ns=p.soon())
        c.all_reduce(np.ones(5_000), algorithm="tree")
        if p.rank:
            monkeypatch.setenv(VARIABLE, "all_reduce=direct")
        other = p.communicator(channel=1)
        with pytest.raises(Desynchronised):
            other.all_reduce(np.ones(5_000), deadline_ns=p.soon())
        return [record.algorithm for record in c.flight]

    assert run_ranks(2, body) == [["ring", "tree"]] * 2


def test_hosts_are_one_a_member(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c: Communicator = p.communicator(hosts=(0, 0, 1, 1))
        assert c.model == MANY_HOSTS
        x = np.full(100_003, p.rank + 1.0)
        c.all_reduce(x, deadline_ns=p.soon())
        assert (x == 10).all()
        return c.flight[-1].algorithm

    assert set(run_ranks(4, body)) <= {"hierarchical", "hierarchical_tree", "direct"}


@pytest.mark.parametrize(
    ("operation", "algorithm", "hosts", "chunks"),
    [
        (Operation.ALL_REDUCE, "hierarchical", (0, 0, 1, 1), 16 << 20 >> 18),
        (Operation.BROADCAST, "tree", (0, 1, 2, 3), 16 << 20 >> 18),
        (Operation.ALL_REDUCE, "direct", (0, 0, 1, 1), 16 << 20 >> 19),
        (Operation.ALL_REDUCE, "ring", (0, 0, 1, 1), 4 << 20 >> 17),
    ],
)
def test_chunks_are_longer_between_hosts_where_no_bits_depend_on_them(
    operation: Operation, algorithm: str, hosts: tuple[int, ...], chunks: int
) -> None:
    request = Request(operation=operation, algorithm=algorithm, n=4, hosts=hosts)
    call = Call(request=request, count=16 << 20 >> 2, dtype=dtype_code(np.dtype(np.float32)))
    assert plan_call(call, GroupTraits(place=0, far=True)).request.chunks == chunks
