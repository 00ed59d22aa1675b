"""The progress line of a training run, and the one line that tells of a recovery."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One step's figures; what is None is left out. `mfu`: a fraction of the machine's peak."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    memory_bytes: int | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None


def format_progress(p: Progress) -> str:
    """`step 20 loss 3.21 grad_norm 0.91 mem 0.4GiB tok/s 7,443 tflops 0.03 mfu 1.9%`."""
    parts = [f"step {p.step}"]
    if p.loss is not None:
        parts.append(f"loss {p.loss:.2f}")
    if p.grad_norm is not None:
        parts.append(f"grad_norm {p.grad_norm:.2f}")
    if p.memory_bytes is not None:
        parts.append(f"mem {p.memory_bytes / GIB:.1f}GiB")
    if p.tokens_per_s is not None:
        parts.append(f"tok/s {p.tokens_per_s:,.0f}")
    if p.tflops is not None:
        parts.append(f"tflops {p.tflops:.2f}")
    if p.mfu is not None:
        parts.append(f"mfu {p.mfu:.1%}")
    return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What one loss cost; what is None is not known (yet)."""

    rank: int
    how: str
    step: int | None = None
    detection_ns: int | None = None
    recovery_ns: int | None = None
    step_after: int | None = None
    steps_lost: int = 0


def format_recovery(r: Recovery) -> str:
    """One line: who was lost and how, when it was noticed, and what it cost.

    `rank 2 was killed (SIGKILL) at step 103; noticed in 0.31 ms; back at step 103 after 142 ms; nothing lost`
    """
    parts = [f"rank {r.rank} {r.how}" + ("" if r.step is None else f" at step {r.step}")]
    if r.detection_ns is not None:
        parts.append(f"noticed in {r.detection_ns / 1e6:.2f} ms")
    if r.recovery_ns is not None:
        where = "back" if r.step_after is None else f"back at step {r.step_after}"
        parts.append(f"{where} after {r.recovery_ns / 1e6:.0f} ms")
        lost = "nothing lost" if r.steps_lost == 0 else f"{r.steps_lost} steps lost"
        parts.append(lost)
    return "; ".join(parts)
