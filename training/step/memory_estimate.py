"""Memory of a step: estimated before a run starts, and its errors reported by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from dataclasses import dataclass

from zbmd.actors.rank.environment import JobEnvironment, host_memory_bytes
from zbmd.training.config import GPTConfig
from zbmd.transport.errors import OutOfMemory, UserError, ZbmdError
from zbmd.transport.memory.memfd import available_memory, in_words

_ITEM_BYTES = 4
"""Activations are float32, also in mixed precision."""


_DONE: set[bool] = set()
"""Not empty once this process has completed a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory that one rank needs at least, in bytes.

    `state_bytes`: weights, moments, gradients and copies; all of it lies in the rank's arena.
    """

    state_bytes: int
    activation_bytes: int

    @property
    def nbytes(self) -> int:
        """Return the sum of both."""
        return self.state_bytes + self.activation_bytes


class StepOutOfMemory(ZbmdError):
    """An array of a step could not be allocated. The state before that step is unchanged.

    To a supervisor this is a failure like any other: it replaces the rank, since memory that other processes
    had taken may be free again. If it is not, `zbmd.training.step.memory_estimate` ends the job. `is_first`:
    this process had not completed a step before.
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
    """Return the bytes of activations that a rank holds at its peak; real peaks are up to 15 % above it.

    `rows`: tokens of a micro-batch. `passes`: forward passes that wait for their backward passes at the same
    time. `blocks`: blocks of the model that this rank computes, by default all. The unit is an array of
    (rows, width); the counts of what ops keep and of what a backward pass allocates come from real passes.
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


def require_memory(config: GPTConfig, needs: RankMemory, *, ranks: int, advice: str) -> None:
    """Raise `UserError` if the model does not fit into the memory of this host, before any of it is
    allocated.

    Under a launcher, the memory that it grants to its ranks counts; otherwise what this machine and its
    cgroup have available. `advice`: what to choose instead.
    """
    available_bytes, launched = host_memory_bytes(os.environ), JobEnvironment.read_job(os.environ)
    if launched is not None and launched.resumes:
        return  # most of it is there already, with the state in it
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
    """Describe the model that does not fit."""
    shape = f"{config.layers} layers of width {config.width}, contexts of {config.context}"
    return f"the model ({shape}) does not fit into memory"


@contextlib.contextmanager
def naming_step(rank: int, step: int) -> Generator[None]:
    """Raise `StepOutOfMemory`, with rank and step, for an out-of-memory error in the block."""
    try:
        yield
    except (MemoryError, OutOfMemory) as error:
        asked = str(error) or "a small allocation of Python's own"
        raise StepOutOfMemory(rank, step, asked, is_first=not _DONE) from error
    _DONE.add(True)
