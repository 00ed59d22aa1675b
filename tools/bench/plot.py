"""Draw a benchmark: time over size, a line a contender, one picture a case."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Final

from zbmd.tools.bench.result import CASES, BenchResult
from zbmd.tools.bench.stats import OURS, size_in_words
from zbmd.training.files import write_atomically
from zbmd.transport.errors import UserError

FORMATS: Final = (".png", ".svg")
WIDTH_IN, HEIGHT_IN = 8.0, 4.2
PNG_DPI: Final = 140


def check_plot(out: Path) -> None:
    """Raise `UserError`, before anything is measured, if no picture could be drawn there."""
    if out.suffix not in FORMATS:
        raise UserError(f"{out} is no name for a picture: end it in {' or '.join(FORMATS)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("drawing a benchmark needs matplotlib: pip install 'zbmd[plot]'")


def save_plot(result: BenchResult, out: Path) -> None:
    """Write the picture. Raises `UserError` as `check_plot` does, or if the file cannot be written."""
    check_plot(out)
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.case for row in result.rows))
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN * len(cases)), layout="constrained")
    for number, case in enumerate(cases, 1):
        axes = figure.add_subplot(len(cases), 1, number)
        rows = [row for row in result.rows if row.case == case]
        for who in dict.fromkeys(row.who for row in rows):
            line = [(row.size_bytes, row.time_us_p50) for row in rows if row.who == who]
            width = 2.4 if who == OURS else 1.2
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, linewidth=width, label=who)
        sizes = sorted({row.size_bytes for row in rows})
        axes.set_xscale("symlog", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [size_in_words(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylabel("median, µs")
        axes.set_title(CASES.get(case, case), fontsize="medium", loc="left")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix[1:], dpi=PNG_DPI)
    write_atomically(out, lambda file: file.write(picture.getvalue()))
