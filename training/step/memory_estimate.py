"""What a rank needs of memory: told before a run begins, and by name where a step runs out of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from dataclasses import dataclass

from zbmd.actors.rank_env import RankEnvironment, host_memory_bytes
from zbmd.training.config import GPTConfig
from zbmd.transport.errors import OutOfMemory, UserError, ZbmdError
from zbmd.transport.memory.memfd import available_memory, in_words

_ITEM_BYTES = 4
"""Activations are float32, also in mixed precision."""


_DONE: set[bool] = set()
"""Not empty once this process has done a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeeds:
    """What one rank needs at least, bytes. state: weights, moments, gradients, copies; all in its arena."""

    state_bytes: int
    activation_bytes: int

    @property
    def nbytes(self) -> int:
        """Both."""
        return self.state_bytes + self.activation_bytes


class StepOutOfMemory(ZbmdError):
    """There was no memory for an array of a step. The state before that step is as it was.

    For a supervisor it is a failure like any, and it replaces the rank: memory that others have taken may be
    there again. Where it is not, `zbmd.training.run.repeated_oom` ends the job. is_first: this process has
    done no step before.
    """

    def __init__(self, rank: int, step: int, asked: str, *, is_first: bool) -> None:
        super().__init__(
            f"rank {rank} ran out of memory at step {step}: {asked.rstrip('.')}. The state before that step "
            "is as it was. Choose a smaller model or context, fewer sequences a shard, or more memory."
        )
        self.step, self.is_first = step, is_first


def activation_bytes(
    config: GPTConfig,
    *,
    rows: int,
    passes: int = 1,
    blocks: int | None = None,
    tensor_ranks: int = 1,
    recompute: bool = False,
) -> int:
    """Bytes of activations that a rank holds at its peak, at least; real peaks are up to 15 % above it.

    rows: tokens of a micro-batch; passes: forward passes that wait for their backward passes at once; blocks:
    those of the model that this rank computes, by default all. Counted in arrays of (rows, width): what ops
    keep of a block and what a backward pass makes besides, as a count of the arrays of real passes gave it.
    """
    width, held = config.width, config.layers if blocks is None else blocks
    thinned = config.dropout > 0.0
    of_block = 27 + 2 * thinned if config.family == "gpt2" else 16 + 4 * thinned
    logits = 2 * config.vocabulary
    if recompute:
        one = held * width
        beside = max(4 * width + logits, (of_block + 6) * width)
    else:
        one, beside = held * of_block * width, 4 * width + logits
    return _ITEM_BYTES * rows * (passes * one + beside) // tensor_ranks


def require_room(config: GPTConfig, needs: RankNeeds, *, ranks: int, advice: str) -> None:
    """Raise `UserError` where `ranks` ranks of one host have no room for the model, before it is taken.

    Without a launcher, which says what its ranks may use together, what this machine and its cgroup have
    available counts. advice: what to choose instead.
    """
    available_bytes, launched = host_memory_bytes(os.environ), RankEnvironment.read(os.environ)
    if available_bytes is None:
        if launched is not None:
            return  # peers may have taken theirs already: each finds out for itself
        available_bytes = available_memory().nbytes
    if ranks * needs.nbytes > available_bytes:
        who = "1 rank needs" if ranks == 1 else f"{ranks} ranks need"
        raise UserError(
            f"{too_large(config)}: {who} at least {in_words(ranks * needs.nbytes)} (each "
            f"{in_words(needs.state_bytes)} of state and gradients, and {in_words(needs.activation_bytes)} "
            f"of activations), and {in_words(available_bytes)} are available. {advice}"
        )


def too_large(config: GPTConfig) -> str:
    """Says what does not fit."""
    shape = f"{config.layers} layers of width {config.width}, contexts of {config.context}"
    return f"the model ({shape}) does not fit into memory"


@contextlib.contextmanager
def told_by_step(rank: int, step: int) -> Generator[None]:
    """What runs out of memory within is raised as `StepOutOfMemory`: rank, step, what was asked for."""
    try:
        yield
    except (MemoryError, OutOfMemory) as error:
        asked = str(error) or "a small allocation of Python's own"
        raise StepOutOfMemory(rank, step, asked, is_first=not _DONE) from error
    _DONE.add(True)
