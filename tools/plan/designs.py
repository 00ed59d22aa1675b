"""Designs: options of `zbmd plan cluster` and `checkpoint` together, and all that follows from them.

Pure: from the text of options to the answer that the page draws, and to the file that it saves.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from zbmd.tools.plan.checkpoint import inputs_of
from zbmd.tools.plan.checkpoint_plan import CheckpointInputs, CheckpointPlan, plan_checkpoint
from zbmd.tools.plan.cluster import ClusterPlan, plan_cluster
from zbmd.tools.plan.layout import HEAD
from zbmd.tools.plan.quantities import shown_s, shown_share
from zbmd.training.checkpoint.intervals import lost
from zbmd.training.checkpoint.pace import AUTO
from zbmd.transport.errors import UserError

DESIGN_NAME: Final = "design.toml"
POINTS: Final = 120
SPAN: Final = 30.0
"""Curves go from 1/SPAN to SPAN times the interval that is planned."""
TEXT_MAX: Final = 64
OPTIONS: Final = {
    **{"parameters": "7B", "accelerators": "8", "accelerator": "H100", "dtype": "bf16", "context": "4096"},
    **{"tokens": "4M", "network": "400Gbit/s", "mtbf": "50000h", "storage": "100GB/s", "stall": "2%"},
    **{"budget": "20%", "interval": "", "restart": ""},
}
"""The options of a design, and the values that a page begins with. Empty: not given."""
PRESETS: Final = {
    "this machine": {
        **{"parameters": "1M", "accelerators": "2", "accelerator": "L4", "dtype": "fp32", "context": "64"},
        **{"tokens": "512", "network": "10Gbit/s", "mtbf": "2000h", "storage": "1GB/s"},
    },
    "7B on 8 H100": {},
    "70B on 64 H100": {"parameters": "70B", "accelerators": "64"},
    "405B on 16,384 H100": {
        **{"parameters": "405B", "accelerators": "16384", "tokens": "16M", "storage": "2TB/s"},
    },
}
"""Small and large clusters, each as the options in which it differs."""
MESH_AXES: Final = ("dp", "fsdp", "pp", "tp")
"""Of `zbmd train`."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Time lost for each second of useful work, at intervals in seconds: in all, for stalls, for rework."""

    interval_s: list[float]
    total: list[float]
    io: list[float]
    rework: list[float]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The results of both planners for one design, and the curve that the page draws."""

    options: dict[str, str]
    cluster: ClusterPlan
    checkpoint: CheckpointPlan
    curve: Curve
    summary: str


def answer(given: Mapping[str, str]) -> Answer:
    """Return what follows from the options that are given; others have their defaults. Raises `UserError`."""
    unknown = sorted(given.keys() - OPTIONS.keys())
    if unknown:
        raise UserError(f"{unknown[0]!r} is no option of a design: expected {', '.join(OPTIONS)}")
    options = {**OPTIONS, **given}
    for name, text in options.items():
        if len(text) > TEXT_MAX:
            raise UserError(f"--{name}: expected at most {TEXT_MAX} characters, got {len(text)}")
    accelerators = _whole("accelerators", options)
    cluster = plan_cluster(
        argparse.Namespace(
            **{name: options[name] for name in ("parameters", "accelerator", "dtype", "tokens", "network")},
            **{name: options[name] for name in ("mtbf", "storage")},
            **dict.fromkeys(("layers", "width", "heads", "active", "memory", "mfu")),
            **{"accelerators": accelerators, "context": _whole("context", options), "vocabulary": 32_000},
            **{"experts": 1, "top": 1, "efficiency": "70%"},
        )
    )
    step_s = None if cluster.best is None else f"{cluster.best.step_s:.9f}s"
    inputs, _ = inputs_of(
        argparse.Namespace(
            **{name: options[name] for name in ("mtbf", "stall", "budget", "parameters")},
            **{"accelerators": accelerators, "bandwidth": options["storage"], "step": step_s},
            **{"interval": options["interval"] or None, "restart": options["restart"] or None},
            **{"asynchronous": True, "write": None, "state": None, "level": [], "work": "720h"},
        )
    )
    plan = plan_checkpoint(inputs)
    return Answer(
        options=options,
        cluster=cluster,
        checkpoint=plan,
        curve=_curve(inputs, plan),
        summary=_summary(cluster, plan),
    )


def _whole(name: str, options: Mapping[str, str]) -> int:
    try:
        number = int(options[name])
    except ValueError:
        number = 0
    if number < 1:
        raise UserError(f"--{name}: expected a whole number of at least 1, got {options[name]!r}")
    return number


def _curve(inputs: CheckpointInputs, plan: CheckpointPlan) -> Curve:
    at = plan.best.interval_s
    every = [at * math.exp(math.log(SPAN) * (2 * n / (POINTS - 1) - 1)) for n in range(POINTS)]
    found = [lost(interval_s, inputs.failing) for interval_s in every]
    return Curve(
        interval_s=every,
        total=[min(one.total, 1e9) for one in found],
        io=[min(one.io, 1e9) for one in found],
        rework=[min(one.rework, 1e9) for one in found],
    )


def _summary(cluster: ClusterPlan, plan: CheckpointPlan) -> str:
    if cluster.best is None:
        return "no strategy fits: use more accelerators, or some with more memory"
    tokens = cluster.best.tokens * plan.best.efficiency
    return (
        f"{cluster.best.layout}: {tokens:,.0f} tokens/s after failures, a step of "
        f"{shown_s(cluster.best.step_s)}, a checkpoint every {shown_s(plan.best.interval_s)} "
        f"({plan.best.steps:,} steps), {shown_share(plan.best.total)} of the time lost"
    )


def design_text(found: Answer) -> str:
    """Return the file with which `zbmd train --plan FILE` starts a run.

    Checkpoints are written at the pace that the run measures, unless the design has an interval of its own.
    Raises `UserError` if nothing fits.
    """
    best, cluster, yours = found.cluster.best, found.cluster, found.checkpoint.yours
    if best is None:
        raise UserError("no strategy fits, so there is no run to start: use more accelerators")
    strategy = best.strategy
    if max(strategy.cp, strategy.ep) > 1:
        raise UserError(f"zbmd train has no mesh for {best.layout}: choose a design without cp and ep")
    sizes = {axis: getattr(strategy, axis) for axis in MESH_AXES if getattr(strategy, axis) > 1}
    heads = max(one for one in range(1, max(1, cluster.width // HEAD) + 1) if cluster.width % one == 0)
    settings: dict[str, str | int] = {
        "mesh": ",".join(f"{axis}={size}" for axis, size in sizes.items()) or "dp=1",
        "ranks": cluster.accelerators,
        "zero": strategy.zero,
        "sequences_per_shard": strategy.rows,
        "shards": strategy.dp * strategy.fsdp * best.microbatches,
        "recompute": "on" if strategy.recompute else "off",
        **{"layers": cluster.layers, "width": cluster.width, "heads": heads},
        "context": int(found.options["context"]),
        "checkpoint_every": AUTO if yours is None else yours.steps or AUTO,
    }
    lines = [f"# {found.summary}", *(f"# --{name} {text}" for name, text in found.options.items() if text)]
    lines += [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in settings.items()]
    return "\n".join([*lines, ""])
