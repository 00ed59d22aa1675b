"""`zbmd goodput`: where the time of runs went, as a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zbmd.tools.cli.options import add_command, add_json
from zbmd.tools.runs.goodput import Cause, Goodput, Times, goodput_of, read_runs
from zbmd.tools.runs.plot_draw import DEATH, FORMATS, INK, MUTED, PAPER, render_figure
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS_SHOWN: Final = 8
"""Of more ranks the table has the sums alone."""
BARS_MAX: Final = 64
"""Of more ranks the picture has one bar, of all of them."""
COLORS: Final = {
    Cause.USEFUL: "#2f63c6",
    Cause.RECOMPUTED: "#e08a3c",
    Cause.DETECTION: DEATH,
    Cause.REPAIR: "#f0c27a",
    Cause.RESTART: "#b9a63a",
    Cause.CHECKPOINT: "#9a6fc4",
    Cause.DATA: "#8c7a4f",
    Cause.STRAGGLER: "#b56a8c",
    Cause.START_UP: "#7ec4a5",
    Cause.IDLE: "#dfe3e8",
}
WIDTH_IN: Final = 9.6
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN, BAR_IN = 0.9, 0.3, 0.95, 0.95, 0.3


def add_goodput(commands: Any) -> None:
    """Add `zbmd goodput`."""
    command = add_command(
        commands,
        "goodput",
        "show where each second of each rank went: useful, recomputed, repair, stalls, idle",
        description="Give each second of each rank of a run one cause. Several runs, each going on from "
        "the one before, count together, with the time between them.",
        examples=(
            "zbmd goodput zbmd-runs/demo",
            "zbmd goodput runs/monday runs/tuesday -o goodput.svg",
            "zbmd goodput zbmd-runs/demo --json",
        ),
    )
    command.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directories of runs")
    command.add_argument("-o", "--out", type=Path, metavar="FILE", help="picture to draw: .svg or .png")
    add_json(command)
    command.set_defaults(run_command=_goodput)


def _goodput(arguments: argparse.Namespace) -> int:
    out: Path | None = arguments.out
    if out is not None and out.suffix not in FORMATS:
        raise UserError(f"cannot draw to {out}: choose a name that ends in {' or '.join(FORMATS)}.")
    found = goodput_of(read_runs(arguments.runs))
    if out is not None:
        title = headline(found)
        data = render_figure(lambda: _draw(found, title), out.suffix, title=title, description=subline(found))
        write_atomically(out, lambda file: file.write(data))
    if arguments.json:
        print(msgspec.json.encode(as_json(found)).decode())
    else:
        print("\n".join(table_of(found)))
    return 0


def as_json(found: Goodput) -> dict[str, Any]:
    """Return it as builtins, times in seconds."""

    def seconds(times: Times) -> dict[str, float]:
        return {str(cause): ns / 1e9 for cause, ns in times.items()}

    runs = [
        {
            "begin_ns": run.begin_ns,
            "end_ns": run.end_ns,
            "ranks": {str(rank): seconds(times) for rank, times in run.ranks.items()},
            "failures": [msgspec.to_builtins(one) for one in run.failures],
        }
        for run in found.runs
    ]
    return {
        "seconds": seconds(found.ns),
        "rank_seconds": found.rank_ns / 1e9,
        "wall_s": found.wall_ns / 1e9,
        "between_s": found.between_ns / 1e9,
        "failures": found.failures,
        "ettr": found.ettr,
        "mttr_s": found.mttr_s,
        "mtbf_s": found.mtbf_s,
        "availability": found.availability,
        "nines": None if math.isinf(found.nines) else found.nines,
        "runs": runs,
    }


def headline(found: Goodput) -> str:
    """The result in a sentence."""
    return f"{found.ettr:.1%} of the time of all ranks was useful"


def subline(found: Goodput) -> str:
    """Return losses, recovery and availability."""
    ranks = max(len(run.ranks) for run in found.runs)
    parts = [f"{len(found.runs)} run{'s' if len(found.runs) > 1 else ''}, {ranks} ranks", _s(found.wall_ns)]
    if found.failures:
        parts.append(f"{found.failures} loss{'es' if found.failures > 1 else ''}")
    if found.mttr_s is not None:
        parts.append(f"{_s(found.mttr_s * 1e9)} to the next step")
    parts.append(f"available {found.availability:.4%}")
    return " · ".join(parts)


def table_of(found: Goodput) -> list[str]:
    """Return the lines of the table: a row a cause, a column a rank, if they are few."""
    ranks = [(run, rank) for run in found.runs for rank in run.ranks]
    shown = ranks if len(found.runs) == 1 and len(ranks) <= RANKS_SHOWN else []
    lines = [headline(found), subline(found), ""]
    lines.append(_row("", "share", "seconds", [f"rank {rank}" for _, rank in shown]))
    for cause in Cause:
        each = [f"{run.ranks[rank][cause] / 1e9:.3f}" for run, rank in shown]
        share = f"{found.ns[cause] / found.rank_ns:.2%}"
        lines.append(_row(str(cause), share, f"{found.ns[cause] / 1e9:.3f}", each))
    total = [f"{run.wall_ns / 1e9:.3f}" for run, _ in shown]
    lines.append(
        _row("all", f"{sum(found.ns.values()) / found.rank_ns:.2%}", f"{found.rank_ns / 1e9:.3f}", total)
    )
    lines.append("")
    lines.append(f"ETTR (useful part of the time)     {found.ettr:.2%}")
    lines.append(f"MTTR (loss to the next step)       {_optional(found.mttr_s)}")
    lines.append(f"MTBF (wall time per loss)          {_optional(found.mtbf_s)}")
    nines = "no loss" if math.isinf(found.nines) else f"{found.nines:.2f} nines"
    lines.append(f"availability                       {found.availability:.4%} ({nines})")
    if found.between_ns:
        lines.append(f"between runs                       {_s(found.between_ns)}")
    return lines


def _row(name: str, share: str, seconds: str, each: Sequence[str]) -> str:
    return f"{name:<18}{share:>9}{seconds:>12}" + "".join(f"{one:>11}" for one in each)


def _optional(seconds: float | None) -> str:
    return "none" if seconds is None else _s(seconds * 1e9)


def _s(ns: float) -> str:
    s = ns / 1e9
    if s < 1:
        return f"{s * 1e3:.0f} ms"
    if s < 600:
        return f"{s:.1f} s"
    return f"{s / 60:.1f} min" if s < 36_000 else f"{s / 3600:.1f} h"


def _draw(found: Goodput, title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    bars = _bars(found)
    height_in = TOP_IN + BOTTOM_IN + BAR_IN * len(bars)
    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor=PAPER)
    width = 1.0 - (LEFT_IN + RIGHT_IN) / WIDTH_IN
    axes = figure.add_axes((LEFT_IN / WIDTH_IN, BOTTOM_IN / height_in, width, BAR_IN * len(bars) / height_in))
    axes.set_facecolor("none")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=8.5)
    for row, (_, times) in enumerate(bars):
        left, whole = 0.0, max(1, sum(times.values()))
        for cause in Cause:
            share = 100 * times[cause] / whole
            axes.barh(row, share, left=left, height=0.72, color=COLORS[cause], linewidth=0)
            left += share
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of a rank's time", color=MUTED, fontsize=8.5, labelpad=2)
    key = [
        Patch(color=COLORS[cause], label=f"{cause} {found.ns[cause] / found.rank_ns:.1%}")
        for cause in Cause
        if found.ns[cause]
    ]
    figure.legend(
        handles=key,
        loc="lower left",
        bbox_to_anchor=(LEFT_IN / WIDTH_IN, 0.01),
        ncols=min(len(key), 5),
        frameon=False,
        fontsize=8,
        handlelength=1.0,
        labelcolor=INK,
        columnspacing=1.2,
    )
    at = LEFT_IN / WIDTH_IN
    figure.text(at, 1 - 0.33 / height_in, title, fontsize=14.5, weight="bold", va="center")
    figure.text(at, 1 - 0.62 / height_in, subline(found), fontsize=9.5, color=MUTED, va="center")
    return figure


def _bars(found: Goodput) -> list[tuple[str, Times]]:
    """Return what is drawn: each rank of a run, or all ranks of each run, if they are many."""
    if len(found.runs) == 1 and len(found.runs[0].ranks) <= BARS_MAX:
        return [(f"rank {rank}", times) for rank, times in found.runs[0].ranks.items()]
    return [
        (f"run {number}", {cause: sum(times[cause] for times in run.ranks.values()) for cause in Cause})
        for number, run in enumerate(found.runs, 1)
    ]
