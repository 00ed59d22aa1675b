"""Figures of benchmarks: recorded as JSON lines, and rendered as docs/BENCHMARKS.md."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from zbmd.tools.bench.figures import Figure, Machine, append_figures, read_figures
from zbmd.tools.bench.result import BenchResult, Measurement, figures, this_machine
from zbmd.tools.bench.stats import Ratio
from zbmd.tools.dev import bench_docs
from zbmd.transport.errors import UserError

LINES_MAX = 150
MACHINE = Machine(cpu="a processor", cores=2, memory_gib=8, kernel="6.1")


def figure(what: str, value: float, date: str) -> Figure:
    return Figure(
        layer="transport",
        what=what,
        command="zbmd bench p2p",
        value=value,
        unit="µs",
        goal="≤ 2 µs",
        met=value <= 2,
        machine=MACHINE,
        date=date,
        version="0.1.0",
    )


def measured(who: str, time_us: float, ratio: Ratio | None = None) -> Measurement:
    return Measurement(
        case="p2p-arena",
        who=who,
        size_bytes=1024,
        samples=10,
        time_us_p50=time_us,
        time_us_p99=time_us,
        time_ratio=ratio,
    )


def test_the_page_is_what_the_results_render() -> None:
    assert bench_docs.main(["--check"]) == 0
    assert len((bench_docs.ROOT / bench_docs.PAGE).read_text().splitlines()) <= LINES_MAX


def test_the_latest_figure_of_a_name_is_shown_with_its_goal() -> None:
    page = bench_docs.render(
        [figure("a", 1, "2026-01-01"), figure("a", 3, "2026-01-02"), figure("b", 1, "2026-01-01")]
    )
    rows = [line for line in page.splitlines() if line.startswith(("| a", "| b"))]
    assert rows == [
        "| a | `zbmd bench p2p` | ≤ 2 µs, **missed** | 3 µs | – | – | A, 2026-01-02 |",
        "| b | `zbmd bench p2p` | ≤ 2 µs, met | 1 µs | – | – | A, 2026-01-01 |",
    ]
    assert "**A**: 2 cores of a processor, 8 GiB, Linux 6.1" in page


def test_a_figure_that_is_one_of_many_alike_stays_in_its_file(tmp_path: Path) -> None:
    one = msgspec.structs.replace(figure("a", 1, "2026-01-01"), shown=False)
    append_figures(tmp_path / "results.jsonl", [one, figure("b", 1, "2026-01-01")])
    assert (found := read_figures(tmp_path / "results.jsonl"))[0] == one
    assert [line[:3] for line in bench_docs.render(found).splitlines() if line.startswith("| ")][1:] == [
        "| b"
    ]


def test_a_result_becomes_figures_beside_the_best_peer(tmp_path: Path) -> None:
    half = Ratio(value=0.5, low=0.4, high=0.6)
    result = BenchResult(
        benchmark="p2p",
        command="zbmd bench p2p --vs mpich",
        date="2026-01-01",
        machine=this_machine(),
        transport="shm",
        rounds=1,
        rows=[measured("zbmd", 2), measured("openmpi", 5), measured("mpich", 4, half)],
    )
    path = tmp_path / "results.jsonl"
    append_figures(path, figures(result))
    append_figures(path, figures(result))
    first, second = read_figures(path)
    assert first == second
    assert (first.layer, first.what) == ("transport", "p2p-arena, 1K, over shm")
    assert (first.value, first.unit, first.peer, first.peer_value, first.ratio) == (2, "µs", "mpich", 4, 2)
    assert first.machine.cores >= 1 and first.command == "zbmd bench p2p --vs mpich"


def test_a_line_that_is_no_figure_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"{}\n")
    with pytest.raises(UserError, match=r"results.jsonl:1: expected a figure"):
        read_figures(path)
    with pytest.raises(UserError, match="cannot be written"):
        append_figures(tmp_path, [])
