"""Draw a picture of a run: losses, who took part, deaths and recoveries, and the time of each step.

An SVG is the same bytes for the same run, and follows the reader's light or dark colour scheme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from zbmd.tools.runs.plot_data import Change, RunPicture, read_picture
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
from typing import TYPE_CHECKING, Final

from zbmd.tools.runs.plot_data import Spent
from zbmd.training.profiler.lines import IDLE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


# ---- where the steps spent their time

SHARE_MIN: Final = 0.01
"""Categories with less than this part of all time are drawn with the others."""
OTHERS: Final = "other"
COLORS: Final = {
    "forward": "#7aa6ee",
    "backward": "#2f63c6",
    "recompute": "#5fb0c9",
    "optimizer": "#2f8f8a",
    "grad_clip": "#7ec4a5",
    "data": "#b9a63a",
    "host_device": "#8c7a4f",
    "comm": "#e08a3c",
    "bubble": "#f0c27a",
    "checkpoint": "#9a6fc4",
    "evaluate": "#c79bd9",
    "sample_gen": "#b0c4a8",
    "digest": "#b56a8c",
    OTHERS: "#7d6f66",
    IDLE: "#dfe3e8",
}
SPENT_DARK: Final = {
    "#b0c4a8": "#8da384",
    "#7aa6ee": "#5c86c9",
    "#2f63c6": "#3d6fcf",
    "#5fb0c9": "#4a93a9",
    "#2f8f8a": "#3a9a94",
    "#7ec4a5": "#63a386",
    "#b9a63a": "#a8962f",
    "#8c7a4f": "#9b895c",
    "#e08a3c": "#cf7c30",
    "#f0c27a": "#c79c57",
    "#9a6fc4": "#8f66bb",
    "#c79bd9": "#a67bb8",
    "#b56a8c": "#a35c7c",
    "#7d6f66": "#8a7c72",
    "#dfe3e8": "#2a3038",
}
"""Colours on a dark page, by colour on a light one."""


def draw_spent(axes: Axes, spent: Spent) -> list[Artist]:
    """Draw it; returns what the key is made of. Names that hardly show are drawn as one."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    all_ms = max(float(spent.ms.sum()), 1e-9)
    shown = [
        row
        for row, name in enumerate(spent.names)
        if name == IDLE or spent.ms[row].sum() >= SHARE_MIN * all_ms
    ]
    rest = [row for row in range(len(spent.names)) if row not in shown]
    layers = [(spent.names[row], spent.ms[row]) for row in shown]
    if rest:
        layers.insert(len(layers) - 1, (OTHERS, spent.ms[rest].sum(axis=0)))
    colors = [COLORS[name] for name, _ in layers]
    axes.stackplot(spent.steps, *(ms for _, ms in layers), colors=colors, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    return [
        Patch(color=color, label=f"{name} {ms.sum() / all_ms:.0%}")
        for (name, ms), color in zip(layers, colors, strict=True)
    ]


PICTURE_NAME = "run.svg"
FORMATS = (".svg", ".png")
PNG_DPI = 160
WIDTH_IN = 9.6
LOSS_IN = 2.75
ROW_IN = 0.19
"""Height of a rank's row in the strip of members."""
ROWS_IN_MAX = 2.4
TIME_IN = 1.0
SPENT_IN = 1.35
TOP_IN, BOTTOM_IN, GAP_IN = 0.95, 0.5, 0.42
LEFT_IN, RIGHT_IN = 0.62, 0.22
LOSS_TICKS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0)
LABELS_MAX = 4
"""Of more changes of epoch than this, only the first are described; all are drawn."""
LABEL_SPAN = 0.3
"""Labels nearer than this part of the width are put below each other."""
LABEL_POINTS = 44
EPOCH_SPAN = 0.09
"""The part of the width that the number of an epoch needs."""
MARK_SPAN = 0.003
"""A marked step is drawn at least as wide as this part of the width."""
KEYS_WIDE_MAX = 4
"""A longer key is set closer, beside the name of its panel."""
MARKERS_MAX = 100
"""A curve of more points is drawn without a dot on each."""
ROW_LABELS_MAX = 12
"""A strip of more ranks names only some of them."""

INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
TRAINING, HELD_OUT, DEATH, TIME = "#9bbcf2", "#1a56c4", "#cf222e", "#8c959f"
INCARNATIONS = ("#b6c3d1", "#4ab07b", "#d9a13b", "#a57bd1")
"""Colours of a rank's first, second, … incarnation; they come round again."""

DARK = {
    INK: "#e6edf3",
    MUTED: "#9198a1",
    GRID: "#30363d",
    PAPER: "#0d1117",
    TRAINING: "#31558f",
    HELD_OUT: "#79b0ff",
    DEATH: "#ff7b72",
    TIME: "#7d8590",
    "#b6c3d1": "#4b5866",
    "#4ab07b": "#3fa56f",
    "#d9a13b": "#b98527",
    "#a57bd1": "#8f66bb",
    **SPENT_DARK,
}
"""Colours on a dark page, by colour on a light one."""

FONT = "DejaVu Sans"  # comes with matplotlib, so a layout is the same everywhere
FONTS = f"Helvetica, Arial, '{FONT}', sans-serif"


def plot_run(directory: Path, out: Path | None = None) -> Path:
    """Draw the run in `directory` to `out` (by default `run.svg` in it), and return the path written.

    Raises `UserError` if matplotlib is missing, the run has nothing to draw, the name of `out` ends in
    neither .svg nor .png, or it cannot be written.
    """
    path = directory / PICTURE_NAME if out is None else out
    if path.suffix not in FORMATS:
        raise UserError(f"cannot draw to {path}: choose a name that ends in {' or '.join(FORMATS)}.")
    picture = read_picture(directory)
    data = render(picture, path.suffix)
    write_atomically(path, lambda file: file.write(data))
    return path


def render(picture: RunPicture, suffix: str) -> bytes:
    """The picture as a '.svg' or '.png' file, as `suffix` says. Raises `UserError` without matplotlib."""
    return render_figure(
        lambda: _draw(picture), suffix, title=headline(picture), description=subline(picture)
    )


