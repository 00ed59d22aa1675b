"""Names what the time of a training step is spent on: `with spans.FORWARD[unit]: …`.

A span costs about 0.2 µs if a recorder (`zbmd.training.profiler`) listens on its thread, and half of that
otherwise. Categories are exclusive: time in an inner span does not count for the outer one.

 FORWARD, BACKWARD   the model's passes, by unit (`GPT.units`)
 RECOMPUTE           a forward pass that is repeated during the backward pass
 OPTIMIZER           the update
 GRAD_CLIP           the norm of the gradient
 DATA                samples, and windows of the corpus
 TRANSFER            between host and device memory
 COMM                waiting for other ranks: operations of groups, votes, copies of the state
 BUBBLE              a pipeline stage has nothing to compute
 CHECKPOINT          what a step waits for while state is written
 EVALUATE            held-out text; forward passes there do not count as FORWARD
 DIGEST              the digest of the new state that a vote carries
 SAMPLE_GEN          text that the model writes during the training
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
    SAMPLE_GEN,
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
    "SAMPLE_GEN",
    "TRANSFER",
    "Span",
]
