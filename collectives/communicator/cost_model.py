"""Predict the time of an operation by each algorithm: the α-β-γ model.

(Hockney, Parallel Computing 20(3), 1994, with γ for reductions as in Thakur, Rabenseifner and Gropp, IJHPCA
19(1), 2005.) α is the time from a notification to the end of the wait for it, β that of a byte moved, γ that
of a byte reduced. A group has one such link: its slowest, so that between hosts counts wherever there is more
than one. Ranks that share a core take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.execution.plan import CHUNK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A group's link, and the cores that its ranks share on a host. Times in ns, and ns a byte."""

    alpha_ns: float = 1_000.0
    beta_ns_per_byte: float = 0.1
    gamma_ns_per_byte: float = 0.15
    cores: int = 1

    def __str__(self) -> str:
        return (
            f"α {self.alpha_ns / 1e3:.2f} us, β {self.beta_ns_per_byte:.3f} ns a byte, "
            f"γ {self.gamma_ns_per_byte:.3f} ns a byte, {self.cores} cores"
        )


ONE_HOST = Model()
"""Of a group that has measured nothing, on one host."""
MANY_HOSTS = Model(alpha_ns=20_000.0, beta_ns_per_byte=0.8, gamma_ns_per_byte=0.15)
"""Of a group that has measured nothing, on several hosts: about 10 Gb/s."""
ASKING_NS: float = 150_000.0
"""What it takes beyond the messages to ask another host for bytes and be answered: Python on both of them, as
α, the time of a message that goes past the bulk machine, has little of. On two hosts of one machine."""


def is_far(hosts: Iterable[int]) -> bool:
    """Whether these, of each member one, are several."""
    return len(set(hosts)) > 1


Formula: TypeAlias = "Callable[[Case], float]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The case to predict: `nbytes` of one rank's largest array, over `n` ranks on `hosts` hosts."""

    n: int
    nbytes: int
    hosts: int
    model: Model

    @property
    def crowding(self) -> float:
        """The ranks of a host that share a core."""
        return max(1.0, math.ceil(self.n / self.hosts) / self.model.cores)

    @property
    def levels(self) -> int:
        """ceil(log2 n)."""
        return (self.n - 1).bit_length()

    def time_ns(self, *, steps: float, moved: float, reduced: float = 0.0) -> float:
        """Return the time of `steps` notifications in sequence, and shares of `nbytes` moved and reduced.

        Between hosts a rank asks for the data of each notification after the first, and is answered.
        """
        model, asking_ns = self.model, 0.0
        if self.hosts > 1:
            asking_ns = ASKING_NS * (steps - 1)
            steps = 1 + 3 * (steps - 1)
        work = moved * model.beta_ns_per_byte + reduced * model.gamma_ns_per_byte
        return steps * model.alpha_ns + asking_ns + self.crowding * self.nbytes * work


def _eager(case: Case) -> float:
    moved = case.n if case.hosts == 1 else case.n - 1  # between hosts a rank's own is not moved
    return case.time_ns(steps=1, moved=moved, reduced=case.n - 1)


def _eager_blocks(case: Case) -> float:
    """Of an operation whose `nbytes` is that of the result."""
    moved = case.n if case.hosts == 1 else (case.n - 1) / case.n
    return case.time_ns(steps=1, moved=moved)


def _eager_shares(case: Case, *, reduces: bool = False) -> float:
    """Between hosts each rank is sent its own share of an input alone."""
    share = (case.n - 1) / case.n
    return case.time_ns(
        steps=1, moved=case.n if case.hosts == 1 else share, reduced=share if reduces else 0.0
    )


def _direct_all_reduce(case: Case) -> float:
    share = (case.n - 1) / case.n
    return case.time_ns(steps=3, moved=share * (2 if case.hosts > 1 else 1), reduced=share)


def _ring_all_reduce(case: Case) -> float:
    share = (case.n - 1) / case.n
    return case.time_ns(steps=1 + 2 * (case.n - 1), moved=4 * share, reduced=share)


def _bidirectional_all_reduce(case: Case) -> float:
    share = (case.n - 1) / case.n
    moved = (2 if case.hosts > 1 else 4) * share  # both ways of a wire at once
    return case.time_ns(steps=1 + 4 * (case.n - 1), moved=moved, reduced=share)


def _swap_all_reduce(case: Case) -> float:
    return case.time_ns(steps=2, moved=case.n - 1, reduced=case.n - 1)


def _shared_all_reduce(case: Case) -> float:
    share = (case.n - 1) / case.n
    return case.time_ns(steps=3, moved=3 * share, reduced=share)


def _halving_all_reduce(case: Case) -> float:
    share = (case.n - 1) / case.n
    left_over = case.n != 1 << (case.n.bit_length() - 1)
    return case.time_ns(
        steps=1 + 2 * case.levels + left_over, moved=3 * share + 2 * left_over, reduced=share + left_over
    )


