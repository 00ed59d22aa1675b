"""What the time of a training step is spent on: `with spans.FORWARD[unit]: …`, wherever that is done.

A span costs some 0.2 us where a recorder listens on its thread, half of that where none does
(`zbmd.training.profiler`). Categories are exclusive: a span within another takes its time away from that one.

FORWARD, BACKWARD   the model's passes, by unit (`GPT.units`)
RECOMPUTE           a forward pass that is done again on the way back
OPTIMIZER           the update
GRAD_CLIP           the gradient's norm
DATA                samples, and windows of the corpus
TRANSFER            between the host's memory and a device's
COMM                waiting for other ranks: operations of groups, votes, copies of the state
BUBBLE              a pipeline's stage has nothing to compute
CHECKPOINT          what a step waits for while state is written
EVALUATE            held-out text; forward passes there are no FORWARD
DIGEST              the fingerprint of the new state that a vote carries
"""

from __future__ import annotations

from zbmd.training.autograd._spans import (
    BACKWARD,
    BUBBLE,
    CHECKPOINT,
    COMM,
    DATA,
    DIGEST,
    EVALUATE,
    FORWARD,
    GRAD_CLIP,
    OPTIMIZER,
    RECOMPUTE,
    TRANSFER,
    Span,
)

__all__ = [
    "BACKWARD",
    "BUBBLE",
    "CHECKPOINT",
    "COMM",
    "DATA",
    "DIGEST",
    "EVALUATE",
    "FORWARD",
    "GRAD_CLIP",
    "OPTIMIZER",
    "RECOMPUTE",
    "TRANSFER",
    "Span",
]
