"""The time of a step: arithmetic or memory, whichever takes longer, and communication that nothing hides.

Pure. Times are in seconds. Assumptions, each used where it is named: matrix products reach a given part of
the peak; collectives are rings at the slowest link of their group; a group within a node uses its links, any
other the network, with the adapters of all its members in a node; gradients hide behind the backward pass,
gathers of ZeRO 3 behind all of it; tensor, expert and pipeline traffic hide behind nothing; a pipeline runs
1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from zbmd.tools.plan.layout import (
    ARRAY_ITEM,
    ITEM,
    ModelShape,
    RankMemory,
    Strategy,
    held_parameters,
    rank_memory,
)

ROWS: Final = (1, 2, 4, 8)
TENSOR: Final = (1, 2, 4, 8, 16)
CONTEXT: Final = (1, 2, 4, 8, 16)
CONTEXT_MIN: Final = 8_192
"""Tokens of a sequence that a rank keeps at least, if a context is divided."""
BACKWARD: Final = 2.0 / 3.0
"""The part of a micro-batch's arithmetic that its backward pass takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Accelerators of one kind. peak: FLOP/s of the type in use; efficiency: the part that kernels reach.

    link, network: bytes a second and direction of an accelerator, inside a node and beyond it.
    """

    accelerators: int
    node: int
    memory: float
    peak: float
    bandwidth: float
    link: float
    network: float
    efficiency: float

    def ring(self, span: int, stride: int = 1) -> float:
        """Return the bandwidth of a ring of each `stride`-th of `span` neighbouring accelerators."""
        if span <= self.node:
            return self.link
        return min(self.link, self.network * max(1, self.node // stride))

    def single(self, span: int) -> float:
        """Return the bandwidth of one sender among `span` neighbouring accelerators."""
        return self.link if span <= self.node else self.network


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the time of a step, in seconds; they add up. bound: what limits its arithmetic."""

    arithmetic: float
    tensor: float
    expert: float
    pipeline: float
    bubble: float
    state: float
    optimizer: float
    bound: str

    @property
    def total(self) -> float:
        """Return the sum."""
        parts = (self.arithmetic, self.tensor, self.expert, self.pipeline, self.bubble, self.state)
        return sum(parts) + self.optimizer


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy, judged. microbatches: of each step and data rank."""

    strategy: Strategy
    microbatches: int
    memory: RankMemory
    fits: bool
    step: StepTime


def ring_s(nbytes: float, ranks: int, bandwidth: float) -> float:
    """Return the time of an all-gather or a reduce-scatter of `nbytes`; an all-reduce takes two."""
    return nbytes * (ranks - 1) / ranks / bandwidth


def step_time(model: ModelShape, strategy: Strategy, cluster: Cluster, microbatches: int) -> StepTime:
    """Estimate the time of a step of `microbatches` on each data rank."""
    tokens = strategy.rows * model.context / strategy.cp
    held, again = held_parameters(model, strategy), 4.0 / 3.0 if strategy.recompute else 1.0
    flops = (model.flops_a_token + model.attention_flops_a_token) * tokens * again
    compute_s = flops / (strategy.tp * strategy.pp) / (cluster.peak * cluster.efficiency)
    read_s = (2 + again) * ITEM * held / cluster.bandwidth
    micro_s = max(compute_s, read_s)
    layers = model.layers / strategy.pp
    hidden = tokens * model.width * ITEM
    passes = 4 if not strategy.recompute else 6
    beyond = strategy.tp * strategy.cp
    tensor_s = layers * passes * 2 * ring_s(hidden, strategy.tp, cluster.ring(strategy.tp))
    expert_s = 0.0
    if strategy.ep > 1:
        sent = hidden * model.top / strategy.tp
        expert_s = layers * passes * ring_s(sent, strategy.ep, cluster.single(beyond * strategy.ep))
    hop_s = 0.0
    if strategy.pp > 1:
        hop_s = 2 * hidden / strategy.tp / cluster.single(strategy.pp * beyond * strategy.data)
    each_s = micro_s + tensor_s + expert_s + hop_s
    states = held / strategy.fsdp if strategy.zero else held
    arrays = 2 * 3 * ARRAY_ITEM + 2 * ITEM  # read and written; gradients read, weights written
    return StepTime(
        arithmetic=microbatches * micro_s,
        tensor=microbatches * tensor_s,
        expert=microbatches * expert_s,
        pipeline=microbatches * hop_s,
        bubble=(strategy.pp - 1) * each_s,
        state=_state_s(strategy, cluster, held, microbatches, micro_s),
        optimizer=arrays * states / cluster.bandwidth,
        bound="arithmetic" if compute_s >= read_s else "memory",
    )


def _state_s(strategy: Strategy, cluster: Cluster, held: float, microbatches: int, micro_s: float) -> float:
    """Return what gradients and gathered weights take beyond the arithmetic that hides them."""
    nbytes, inner = ITEM * held, strategy.tp * strategy.cp
    sharded = cluster.ring(inner * strategy.fsdp, inner)
    whole_s = 2 * ring_s(
        nbytes / (strategy.fsdp if strategy.zero >= 2 else 1),
        strategy.dp * strategy.cp,
        cluster.ring(inner * strategy.data, strategy.tp * strategy.fsdp),
    )
    if strategy.zero == 3:
        gathers_s = microbatches * 3 * ring_s(nbytes, strategy.fsdp, sharded)
        return max(0.0, gathers_s - microbatches * micro_s) + max(0.0, whole_s - BACKWARD * micro_s)
    once_s = 2 * ring_s(nbytes, strategy.fsdp, sharded) + whole_s
    return max(0.0, once_s - BACKWARD * micro_s)


def candidates(model: ModelShape, cluster: Cluster, sequences: int) -> Iterator[Candidate]:
    """Yield every strategy that divides the model and a batch of `sequences`, judged."""
    for tp in TENSOR:
        if tp > cluster.node or model.heads % tp or cluster.accelerators % tp:
            continue
        for pp in _divisors(model.layers):
            if cluster.accelerators % (tp * pp):
                continue
            for cp in CONTEXT:
                kept = cp == 1 or model.context // cp >= CONTEXT_MIN
                if cluster.accelerators % (tp * pp * cp) or model.context % cp or not kept:
                    continue
                data = cluster.accelerators // (tp * pp * cp)
                for strategy in _states(model, cluster, data, Strategy(tp=tp, pp=pp, cp=cp)):
                    yield from _batches(model, cluster, sequences, strategy)


def _states(model: ModelShape, cluster: Cluster, data: int, base: Strategy) -> Iterator[Strategy]:
    """Yield how `data` ranks keep the state: whole, divided over all, or over those of a node."""
    replace = msgspec.structs.replace
    for ep in _divisors(model.experts):
        if data % ep:
            continue
        whole = replace(base, ep=ep)
        yield replace(whole, dp=data)
        node = cluster.node // (base.tp * base.cp)
        sizes = {data} | ({node} if 1 < node < data and data % node == 0 else set[int]())
        for fsdp in sizes - {1}:
            for zero in (1, 2, 3):
                # Gradients of a pipeline's micro-batches add up before they are divided.
                if base.pp == 1 or zero == 1:
                    yield replace(whole, dp=data // fsdp, fsdp=fsdp, zero=zero)


def _batches(model: ModelShape, cluster: Cluster, sequences: int, strategy: Strategy) -> Iterator[Candidate]:
    for rows in ROWS:
        if sequences % (rows * strategy.data):
            continue
        microbatches = sequences // (rows * strategy.data)
        for recompute in (False, True):
            one = msgspec.structs.replace(strategy, rows=rows, recompute=recompute)
            memory = rank_memory(model, one, microbatches)
            yield Candidate(
                strategy=one,
                microbatches=microbatches,
                memory=memory,
                fits=memory.total <= cluster.memory,
                step=step_time(model, one, cluster, microbatches),
            )


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
