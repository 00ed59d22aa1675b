"""Runs of scripts with a resilient loop, and what their ranks print of steps and of their final state."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from support.processes.kept_lines import Lines
from support.processes.warm_template import template_of, warm_templates
from zbmd.actors.cluster.jobs.host import Host, HostConfig, RunResult
from zbmd.actors.cluster.jobs.reports import HostEvent, Observer, RankStarted, SpareReady
from zbmd.actors.hangs.verdict import HangNotice, OnHang
from zbmd.actors.rank.environment import SPARE_RANKS_VARIABLE
from zbmd.actors.view import OnLoss, Outcome
from zbmd.tools.chaos.loops import difference
from zbmd.tools.chaos.loops import reports_in as steps_in

PRELOAD: Final = ("torch", "torch._dynamo", "zbmd.training.torch.resilient")
"""Also the points at which tests kill ranks that write checkpoints."""
SECOND_NS: Final = 1_000_000_000
__all__ = ["check_as_undisturbed", "shrink", "steps_in", "survives_a_stop", "takes_a_spare", "train", "warm"]


@pytest.fixture(scope="session", autouse=True)
def warm() -> Generator[None]:
    """Fork the templates of runs from one process, which has imported PyTorch and all of PRELOAD."""
    with warm_templates(PRELOAD, needs="torch"):
        yield


class Became(NamedTuple):
    """The start of a rank again."""

    rank: int
    was_spare: bool


async def train(
    program: Path,
    mode: str,
    fault: str = "",
    ranks: int = 3,
    more: Mapping[str, str] | None = None,
    *,
    preload: Sequence[str] = (),
    observer: Observer | None = None,
    **options: Any,
) -> tuple[RunResult, list[str]]:
    """Return how the run ended, and what its ranks printed. fault: of `ZBMD_FAULT`. more: variables.

    preload: modules that are imported before ranks are forked, beside PyTorch's. observer: of the host.
    options: more of `HostConfig`.
    """
    variables = {"MODE": mode, **({"ZBMD_FAULT": fault} if fault else {}), **(more or {})}
    output = Lines()
    config = HostConfig(
        target=str(program),
        world_size=ranks,
        on_loss=OnLoss.REPLACE,
        arena_bytes=32 << 20,
        environment=variables,
        preload=(*PRELOAD, *preload),
        **options,
    )
    host = Host(config, output=output, observer=observer, template=template_of(config))
    return await host.run(), output.lines


async def takes_a_spare(program: Path, folder: Path, wanted: Collection[str]) -> None:
    """Check that a spare becomes the rank that is killed, and all ends as `wanted`: an undisturbed run.

    All ranks wait for the spare, in a step before that of the kill.
    """
    fault = "rank1:loop.voted:6"
    became, waits = list[Became](), folder / "waits"

    async def observe(event: HostEvent) -> None:
        if isinstance(event, SpareReady):
            waits.touch()
        if isinstance(event, RankStarted) and event.incarnation > 1:
            became.append(Became(event.rank, event.was_spare))

    result, lines = await train(
        program,
        "plain",
        fault,
        more={"AWAITS": str(waits), SPARE_RANKS_VARIABLE: "1"},
        observer=observe,
        recovery_budget_ns=20 * SECOND_NS,  # within it a spare has to answer, on a machine that is busy
    )
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert became == [(1, True)], became
    check_as_undisturbed(steps_in(lines), wanted, fault)


async def survives_a_stop(program: Path, wanted: frozenset[str]) -> None:
    """Check that rank 1, which is stopped in a step, is named and replaced, and all ends as `wanted`.

    Another one that is slow may be named and replaced as well, which changes nothing either.
    """
    named = set[int]()

    async def observe(event: HostEvent) -> None:
        if isinstance(event, HangNotice):
            named.update(culprit for culprit, _ in event.culprits)

    result, lines = await train(
        program,
        "plain",
        more={"STOPS": "1"},
        observer=observe,
        progress_deadline_ns=3 * SECOND_NS,
        on_hang=OnHang.REPLACE,
        max_restarts=20,
    )
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    told, final = set(steps_in(lines)), {line for line in wanted if line.startswith("final")}
    assert 1 in named and result.restarts and told <= wanted and final <= told, sorted(told - wanted)


async def shrink(program: Path, fault: str, ranks: int, more: Mapping[str, str]) -> list[str]:
    """Return what is printed by a run that goes on without the ranks that are killed."""
    output = Lines()
    config = HostConfig(
        target=str(program),
        world_size=ranks,
        on_loss=OnLoss.SHRINK,
        arena_bytes=32 << 20,
        environment={**more, **({"ZBMD_FAULT": fault} if fault else {})},
        preload=PRELOAD,
    )
    result = await Host(config, output=output, template=template_of(config)).run()
    told = "\n".join(output.lines)
    assert result.outcome is Outcome.SUCCEEDED and result.restarts == 0, told
    return output.lines


def check_as_undisturbed(told: Collection[str], wanted: Collection[str], fault: str) -> None:
    """Check the reports of a run with kills beside those of one without.

    Each is there once, and none is another; those of ranks that live are all there, and so are the last ones.
    """
    wrong = difference(told, wanted, fault)
    assert not wrong, wrong