def render_figure(draw: Callable[[], Figure], suffix: str, *, title: str, description: str) -> bytes:
    """Return what `draw` returns as a '.svg' or '.png' file in the one style of all pictures.

    title, description: name an SVG for those who cannot see it. Raises `UserError` without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'zbmd[plot]'") from None
    settings: dict[Any, Any] = {
        "font.family": [FONT],
        "font.size": 9.0,
        "svg.fonttype": "none",  # text stays text: small, and searchable
        "svg.hashsalt": "zbmd",
        "path.simplify_threshold": 0.2,
        "axes.edgecolor": GRID,
        "axes.linewidth": 0.8,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
    }
    file = io.BytesIO()
    with matplotlib.rc_context(settings):
        figure = draw()
        if suffix == ".png":
            figure.savefig(file, format="png", dpi=PNG_DPI)
            return file.getvalue()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return _styled(file.getvalue().decode(), title, description).encode()


# ---- the words


def headline(picture: RunPicture) -> str:
    """The run in a sentence."""
    deaths = picture.result.deaths
    ranks = len(picture.ranks)
    back_ms = [death.recovery_ms for death in deaths if death.recovery_ms is not None]
    if len(deaths) == 1 and back_ms:
        return f"One of {ranks} ranks is killed; training goes on {_duration(back_ms[0])} later"
    if deaths and len(back_ms) == len(deaths):
        return f"{len(deaths)} ranks are killed; training goes on within {_duration(max(back_ms))}"
    if picture.changes:
        epochs = len(picture.changes) + 1
        return f"{picture.last_step:,} steps on {ranks} ranks, through {epochs} epochs"
    return f"{picture.last_step:,} steps on {ranks} {'rank' if ranks == 1 else 'ranks'}"


def subline(picture: RunPicture) -> str:
    """Return what was trained, and the audit of its ledger."""
    result = picture.result
    parts = [] if result.parameters is None else [f"byte-level GPT of {result.parameters:,} parameters"]
    steps = f"{picture.last_step:,} steps"
    if steps not in headline(picture):
        parts.append(steps)
    counts = (result.steps_lost, result.samples_skipped, result.samples_repeated)
    if counts == (0, 0, 0):
        parts.append("no step lost, no sample skipped or repeated")
    elif None not in counts:
        parts.append("{:,} steps lost, {:,} samples skipped, {:,} repeated".format(*counts))
    if result.verified:
        parts.append("the same weights, bit for bit, as undisturbed")
    return " · ".join(parts)


def told(change: Change) -> list[str]:
    """The lines that tell of a change of epoch."""
    if not change.deaths:
        gone = [f"rank {rank} left" for rank in change.left]
        come = [f"rank {rank} joined" for rank in change.joined]
        return [f"epoch {change.epoch}", *(gone + come)[:2]]
    lines = [f"{_ranks(tuple(death.rank for death in change.deaths))} killed"]
    detection_ms = [death.detection_ms for death in change.deaths if death.detection_ms is not None]
    recovery_ms = [death.recovery_ms for death in change.deaths if death.recovery_ms is not None]
    if detection_ms:
        lines.append(f"noticed after {_duration(max(detection_ms))}")
    if recovery_ms:
        lines.append(f"next step after {_duration(max(recovery_ms))}")
    return lines


def _ranks(ranks: tuple[int, ...]) -> str:
    names = ", ".join(str(rank) for rank in ranks)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _duration(ms: float) -> str:
    if ms < 1.0:
        return f"{ms:.2f} ms"
    if ms < 10.0:
        return f"{ms:.1f} ms"
    return f"{ms:.0f} ms" if ms < 1_000.0 else f"{ms / 1e3:.1f} s"


# ---- the drawing


def _draw(picture: RunPicture) -> Figure:
    from matplotlib.figure import Figure

    rows_in = min(max(2, len(picture.ranks)) * ROW_IN, ROWS_IN_MAX)
    spent_in = 0.0 if picture.spent is None else SPENT_IN + GAP_IN
    height_in = TOP_IN + LOSS_IN + GAP_IN + rows_in + GAP_IN + TIME_IN + BOTTOM_IN + spent_in
    figure = Figure(figsize=(WIDTH_IN, height_in), facecolor=PAPER)

    def panel(bottom_in: float, panel_in: float) -> Axes:
        width = 1.0 - (LEFT_IN + RIGHT_IN) / WIDTH_IN
        axes = figure.add_axes((LEFT_IN / WIDTH_IN, bottom_in / height_in, width, panel_in / height_in))
        axes.set_facecolor("none")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, labelsize=8.5)
        margin = 0.5 + 0.004 * picture.steps
        axes.set_xlim(picture.first_step - 1 - margin, picture.last_step + margin)
        return axes

    time_at_in = BOTTOM_IN + spent_in
    time = panel(time_at_in, TIME_IN)
    strip = panel(time_at_in + TIME_IN + GAP_IN, rows_in)
    loss = panel(time_at_in + TIME_IN + GAP_IN + rows_in + GAP_IN, LOSS_IN)
    _draw_loss(loss, picture)
    _draw_members(strip, picture)
    _draw_time(time, picture)
    last = time
    if picture.spent is not None:
        last = panel(BOTTOM_IN, SPENT_IN)
        _name(last, "What it went into, ms", draw_spent(last, picture.spent))
        last.grid(axis="y", color=GRID, linewidth=0.7)
        last.set_axisbelow(True)
        time.tick_params(labelbottom=False)
    last.set_xlabel("step", color=MUTED, fontsize=8.5, labelpad=2)
    for axes in (loss, strip):
        axes.tick_params(labelbottom=False)
        for change in picture.changes:
            axes.axvline(change.step - 0.5, color=DEATH, linewidth=1.1, zorder=3)
    left = LEFT_IN / WIDTH_IN
    figure.text(left, 1 - 0.33 / height_in, headline(picture), fontsize=14.5, weight="bold", va="center")
    figure.text(left, 1 - 0.58 / height_in, subline(picture), fontsize=9.5, color=MUTED, va="center")
    return figure


def _name(axes: Axes, text: str, key: Sequence[Artist] = ()) -> None:
    """Name a panel above its upper left corner, and tell what its colours mean above the right one."""
    axes.annotate(
        text, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", weight="bold", fontsize=9
    )
    if not key:
        return
    crowded = len(key) > KEYS_WIDE_MAX
    axes.legend(
        handles=key,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2,
        ncols=len(key),
        frameon=False,
        fontsize=8.0 if crowded else 8.5,
        handlelength=1.0 if crowded else 1.8,
        handletextpad=0.4 if crowded else 0.8,
        columnspacing=0.9 if crowded else 1.6,
        borderpad=0,
    )


def _draw_loss(axes: Axes, picture: RunPicture) -> None:
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    result, held_out = picture.result, picture.held_out
    axes.set_yscale("log")
    axes.plot(picture.loss.steps, picture.loss.values, color=TRAINING, linewidth=1.1)
    dots = "o" if held_out.steps.size <= MARKERS_MAX else ""
    axes.plot(
        held_out.steps, held_out.values, color=HELD_OUT, linewidth=1.6, marker=dots, markersize=3.6, zorder=4
    )
    if result.heldout_loss_bigram is not None:
        axes.axhline(result.heldout_loss_bigram, color=INK, linewidth=1.0, dashes=(5, 3))
    low, high = axes.get_ylim()
    ticks = [tick for tick in LOSS_TICKS if low < tick < high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    _name(axes, f"Loss, nats per {picture.unit}", _loss_key(picture))
    span = picture.steps
    level, last = 0, None
    for change in picture.changes[:LABELS_MAX]:
        near = last is not None and change.step - last < LABEL_SPAN * span
        level, last = level + 1 if near else 0, change.step
        _tell(axes, change, level, to_left=change.step > picture.last_step - LABEL_SPAN * span)


def _loss_key(picture: RunPicture) -> list[Line2D]:
    from matplotlib.lines import Line2D

    result, held_out = picture.result, picture.held_out
    handles = [Line2D([], [], color=TRAINING, linewidth=2.2, label="training")]
    if held_out.steps.size:
        last = f"held-out text, {held_out.values[-1]:.2f} at the end"
        handles.append(Line2D([], [], color=HELD_OUT, linewidth=1.6, marker="o", markersize=3.6, label=last))
    if result.heldout_loss_bigram is not None:
        words = f"bigram table, {result.heldout_loss_bigram:.2f}"
        handles.append(Line2D([], [], color=INK, linewidth=1.0, dashes=(3.5, 2), label=words))
    return handles


def _tell(axes: Axes, change: Change, level: int, *, to_left: bool) -> None:
    """Describe a change beside its line, below `level` other descriptions."""
    for index, line in enumerate(told(change)):
        axes.annotate(
            line,
            (change.step - 0.5, 1),
            (-7 if to_left else 7, -5 - LABEL_POINTS * level - 13.5 * index),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="right" if to_left else "left",
            va="top",
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2},
            fontsize=10 if index == 0 else 9.5,
            weight="bold" if index == 0 else "normal",
            color=DEATH if index == 0 else INK,
            zorder=6,
        )


def _draw_members(axes: Axes, picture: RunPicture) -> None:
    row_of = {rank: row for row, rank in enumerate(picture.ranks)}
    axes.set_ylim(len(row_of) - 0.5, -0.5)
    axes.spines["bottom"].set_visible(False)
    every = -(-len(picture.ranks) // ROW_LABELS_MAX)
    shown = picture.ranks[::every]
    axes.set_yticks([row_of[rank] for rank in shown], [f"rank {rank}" for rank in shown])
    for number, color in enumerate(INCARNATIONS):
        stays = [stay for stay in picture.stays if (stay.incarnation - 1) % len(INCARNATIONS) == number]
        axes.barh(
            [row_of[stay.rank] for stay in stays],
            [stay.last - stay.first + 1 for stay in stays],
            left=[stay.first - 0.5 for stay in stays],
            height=0.74,
            color=color,
            linewidth=0,
        )
    _name(axes, "Members")
    span = picture.steps
    for stay in picture.stays:
        if stay.incarnation > 1 and stay.last - stay.first > LABEL_SPAN * span:
            _note(axes, f"replacement: incarnation {stay.incarnation}", stay.first, row_of[stay.rank])
    last = picture.first_step
    for number, change in enumerate(picture.changes[:LABELS_MAX]):
        if number == 0 and change.step - last > 2 * EPOCH_SPAN * span:
            _note_epoch(axes, change.epoch_before, change.step, to_left=True)
        room = picture.last_step - change.step > EPOCH_SPAN * span
        if room and (number == 0 or change.step - last > EPOCH_SPAN * span):
            _note_epoch(axes, change.epoch, change.step, to_left=False)
            last = change.step


def _note(axes: Axes, text: str, step: int, row: int) -> None:
    axes.annotate(
        text, (step - 0.5, row), (7, -0.5), textcoords="offset points", va="center", fontsize=8, zorder=6
    )


def _note_epoch(axes: Axes, epoch: int, step: int, *, to_left: bool) -> None:
    axes.annotate(
        f"epoch {epoch}",
        (step - 0.5, 1),
        (-7 if to_left else 7, 5),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha="right" if to_left else "left",
        fontsize=8.5,
        color=MUTED,
    )


def _draw_time(axes: Axes, picture: RunPicture) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    step_ms, evaluated = picture.step_ms, picture.evaluated
    axes.fill_between(step_ms.steps, step_ms.values, step="mid", color=TIME, linewidth=0)
    key: list[Line2D] = []

    def mark(steps: Sequence[float], values: Sequence[float], color: str, wide: float, words: str) -> None:
        """Colour the time of each of `steps`; all of them are one path along the axis."""
        half = max(0.5, wide * MARK_SPAN * picture.steps / 2)
        xs = [x for step in steps for x in (step - half, step - half, step + half, step + half)]
        ys = [y for value in values for y in (0.0, value, value, 0.0)]
        axes.fill(xs, ys, color=color, linewidth=0)
        key.append(Line2D([], [], color=color, linewidth=2.2, label=words))

    if evaluated.steps.size:
        mark(evaluated.steps.tolist(), evaluated.values.tolist(), HELD_OUT, 1.0, "held-out evaluation")
    if picture.changes:
        again = [change.step for change in picture.changes]
        mark(again, [change.step_ms for change in picture.changes], DEATH, 1.5, "recovery")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    median = "" if picture.step_ms_median is None else f" (median {_duration(picture.step_ms_median)})"
    _name(axes, f"Time of a step, ms{median}", key)


# ---- the file


def _styled(svg: str, title: str, description: str) -> str:
    """Name the picture for those who cannot see it, add the dark colours, and use fonts that all have.

    Coordinates are cut to a hundredth of a point, which halves the file.
    """
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    head = (
        f"<title>{escape(title)}</title>\n"
        f"<desc>{escape(description)}</desc>\n"
        f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>\n"
    )
    start = svg.index("<svg ")
    end = svg.index(">", start) + 1
    opening = svg[start : end - 1] + ' role="img">'
    body = svg[end:].replace(f"'{FONT}'", FONTS)
    body = re.sub(r' d="[^"]*"', lambda path: _shortened(path.group()), body)
    return svg[:start] + opening + "\n" + head + body


def _shortened(path: str) -> str:
    return re.sub(r"(\.\d\d)\d+", r"\1", path).replace(" \n", "\n")
