"""`zbmd plan pipeline`: the grid, the bubble, JSON, SVG, programs there and back, and bad input in words."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.tools.entry.zbmd import main
from zbmd.tools.plan.pipeline import PipelinePlan, grid, text_of
from zbmd.training.pipeline.program import Op, Shape
from zbmd.training.pipeline.schedules import SCHEDULES, programs_of
from zbmd.training.pipeline.simulate import Costs, simulate

SVG = "{http://www.w3.org/2000/svg}"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "pipeline", *arguments]) == 0
    return capsys.readouterr().out


def test_the_grid_of_1f1b_is_the_one_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "--stages", "2", "--microbatches", "3", "--layers", "4").splitlines()
    assert lines[0] == "1f1b: 2 stages, 3 micro-batches"
    assert lines[2:4] == [
        "stage 0  F0 F1 ······B0─── F2 B1─── ···B2─── ",
        "stage 1  ···F0 B0─── F1 B1─── F2 B2─── ······",
    ]
    assert "bubble 33.3% of the work of a stage" in lines[-3]
    assert lines[-2].startswith("activations held, by stage: 2 1 (at most 2 1)")
    assert lines[-1] == "layers, by part: 2 2"


def test_json_has_what_the_grid_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--schedule", "zb-h1", "--stages", "4", "--microbatches", "8", "--json")
    plan = msgspec.json.decode(text, type=PipelinePlan)
    assert (plan.makespan, plan.bubble, len(plan.by_stage)) == (27.0, 0.125, 4)
    assert [stage.activations_peak for stage in plan.by_stage] == [4, 4, 4, 4]
    assert plan.by_stage[1].spans[0] == ("F", 1, 0, 1.0, 2.0)


def test_the_svg_has_a_box_for_each_computation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    run(capsys, "--stages", "3", "--microbatches", "4", "--chunks", "2", "--plot", str(picture))
    boxes = ElementTree.parse(picture).getroot().findall(f"{SVG}rect/{SVG}title")
    assert len(boxes) == 2 * 3 * 2 * 4
    assert boxes[0].text == "forward of part 0, micro-batch 0: 0 to 0.5"


def test_programs_are_printed_changed_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--stages", "2", "--microbatches", "4")
    path = tmp_path / "plan.txt"
    path.write_text(run(capsys, *size, "--programs"))
    assert run(capsys, "--read", str(path)) == run(capsys, *size)
    by_hand = path.read_text().replace("pipeline 1f1b", "pipeline by-hand")
    path.write_text(by_hand.replace("0RECV_B0 0B0 0F2 0SEND_F2", "0F2 0SEND_F2 0RECV_B0 0B0"))
    assert "activations held, by stage: 3 1 (at most 4 4)" in run(capsys, "--read", str(path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--layers", "10", "--chunks", "2"), "10 layers do not divide over 4 stages of 2 chunks"),
        (("--layers", "0"), "such as 4"),
        (("--schedule", "x"), 'unknown pipeline schedule "x"; choose from gpipe, 1f1b, zb-h1'),
        (("--schedule", "zb-h1", "--chunks", "2"), "zb-h1 has one chunk a stage"),
        (("--stages", "0"), "stages is 0: it must be 1 to 1024"),
        (("--microbatches", "-1"), "microbatches is -1"),
        (("--stages", "1000", "--microbatches", "60000"), "more than a plan can show"),
        (("--costs", "1,2"), "four numbers"),
        (("--costs", "1,2,nan,0"), "four numbers"),
        (("--costs", "0,0,0,1"), "--costs: expected at least one of F, B and W above 0"),
        (("--plot", "plan.png"), "expected a file name that ends in .svg"),
        (("--read", "/nowhere/plan.txt"), "cannot be read: No such file"),
    ],
)
def test_bad_input_is_told_in_words(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "pipeline", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_wrong_programs_are_refused_by_place_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.txt"
    text = run(capsys, "--stages", "2", "--microbatches", "2", "--programs")
    for wrong, said in (
        (text.replace("0SEND_F1", ""), "stage 0, at its end: never done: 0SEND_F1"),
        (text.replace("0SEND_F1", "0SENDF1"), "line 2: '0SENDF1' is not an instruction"),
        (text + text, "4 programs and 2 bounds for 2 stages"),
        ("", "begins with its header line"),
    ):
        path.write_text(wrong)
        assert main(["plan", "pipeline", "--read", str(path)]) == 2
        assert said in capsys.readouterr().err


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    costs=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    columns=st.integers(40, 400),
)
def test_every_row_is_as_long_as_the_step_and_fits(
    name: str, stages: int, microbatches: int, costs: list[float], columns: int
) -> None:
    shape = Shape(stages=stages, chunks=1, microbatches=microbatches)
    forward, input_gradient, weight_gradient, transfer = costs
    timeline = simulate(
        programs_of(name, shape),
        Costs.even(
            shape.parts,
            forward=forward,
            input_gradient=input_gradient,
            weight_gradient=weight_gradient,
            transfer=transfer,
        ),
    )
    rows = grid(timeline, shape, columns_max=columns)
    assert len({sum(cell.columns for cell in row) for row in rows}) == 1
    forwards = [
        cell for cell in rows[0] if cell.instruction is not None and cell.instruction.op is Op.FORWARD
    ]
    assert len(forwards) <= microbatches
    assert max(len(line.plain) for line in text_of(timeline, shape, columns_max=columns)) <= columns
