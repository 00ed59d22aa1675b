"""`zbmd plan pipeline`: print what a pipeline schedule costs, before anything runs."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

import msgspec
import rich.console
from rich.text import Text

from zbmd.tools.cli.options import add_json
from zbmd.training.pipeline.program import (
    Instruction,
    Op,
    ScheduleError,
    ScheduleFlawed,
    Shape,
    StageProgram,
    format_program,
    parse_programs,
    require_bounds,
)
from zbmd.training.pipeline.schedules import SCHEDULES, activations_max, programs_of
from zbmd.training.pipeline.simulate import Costs, Span, Timeline, simulate
from zbmd.training.pipeline.verifier import verify
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

# A pipeline's step drawn: a row a stage, time from left to right, as text or as SVG.

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
    """The text of a cell: operation, micro-batch, and the chunk where there are several."""
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
    """The meaning of the letters and colours that occur."""
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


COMPUTATIONS_MAX: Final = 1 << 18
"""Of a plan, over all stages: parts by micro-batches."""
PROGRAM_BYTES_MAX: Final = 64 << 20
COSTS: Final = ("F", "B", "W", "comm")

EXAMPLES: Final = """examples:
  zbmd plan pipeline --stages 4 --microbatches 8 --schedule 1f1b
  zbmd plan pipeline --stages 4 --microbatches 8 --schedule 1f1b --chunks 2 --layers 16
  zbmd plan pipeline --stages 4 --microbatches 8 --schedule zb-h1 --costs 1,1,1,0.1 --plot plan.svg
  zbmd plan pipeline --stages 2 --microbatches 4 --programs > plan.txt
  zbmd plan pipeline --read plan.txt              draw programs that were written by hand, if they are right

Costs are of one micro-batch in all layers of a stage, in any unit: forward pass, gradient of the input,
gradient of the weights, and one transfer between stages. A backward pass that is not split takes B + W.
"""


class StagePlan(msgspec.Struct, kw_only=True):
    """One stage of a plan. `spans`: operation, part, micro-batch, start, end."""

    stage: int
    busy: float
    activations_peak: int
    activations_max: int
    spans: list[tuple[str, int, int, float, float]]


class PipelinePlan(msgspec.Struct, kw_only=True):
    """What `--json` prints. Times are in the unit of the costs, `bubble` and `idle` fractions."""

    schedule: str
    stages: int
    chunks: int
    microbatches: int
    layers: list[int] | None
    costs: dict[str, float]
    makespan: float
    bubble: float
    idle: float
    by_stage: list[StagePlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    programs: tuple[StageProgram, ...]
    bounds: tuple[int, ...]
    costs: tuple[float, float, float, float]
    layers: tuple[int, ...] | None
    timeline: Timeline

    @property
    def shape(self) -> Shape:
        return self.programs[0].shape

    @property
    def schedule(self) -> str:
        return self.programs[0].schedule


def add_pipeline(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `pipeline` to the planners of `zbmd plan`."""
    made = kinds.add_parser(
        "pipeline",
        help="print a pipeline schedule's grid and bubble",
        description="Print what each stage of a pipeline does when, and what of it is lost to the bubble.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--stages", type=int, default=4, metavar="N", help="processes (default: %(default)s)")
    made.add_argument(
        "--microbatches",
        type=int,
        default=8,
        metavar="N",
        help="micro-batches of a step (default: %(default)s)",
    )
    made.add_argument("--schedule", default="1f1b", help=f"{', '.join(SCHEDULES)} (default: %(default)s)")
    made.add_argument(
        "--chunks", type=int, default=1, metavar="N", help="parts of a stage (default: %(default)s)"
    )
    made.add_argument(
        "--layers", type=int, metavar="N", help="layers of the model: print how many each part gets"
    )
    made.add_argument(
        "--costs",
        default="1,1,1,0",
        metavar="F,B,W,comm",
        help="costs of a micro-batch (default: %(default)s)",
    )
    made.add_argument("--read", type=Path, metavar="FILE", help="take the programs from FILE")
    made.add_argument("--programs", action="store_true", help="print the programs, not the grid")
    add_json(made)
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the grid, as .svg")
    made.set_defaults(run_command=_pipeline)


def _pipeline(arguments: argparse.Namespace) -> int:
    planned = _planned(arguments)
    if arguments.plot is not None:
        _write_svg(planned, arguments.plot)
    if arguments.programs:
        sys.stdout.write("".join(map(format_program, planned.programs)))
    elif arguments.json:
        print(msgspec.json.encode(_as_json(planned)).decode())
    else:
        _print_grid(planned)
    return 0