def _trees_all_reduce(case: Case, trees: int) -> float:
    chunks = max(1, -(-case.nbytes // CHUNK_BYTES))
    filled = 1 + 2 * case.levels / chunks  # how much longer the pipeline makes it
    return case.time_ns(
        steps=1 + 2 * case.levels + 2 * chunks / trees, moved=filled * 3 / trees, reduced=filled * 2 / trees
    )


def _over_hosts(case: Case, between: Formula) -> float:
    inside = math.ceil(case.n / case.hosts)
    near = Case(n=inside, nbytes=case.nbytes, hosts=1, model=ONE_HOST)
    far = Case(n=case.hosts, nbytes=-(-case.nbytes // inside), hosts=case.hosts, model=case.model)
    return _direct_all_reduce(near) + between(far)


def _read_by_all(case: Case) -> float:
    return case.time_ns(steps=2, moved=1.0 if case.hosts == 1 else case.n - 1.0)


def _put_to_all(case: Case) -> float:
    return case.time_ns(steps=2, moved=case.n)


def _down_a_tree(case: Case) -> float:
    chunks = max(1, -(-case.nbytes // CHUNK_BYTES))
    return case.time_ns(steps=1 + case.levels + chunks, moved=2 + case.levels / chunks)


def _up_a_tree(case: Case) -> float:
    return _trees_all_reduce(case, 1) - _down_a_tree(case) / 2


def _one_root_reads(case: Case) -> float:
    waits_ns = case.time_ns(steps=2, moved=0)
    return waits_ns + (case.time_ns(steps=2, moved=1, reduced=case.n - 1) - waits_ns) / case.crowding


def _shared_by_all(case: Case) -> float:
    """Beside its share of the sum, each rank but the root puts it, and the root takes it out of its slot."""
    others = (case.n - 1) / case.n
    return case.time_ns(steps=4, moved=1 / case.n + 2 * others, reduced=others)


def _blocks_directly(case: Case) -> float:
    return case.time_ns(steps=2 if case.hosts == 1 else case.n, moved=(case.n - 1) / case.n)


def _blocks_by_slots(case: Case) -> float:
    return case.time_ns(steps=2, moved=2 * (case.n - 1) / case.n)


def _blocks_round_a_ring(case: Case) -> float:
    return case.time_ns(steps=case.n, moved=2 * (case.n - 1) / case.n)


def _blocks_by_bruck(case: Case) -> float:
    return case.time_ns(steps=1 + case.levels * case.n / 2, moved=case.levels)


FORMULAS: Mapping[tuple[Operation, str], Formula] = MappingProxyType(
    {
        (Operation.ALL_REDUCE, "direct"): _direct_all_reduce,
        (Operation.ALL_REDUCE, "swap"): _swap_all_reduce,
        (Operation.ALL_REDUCE, "shared"): _shared_all_reduce,
        (Operation.ALL_REDUCE, "ring"): _ring_all_reduce,
        (Operation.ALL_REDUCE, "bidirectional_ring"): _bidirectional_all_reduce,
        (Operation.ALL_REDUCE, "halving_doubling"): _halving_all_reduce,
        (Operation.ALL_REDUCE, "tree"): lambda case: _trees_all_reduce(case, 1),
        (Operation.ALL_REDUCE, "double_tree"): lambda case: _trees_all_reduce(case, 2),
        (Operation.ALL_REDUCE, "hierarchical"): lambda case: _over_hosts(case, _ring_all_reduce),
        (Operation.ALL_REDUCE, "hierarchical_tree"): lambda case: _over_hosts(
            case, lambda far: _trees_all_reduce(far, 1)
        ),
        (Operation.REDUCE, "direct"): _one_root_reads,
        (Operation.REDUCE, "shared"): _shared_by_all,
        (Operation.REDUCE, "tree"): _up_a_tree,
        (Operation.BROADCAST, "direct"): _read_by_all,
        (Operation.BROADCAST, "shared"): _put_to_all,
        (Operation.BROADCAST, "tree"): _down_a_tree,
        (Operation.ALL_GATHER, "direct"): _blocks_directly,
        (Operation.ALL_GATHER, "swap"): _blocks_by_slots,
        (Operation.ALL_GATHER, "ring"): _blocks_round_a_ring,
        (Operation.REDUCE_SCATTER, "direct"): _blocks_directly,
        (Operation.REDUCE_SCATTER, "swap"): _blocks_by_slots,
        (Operation.REDUCE_SCATTER, "ring"): _blocks_round_a_ring,
        (Operation.ALL_TO_ALL, "direct"): _blocks_directly,
        (Operation.ALL_TO_ALL, "swap"): _blocks_by_slots,
        (Operation.ALL_TO_ALL, "bruck"): _blocks_by_bruck,
        (Operation.GATHER, "direct"): _blocks_directly,
        (Operation.GATHER, "shared"): _blocks_by_slots,
        (Operation.SCATTER, "direct"): _blocks_directly,
        (Operation.SCATTER, "shared"): _blocks_by_slots,
    }
    | {
        (operation, "eager"): formula
        for formula, operations in (
            (_eager, (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)),
            (_eager_blocks, (Operation.ALL_GATHER, Operation.GATHER)),
            (_eager_shares, (Operation.SCATTER, Operation.ALL_TO_ALL)),
            (partial(_eager_shares, reduces=True), (Operation.REDUCE_SCATTER,)),
        )
        for operation in operations
    }
)
"""The predicted time of each algorithm, ns."""
