"""Render `docs/BENCHMARKS.md` from `docs/results/*.jsonl`.

    python -m zbmd.tools.dev.bench_docs            write it (`make bench-docs`)
    python -m zbmd.tools.dev.bench_docs --check    exit with 1 if it is not what this renders

Of several figures of one layer and one name, the latest counts. One that is not `shown` stays in its file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, get_args

from zbmd.tools.bench.figures import Figure, Layer, Machine, read_figures
from zbmd.tools.cli.options import exit_code_of, script_parser

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = "docs/results"
PAGE: Final = "docs/BENCHMARKS.md"
INTRODUCTION: Final = """# Benchmarks

`make bench-docs` renders this page from `docs/results/*.jsonl`; `zbmd bench … --record FILE` appends figures
to such a file. Edit the results, not this page.

Figures are medians; peers ran in turn with zbmd in the same run. *Ratio* is how much better zbmd is than
the best peer: above 1, zbmd is ahead. The machines are small, shared and noisy: compare ratios, not absolute
values.
"""
COLUMNS: Final = ("what", "command", "goal", "latest", "best peer", "ratio", "on")


def latest(figures: Iterable[Figure]) -> list[Figure]:
    """Return the latest figure of each (layer, what), in the order in which they first occur."""
    found: dict[tuple[str, str], Figure] = {}
    for figure in figures:
        key = (figure.layer, figure.what)
        if key not in found or figure.date >= found[key].date:
            found[key] = figure
    return list(found.values())


def render(figures: Sequence[Figure]) -> str:
    """Return the page."""
    shown = [figure for figure in latest(figures) if figure.shown]
    machines = list(dict.fromkeys(figure.machine for figure in shown))
    lines = [INTRODUCTION]
    lines += [f"- **{_label(number)}**: {_described(machine)}" for number, machine in enumerate(machines)]
    for layer in get_args(Layer):
        rows = [figure for figure in shown if figure.layer == layer]
        if not rows:
            continue
        lines += ["", f"## {layer.capitalize()}", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [_row(figure, _label(machines.index(figure.machine))) for figure in rows]
    return "\n".join(lines) + "\n"


def _label(number: int) -> str:
    return chr(ord("A") + number)


def _described(machine: Machine) -> str:
    memory = "" if machine.memory_gib is None else f", {machine.memory_gib} GiB"
    kernel = "" if machine.kernel is None else f", Linux {machine.kernel}"
    return f"{machine.cores} cores of {machine.cpu}{memory}{kernel}"


def _row(figure: Figure, machine: str) -> str:
    goal = figure.goal or "–"
    if figure.met is not None:
        goal += ", met" if figure.met else ", **missed**"
    peer = figure.peer or "–"
    if figure.peer_value is not None:
        peer += f" {_number(figure.peer_value)} {figure.unit}"
    ratio = "–" if figure.ratio is None else f"{figure.ratio:.2f}"
    value = f"{_number(figure.value)} {figure.unit}".rstrip()
    load = "" if figure.load is None else f", load {figure.load:g}"
    where = f"{machine}, {figure.date}{load}"
    return f"| {figure.what} | `{figure.command}` | {goal} | {value} | {peer} | {ratio} | {where} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = script_parser("dev.bench_docs", __doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit with 1 if they differ")
    arguments = parser.parse_args(argv)
    figures = [f for path in sorted((ROOT / RESULTS).glob("*.jsonl")) for f in read_figures(path)]
    page, text = ROOT / PAGE, render(figures)
    if not arguments.check:
        page.write_text(text)
        return 0
    if page.read_text() != text:
        print(f"{PAGE} differs from {RESULTS}: run make bench-docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