def _planned(arguments: argparse.Namespace) -> _Planned:
    costs = _costs(arguments.costs)
    if arguments.read is not None:
        programs = _read(arguments.read)
        shape = programs[0].shape
    else:
        shape = Shape(stages=arguments.stages, chunks=arguments.chunks, microbatches=arguments.microbatches)
        _require_size(shape)
        programs = programs_of(arguments.schedule, shape)
    layers = None
    if arguments.layers is not None:
        from zbmd.training.pipeline.part import layers_of_parts  # it imports the model

        layers = layers_of_parts(arguments.layers, shape)
    bounds = _bounds(programs[0].schedule, shape)
    try:
        verify(programs, activations_max=bounds)
    except ScheduleFlawed as error:
        raise UserError(f"these programs are wrong: {error}.") from None
    forward, input_gradient, weight_gradient, transfer = costs
    per_part = Costs.even(
        shape.parts,
        forward=forward / shape.chunks,
        input_gradient=input_gradient / shape.chunks,
        weight_gradient=weight_gradient / shape.chunks,
        transfer=transfer,
    )
    return _Planned(
        programs=programs,
        bounds=bounds,
        costs=costs,
        layers=layers,
        timeline=simulate(programs, per_part),
    )


def _costs(text: str) -> tuple[float, float, float, float]:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(COSTS) or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise UserError(f"--costs: expected {','.join(COSTS)}, four numbers of at least 0, got {text!r}")
    if not sum(numbers[:3]):
        raise UserError("--costs: expected at least one of F, B and W above 0")
    return numbers[0], numbers[1], numbers[2], numbers[3]


def _require_size(shape: Shape) -> None:
    try:
        require_bounds(shape)
    except ScheduleError as error:
        raise UserError(f"there is no such pipeline: {error}.") from None
    if shape.parts * shape.microbatches > COMPUTATIONS_MAX:
        raise UserError(
            f"{shape.parts:,} parts and {shape.microbatches:,} micro-batches are more than a plan can show "
            f"({COMPUTATIONS_MAX:,} together): ask for fewer of either."
        )


def _read(path: Path) -> tuple[StageProgram, ...]:
    try:
        if path.stat().st_size > PROGRAM_BYTES_MAX:
            raise UserError(f"{path} has more than {PROGRAM_BYTES_MAX >> 20} MiB: it is no pipeline.")
        programs = parse_programs(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ScheduleError, UnicodeDecodeError) as error:
        raise UserError(f"{path} holds no programs: {error}.") from None
    _require_size(programs[0].shape)
    return programs


def _bounds(schedule: str, shape: Shape) -> tuple[int, ...]:
    """The bound of a known schedule; one of another name may hold everything."""
    if schedule in SCHEDULES:
        return activations_max(schedule, shape)
    return (shape.chunks * shape.microbatches,) * shape.stages


def _write_svg(planned: _Planned, path: Path) -> None:
    if path.suffix != ".svg":
        raise UserError(f"--plot: expected a file name that ends in .svg, got {str(path)!r}")
    drawn = svg_of(planned.timeline, planned.shape, " — ".join(_headline(planned)))
    write_atomically(path, lambda file: file.write(drawn.encode()))


def _print_grid(planned: _Planned) -> None:
    screen = rich.console.Console(highlight=False, soft_wrap=True)
    columns = screen.width if screen.is_terminal else COLUMNS_MAX
    title, figures = _headline(planned)
    screen.print(title)
    screen.print()
    for line in text_of(planned.timeline, planned.shape, columns_max=columns):
        screen.print(line)
    screen.print()
    screen.print(legend(planned.timeline))
    screen.print()
    screen.print(figures)
    held = " ".join(map(str, planned.timeline.activations))
    most = " ".join(map(str, planned.bounds))
    screen.print(f"activations held, by stage: {held} (at most {most}), in micro-batches of one part")
    if planned.layers is not None:
        screen.print(f"layers, by part: {' '.join(map(str, planned.layers))}")


def _headline(planned: _Planned) -> tuple[str, str]:
    shape, timeline = planned.shape, planned.timeline
    chunks = f", {shape.chunks} chunks each" if shape.chunks > 1 else ""
    return (
        f"{planned.schedule}: {shape.stages} stages{chunks}, {shape.microbatches} micro-batches",
        f"a step takes {timeline.makespan:g}; bubble {timeline.bubble:.1%} of the work of a stage; "
        f"stages idle {timeline.idle:.1%} of the time",
    )


def _as_json(planned: _Planned) -> PipelinePlan:
    shape, timeline = planned.shape, planned.timeline
    return PipelinePlan(
        schedule=planned.schedule,
        stages=shape.stages,
        chunks=shape.chunks,
        microbatches=shape.microbatches,
        layers=None if planned.layers is None else list(planned.layers),
        costs=dict(zip(COSTS, planned.costs, strict=True)),
        makespan=timeline.makespan,
        bubble=timeline.bubble,
        idle=timeline.idle,
        by_stage=[
            StagePlan(
                stage=stage,
                busy=timeline.busy[stage],
                activations_peak=timeline.activations[stage],
                activations_max=planned.bounds[stage],
                spans=[
                    (s.instruction.op.value, s.instruction.part, s.instruction.microbatch, s.start, s.end)
                    for s in spans
                ],
            )
            for stage, spans in enumerate(timeline.spans)
        ],
    )
