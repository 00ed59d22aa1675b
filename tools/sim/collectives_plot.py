"""Draw how operations scale: bus bandwidth over ranks, a line an algorithm, a picture an operation and size.

Of a barrier, which moves nothing: barriers a millisecond.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from zbmd.collectives.scale.scaling import ScaleMeasurement
from zbmd.tools.bench.plot import HEIGHT_IN, PNG_DPI, WIDTH_IN, check_plot
from zbmd.tools.bench.stats import size_in_words
from zbmd.training.files import write_atomically


def draw(found: Sequence[ScaleMeasurement], out: Path) -> None:
    """Write the picture; dashed: the bound. Raises `UserError` as `check_plot` does, or if that fails."""
    check_plot(out)
    from matplotlib.figure import Figure

    pictures = list(dict.fromkeys((one.operation, one.nbytes) for one in found))
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN * len(pictures)), layout="constrained")
    for number, (operation, nbytes) in enumerate(pictures, 1):
        axes = figure.add_subplot(len(pictures), 1, number)
        shown = [one for one in found if (one.operation, one.nbytes) == (operation, nbytes)]
        for algorithm in dict.fromkeys(one.algorithm for one in shown):
            line = [one for one in shown if one.algorithm == algorithm]
            ranks = [one.n for one in line]
            (drawn,) = axes.plot(ranks, [_height(one) for one in line], marker="o", label=algorithm)
            reachable = [_height(one) * one.time_ns / one.bound_ns for one in line]
            axes.plot(ranks, reachable, linestyle="--", linewidth=0.8, color=drawn.get_color())
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(
            sorted({one.n for one in shown}), [f"{n:,}" for n in sorted({one.n for one in shown})]
        )
        axes.minorticks_off()
        axes.set_ylabel("bus bandwidth, GB/s" if nbytes else "a millisecond")
        what = f"{operation.name.lower()} of {size_in_words(nbytes)} a rank"
        axes.set_title(f"{what}; dashed: the bound", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix[1:], dpi=PNG_DPI)
    write_atomically(out, lambda file: file.write(picture.getvalue()))


def _height(one: ScaleMeasurement) -> float:
    return one.bus_bytes_per_ns if one.nbytes else 1e6 / one.time_ns
