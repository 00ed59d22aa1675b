"""A pipeline's step drawn: a row a stage, time from left to right, as text or as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from rich.text import Text

from zbmd.training.pipeline.program import Instruction, Op, Shape
from zbmd.training.pipeline.simulate import Span, Timeline

COLUMNS_MAX: Final = 4096
"""Of a grid that goes to a file or a pipe."""
IDLE: Final = "·"
FILL: Final = "─"
NAMES: Final = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRADIENT: "input gradient",
    Op.WEIGHT_GRADIENT: "weight gradient",
}
STYLES: Final = {
    Op.FORWARD: ("white on blue", "white on dodger_blue1"),
    Op.BACKWARD: ("black on green", "black on bright_green"),
    Op.INPUT_GRADIENT: ("black on cyan", "black on bright_cyan"),
    Op.WEIGHT_GRADIENT: ("white on magenta", "white on bright_magenta"),
}
"""Of even and odd chunks."""
FILLS: Final = {
    Op.FORWARD: ("#3b6fb6", "#7ba4d9"),
    Op.BACKWARD: ("#3f9b58", "#86c996"),
    Op.INPUT_GRADIENT: ("#2a9d9d", "#7fcccc"),
    Op.WEIGHT_GRADIENT: ("#9b59b6", "#c39bd3"),
}
SVG_WIDTH: Final = 1200
SVG_LEFT: Final = 70
SVG_ROW: Final = 30
SVG_CHARACTER: Final = 7
"""Pixels that a character of a label takes."""


class Cell(NamedTuple):
    """So many columns of a row: a computation, or nothing."""

    instruction: Instruction | None
    columns: int


def label_of(instruction: Instruction, shape: Shape) -> str:
    """What stands in a cell: operation, micro-batch, and the chunk where there are several."""
    label = f"{instruction.op.value}{instruction.microbatch}"
    return label if shape.chunks == 1 else f"{label}.{instruction.part // shape.stages}"


def grid(timeline: Timeline, shape: Shape, *, columns_max: int) -> list[list[Cell]]:
    """The rows of the grid. Times are to scale, in columns wide enough for labels where there is room."""
    spans = [span for row in timeline.spans for span in row]
    labels = max(len(label_of(span.instruction, shape)) for span in spans) + 1
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    scale = min(labels / shortest, columns_max / timeline.makespan) if timeline.makespan else 0.0
    total = round(timeline.makespan * scale)
    return [list(_row(row, scale, total)) for row in timeline.spans]


def _row(spans: tuple[Span, ...], scale: float, total: int) -> Iterator[Cell]:
    at = 0
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        if start > at:
            yield Cell(None, start - at)
        if end > start:
            yield Cell(span.instruction, end - start)
        at = end
    if total > at:
        yield Cell(None, total - at)


def text_of(timeline: Timeline, shape: Shape, *, columns_max: int) -> list[Text]:
    """The grid, a line a stage; its colours are dropped where there is no terminal."""
    width = len(f"stage {shape.stages - 1}")
    lines: list[Text] = []
    for stage, row in enumerate(grid(timeline, shape, columns_max=columns_max - width - 2)):
        line = Text(f"stage {stage}".ljust(width) + "  ", no_wrap=True, end="")
        for cell in row:
            if cell.instruction is None:
                line.append(IDLE * cell.columns, style="dim")
            else:
                line.append(_cell_text(cell, shape), style=_style(cell.instruction, shape))
        lines.append(line)
    return lines


def legend(timeline: Timeline) -> Text:
    """What the letters and colours mean, of those that occur."""
    seen = {span.instruction.op for row in timeline.spans for span in row}
    line = Text(no_wrap=True, end="")
    for op, name in NAMES.items():
        if op in seen:
            line.append(f" {op.value} ", style=STYLES[op][0])
            line.append(f" {name}   ")
    line.append(f"{IDLE} idle", style="dim")
    return line


def svg_of(timeline: Timeline, shape: Shape, title: str) -> str:
    """The grid as an SVG document."""
    scale = (SVG_WIDTH - SVG_LEFT - 10) / timeline.makespan if timeline.makespan else 0.0
    height = SVG_ROW * (shape.stages + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SVG_WIDTH}" height="{height}" '
        f'viewBox="0 0 {SVG_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{SVG_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for stage, spans in enumerate(timeline.spans):
        y = SVG_ROW * (stage + 1)
        parts.append(f'<text x="10" y="{y + 19}">stage {stage}</text>')
        parts += [_rectangle(span, shape, y, scale) for span in spans if span.end > span.start]
    return "\n".join([*parts, _svg_legend(timeline, SVG_ROW * (shape.stages + 1) + 20), "</svg>"]) + "\n"


def _rectangle(span: Span, shape: Shape, y: int, scale: float) -> str:
    instruction = span.instruction
    x, width = SVG_LEFT + span.start * scale, (span.end - span.start) * scale
    label = label_of(instruction, shape)
    colour = FILLS[instruction.op][instruction.part // shape.stages % 2]
    about = (
        f"{NAMES[instruction.op]} of part {instruction.part}, micro-batch {instruction.microbatch}: "
        f"{span.start:g} to {span.end:g}"
    )
    box = (
        f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{SVG_ROW - 4}" fill="{colour}" '
        f'stroke="white"><title>{about}</title></rect>'
    )
    if width < SVG_CHARACTER * len(label):
        return box
    middle = x + width / 2
    return f'{box}<text x="{middle:.2f}" y="{y + 19}" text-anchor="middle" fill="white">{label}</text>'


def _svg_legend(timeline: Timeline, y: int) -> str:
    seen = {span.instruction.op for row in timeline.spans for span in row}
    x, parts = SVG_LEFT, list[str]()
    for op, name in NAMES.items():
        if op in seen:
            parts.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{FILLS[op][0]}"/>')
            parts.append(f'<text x="{x + 20}" y="{y}">{name}</text>')
            x += 150
    return "".join(parts)


def _cell_text(cell: Cell, shape: Shape) -> str:
    assert cell.instruction is not None
    label = label_of(cell.instruction, shape)
    if cell.columns == 1:
        return label[0]
    return label[: cell.columns - 1].ljust(cell.columns - 1, FILL) + " "


def _style(instruction: Instruction, shape: Shape) -> str:
    return STYLES[instruction.op][instruction.part // shape.stages % 2]
