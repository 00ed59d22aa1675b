"""A model trained by the stages of a pipeline, in real processes: the bits of one process alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from support.jobs.by_words import plain_by

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent
from zbmd.actors.process.output import OutputLine
from zbmd.actors.rank.environment import LINKS_VARIABLE
from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.train.command import recipe_of
from zbmd.training.sharded.run import train
from zbmd.training.sharded.task import TrainResult
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

SHAPE = ("--width", "32", "--heads", "2", "--layers", "3", "--context", "16", "--shards", "5", "--steps", "3")


@dataclass(slots=True)
class Heard:
    """The files of a run's ranks."""

    lines: list[str] = field(default_factory=list[str])
    deaths: int = 0

    async def write_line(self, line: OutputLine) -> None:
        self.lines.append(line.text.decode(errors="replace"))

    async def __call__(self, event: HostEvent) -> None:
        pass

    def result(self) -> TrainResult:
        text = next((line for line in self.lines if line.startswith("{")), "")
        assert text, "\n".join(self.lines)
        return msgspec.json.decode(text, type=TrainResult)


async def pipeline(
    directory: Path, data: Path, ranks: int, *options: str, fault: str = "", links: str = "auto"
) -> Heard:
    heard = Heard()
    shared = (*SHAPE, "--data", str(data), "--out", str(directory), "--balance", "on")
    recipe = recipe_of((*shared, "--mesh", f"pp={ranks}", *options), ranks=ranks)
    config = HostConfig(
        target="zbmd.training.sharded",
        is_module=True,
        arguments=(recipe.encode(),),
        world_size=ranks,
        on_loss=OnLoss.REPLACE,
        environment={faults.FAULT_VARIABLE: fault, LINKS_VARIABLE: links},
        preload=("zbmd.training.sharded.run",),
    )
    heard.deaths = len((await Host(config, output=heard, observer=heard).run()).failures)
    return heard


def plainly(directory: Path, data: Path) -> TrainResult:
    return plain_by([*SHAPE, "--data", str(data), "--out", str(directory)])


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
        assert sum(found.layers) == 5 and len(found.layers) % ranks == 0
        assert found.bubble_of_times is not None and found.bubble is not None


async def test_parts_of_one_stage_hand_over_in_memory(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    wanted = plainly(tmp_path / "plain", data)
    options = ("--mesh", "pp=1", "--balance", "on", "--schedule", "gpipe", "--chunks", "3")
    found = await train(recipe_of([*SHAPE, "--data", str(data), "--out", str(tmp_path / "run"), *options]))
    assert found is not None
    assert (found.weights_sha256, len(found.layers)) == (wanted.weights_sha256, 3)


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
        (("--schedule", "x"), "--schedule: expected one of gpipe, 1f1b"),
        (("--chunks", "9"), "cannot divide 5 layers into 9 parts"),
        (("--chunks", "0"), "chunks is 0"),
    ],
)
async def test_bad_input_is_told_in_words(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    shared = (
        *SHAPE,
        "--data",
        str(data),
        "--out",
        str(tmp_path / "run"),
        "--mesh",
        "pp=1",
        "--balance",
        "on",
    )
    with pytest.raises(UserError, match=said):
        await train(recipe_of([*shared, *options]))
