"""Draw what an interval costs: total, stalls and rework against the interval, as .svg or .png."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zbmd.tools.plan.checkpoint_plan import CheckpointInputs, CheckpointPlan, Cost, describe
from zbmd.tools.plan.quantities import shown_s, shown_share
from zbmd.tools.runs.plot_draw import DEATH, FORMATS, GRID, HELD_OUT, INK, MUTED, PAPER, TIME, render_figure
from zbmd.training.checkpoint.intervals import lost
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_IN: Final = (9.6, 4.8)
POINTS: Final = 241
SPAN: Final = 12.0
"""Intervals are drawn from 1/SPAN to SPAN times the best one."""
STALLS, REWORK, YOURS = "#e08a3c", "#2f8f8a", DEATH
LABEL_ROOM: Final = 0.62
"""A label beyond this part of the width stands to the left of its line."""
TICKS_MAX: Final = 9
TICKS_S: Final = tuple(
    unit_s * number
    for unit_s, numbers in (
        (1e-3, (1, 3, 10, 30, 100, 300)),
        (1.0, (1, 3, 10, 30)),
        (60.0, (1, 3, 10, 30)),
        (3600.0, (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)),
    )
    for number in numbers
)


def draw_plan(path: Path, inputs: CheckpointInputs, plan: CheckpointPlan) -> None:
    """Draw a plan of one level to `path`.

    Raises `UserError` if matplotlib is missing, or the name of `path` ends in neither .svg nor .png.
    """
    if path.suffix not in FORMATS:
        raise UserError(
            f"--plot: expected a file name that ends in {' or '.join(FORMATS)}, got {str(path)!r}"
        )
    title = f"Checkpoints every {shown_s(plan.best.interval_s)}"
    data = render_figure(
        lambda: _draw(inputs, plan, title), path.suffix, title=title, description=describe(plan)
    )
    write_atomically(path, lambda file: file.write(data))


def _draw(inputs: CheckpointInputs, plan: CheckpointPlan, title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=SIZE_IN, facecolor=PAPER)
    axes = figure.add_axes((0.075, 0.115, 0.9, 0.665))
    axes.set_facecolor("none")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=8.5)
    marked = [plan.best.interval_s] + ([plan.yours.interval_s] if plan.yours else [])
    low_s, high_s = min(marked) / SPAN, max(marked) * SPAN
    _draw_curves(axes, inputs, plan, low_s, high_s)
    axes.set_xscale("log")
    axes.set_xlim(low_s, high_s)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(_ticks(low_s, high_s))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown_s(float(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel("interval: useful work between two checkpoints", color=MUTED, fontsize=8.5, labelpad=4)
    axes.annotate(
        "Time lost, of useful time",
        (0, 1),
        (0, 5),
        xycoords="axes fraction",
        textcoords="offset points",
        weight="bold",
        fontsize=9,
    )
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, ncols=5, frameon=False, fontsize=8.5
    )
    figure.text(0.075, 0.935, title, fontsize=14.5, weight="bold", va="center")
    figure.text(0.075, 0.88, _subtitle(plan), fontsize=9.5, color=MUTED, va="center")
    return figure


def _subtitle(plan: CheckpointPlan) -> str:
    many = "accelerator" if plan.accelerators == 1 else "accelerators"
    return (
        f"{plan.accelerators:,} {many}, one failure every {shown_s(plan.mtbf_s)} · a checkpoint stalls "
        f"{shown_s(plan.stall_s)} of its {shown_s(plan.write_s)} · restart {shown_s(plan.restart_s)} · "
        f"efficiency {plan.best.efficiency:.1%}"
    )


def _draw_curves(
    axes: Axes, inputs: CheckpointInputs, plan: CheckpointPlan, low_s: float, high_s: float
) -> None:
    ratio = math.log(high_s / low_s)
    intervals = [low_s * math.exp(ratio * number / (POINTS - 1)) for number in range(POINTS)]
    found = [lost(interval_s, inputs.failing) for interval_s in intervals]
    top = _top(plan)
    axes.plot(intervals, [one.total for one in found], color=HELD_OUT, linewidth=2.0, label="total")
    axes.plot(
        intervals, [one.io for one in found], color=STALLS, linewidth=1.5, label="stalls of checkpoints"
    )
    axes.plot(
        intervals, [one.rework for one in found], color=REWORK, linewidth=1.5, label="rework after failures"
    )
    if plan.budget < top:
        axes.axhline(plan.budget, color=TIME, linewidth=1.0, dashes=(5, 3), label=f"budget {plan.budget:.0%}")
    axes.set_ylim(0.0, top)
    if plan.floor_s > low_s:
        axes.axvspan(low_s, plan.floor_s, color=GRID, alpha=0.6, linewidth=0, label="shorter than a write")
    beyond = plan.best.interval_s > low_s * (high_s / low_s) ** LABEL_ROOM
    if plan.yours is not None:
        beyond = plan.best.interval_s < plan.yours.interval_s
        _mark(axes, plan.yours, "yours", YOURS, top, to_left=not beyond)
    _mark(axes, plan.best, "planned", INK, top, to_left=beyond)


def _top(plan: CheckpointPlan) -> float:
    """Return the upper end of the axis: the optimum and the user's interval are well inside it."""
    wanted = [4.0 * plan.best.total]
    if plan.budget < 2.0 * wanted[0]:
        wanted.append(1.4 * plan.budget)
    if plan.yours is not None and math.isfinite(plan.yours.total):
        wanted.append(min(1.3 * plan.yours.total, 20.0 * plan.best.total))
    return max(wanted)


def _mark(axes: Axes, cost: Cost, name: str, color: str, top: float, *, to_left: bool) -> None:
    """Mark an interval with a line, and its numbers beside it."""
    axes.axvline(cost.interval_s, color=color, linewidth=1.2, zorder=3)
    axes.plot([cost.interval_s], [min(cost.total, top)], "o", color=color, markersize=5, zorder=5)
    steps = "" if cost.steps is None else f" ({cost.steps:,} steps)"
    axes.annotate(
        f"{name}: {shown_s(cost.interval_s)}{steps}, {shown_share(cost.total)} lost",
        (cost.interval_s, 1),
        (-7 if to_left else 7, -6),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha="right" if to_left else "left",
        va="top",
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2},
        fontsize=9.5,
        weight="bold",
        color=color,
        zorder=6,
    )


def _ticks(low_s: float, high_s: float) -> list[float]:
    """Return round durations in a range, at most `TICKS_MAX`."""
    inside = [tick_s for tick_s in TICKS_S if low_s <= tick_s <= high_s]
    return inside[:: max(1, -(-len(inside) // TICKS_MAX))]
