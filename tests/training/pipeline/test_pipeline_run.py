"""A model trained by the stages of a pipeline, in real processes: the bits of one process alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from zbmd.actors.host.events import HostEvent
from zbmd.actors.host.supervisor import Host, HostConfig
from zbmd.actors.process.output import OutputLine
from zbmd.actors.rank.environment import LINKS_VARIABLE
from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.training import __main__ as training
from zbmd.training.pipeline_job import PipelineResult, main
from zbmd.training.replicated.job import JobResult, run_plain
from zbmd.transport import kill_points as faults

SHAPE = ("--width", "32", "--heads", "2", "--layers", "3", "--context", "16", "--shards", "5", "--steps", "3")


@dataclass(slots=True)
class Heard:
    """What the ranks of a run wrote."""

    lines: list[str] = field(default_factory=list[str])
    deaths: int = 0

    async def write_line(self, line: OutputLine) -> None:
        self.lines.append(line.text.decode(errors="replace"))

    async def __call__(self, event: HostEvent) -> None:
        pass

    def result(self) -> PipelineResult:
        text = next((line for line in self.lines if line.startswith("{")), "")
        assert text, "\n".join(self.lines)
        return msgspec.json.decode(text, type=PipelineResult)


async def pipeline(
    directory: Path, data: Path, ranks: int, *options: str, fault: str = "", links: str = "auto"
) -> Heard:
    heard = Heard()
    config = HostConfig(
        target="zbmd.training.pipeline_job",
        is_module=True,
        arguments=(*SHAPE, "--data", str(data), "--out", str(directory), *options),
        world_size=ranks,
        on_loss=OnLoss.REPLACE,
        environment={faults.FAULT_VARIABLE: fault, LINKS_VARIABLE: links},
        preload=("zbmd.training.sharded.trainer",),
    )
    heard.deaths = len((await Host(config, output=heard, observer=heard).run()).failures)
    return heard


def plainly(directory: Path, data: Path) -> JobResult:
    arguments = training.parser().parse_args([*SHAPE, "--data", str(data), "--out", str(directory)])
    return run_plain(training.options_of(arguments))


async def test_stages_end_with_the_bits_of_one_process(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    wanted = plainly(tmp_path / "plain", data)
    for ranks, links, options in (
        (3, "auto", ("--schedule", "zb-h1")),
        (2, "tcp", ("--chunks", "2")),
    ):
        heard = await pipeline(tmp_path / links, data, ranks, *options, links=links)
        found = heard.result()
        assert (found.weights_sha256, found.loss_last) == (wanted.weights_sha256, wanted.loss_last), links
        assert (found.stages, sum(found.layers)) == (ranks, 5)


def test_parts_of_one_stage_hand_over_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_text(tmp_path / "text")
    wanted = plainly(tmp_path / "plain", data)
    options = ("--schedule", "gpipe", "--chunks", "3")
    assert main([*SHAPE, "--data", str(data), "--out", str(tmp_path / "run"), *options]) == 0
    found = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1], type=PipelineResult)
    assert (found.weights_sha256, found.stages, len(found.layers)) == (wanted.weights_sha256, 1, 3)


async def test_a_stage_that_is_killed_comes_back_with_its_layers(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    wanted = plainly(tmp_path / "plain", data)
    heard = await pipeline(tmp_path / "run", data, 3, fault="rank1:pipeline.compute:7")
    found = heard.result()
    assert (found.weights_sha256, found.loss_last) == (wanted.weights_sha256, wanted.loss_last)
    assert heard.deaths == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--schedule", "zb-h1", "--chunks", "2"), "has one chunk a stage, not 2"),
        (("--schedule", "x"), "choose from gpipe, 1f1b"),
        (("--chunks", "9"), "cannot divide 5 layers into 9 parts"),
        (("--chunks", "0"), "--chunks is 0"),
        (("--plain",), "omit --resume and --plain"),
    ],
)
def test_bad_input_is_told_in_words(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_text(tmp_path / "text")
    assert main([*SHAPE, "--data", str(data), "--out", str(tmp_path / "run"), *options]) == 2
    assert said in capsys.readouterr().err
