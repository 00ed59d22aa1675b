"""Logical shares of a batch: the bits do not depend on the number of ranks, and loops go on with fewer."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import shrink, train
from support.processes.kept_lines import Lines
from support.processes.warm_template import template_of

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import Outcome
from zbmd.tools.runs.commands import audit_run
from zbmd.training.run.audit import LoopAudit, Proof
from zbmd.training.run.ledger import LOG_NAME, loss_of, read_log

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

PROGRAM = PROGRAMS / "torch/recorded_loop.py"


def losses_in(out: Path) -> list[float]:
    return [loss_of(record) for record in read_log(out / LOG_NAME)[1]]


def ends_in(lines: list[str]) -> set[str]:
    """Return the digests of the parameters that ranks end with."""
    return {line.partition("ends with ")[2] for line in lines if "ends with " in line}


def require_whole(out: Path) -> None:
    """The log proves that each sample of each pass came once."""
    found = audit_run(out)
    assert isinstance(found, LoopAudit) and found.is_whole and found.proves is Proof.SAMPLES, found
    assert found.passes == 2 and not found.passes_unfinished, found


@cache
def _kept() -> dict[str, tuple[list[float], set[str]]]:
    return {}


async def of_four(out: Path) -> tuple[list[float], set[str]]:
    """Return the losses and the end of four ranks with a share each."""
    if "four" not in _kept():
        more = {"OUT": str(out), "EXACT": "4"}
        result, lines = await train(PROGRAM, "plain", ranks=4, more=more)
        assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
        require_whole(out)
        _kept()["four"] = (losses_in(out), ends_in(lines))
        assert len(ends_in(lines)) == 1 and len(losses_in(out)) == 6
    return _kept()["four"]


@pytest.mark.parametrize(
    ("ranks", "fault"), [(2, ""), (3, ""), (1, ""), (3, "rank1:loop.begin:5,rank0:loop.voted:4")]
)
async def test_any_number_of_ranks_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, fault: str
) -> None:
    """With dropout and clipping; ranks are killed between two shares of one step, and after a commit."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted = await of_four(tmp_path / "four")
    out = tmp_path / "run"
    result, lines = await train(PROGRAM, "plain", fault, ranks=ranks, more={"OUT": str(out), "EXACT": "4"})
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert result.restarts == len(fault.split(",")) * bool(fault)
    assert (losses_in(out), ends_in(lines)) == wanted
    require_whole(out)


async def test_another_number_of_ranks_goes_on_in_the_middle_of_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted, out = await of_four(tmp_path / "four"), tmp_path / "run"
    more = {"OUT": str(out), "EXACT": "4", "SAVE": "2"}
    fault = "+".join(f"rank{rank}:loop.begin:4" for rank in range(4))
    result, lines = await train(PROGRAM, "plain", fault, 4, more)
    assert result.outcome is Outcome.FAILED, "\n".join(lines)
    result, lines = await train(PROGRAM, "plain", ranks=2, more={**more, "RESUME": "1"})
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert (losses_in(out), ends_in(lines)) == wanted
    require_whole(out)


@pytest.mark.parametrize(
    ("fault", "exact"),
    [
        ("rank2:loop.begin:3", "4"),
        ("rank0:loop.voted:4,rank3:loop.begin:6", "4"),
        ("rank1:loop.prepared:2", "0"),
    ],
)
async def test_a_loop_goes_on_with_those_who_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, exact: str
) -> None:
    """They deal the samples of the lost ranks among them: with `exact`, no bit differs; else the rounding."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    losses, ends = await of_four(tmp_path / "four")
    lines = await shrink(PROGRAM, fault, 4, {"OUT": str(tmp_path / "run"), "EXACT": exact})
    assert sum("ends with" in line for line in lines) == 4 - len(fault.split(","))
    assert len(ends_in(lines)) == 1
    if exact == "4":
        assert (losses_in(tmp_path / "run"), ends_in(lines)) == (losses, ends)
    else:
        assert losses_in(tmp_path / "run") == pytest.approx(losses, rel=1e-4)
    require_whole(tmp_path / "run")


async def test_what_cannot_be_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output = Lines()
    program = str(PROGRAM.with_name("refused_shares.py"))
    config = HostConfig(target=program, world_size=2, arena_bytes=32 << 20)
    result = await Host(config, output=output, template=template_of(config)).run()
    told = "\n".join(output.lines)
    assert result.outcome is Outcome.SUCCEEDED, told
    for words in (
        "plain: exact=4 takes models in DistributedDataParallel",
        "static: exact=4 has no static_graph",
        "many: 2 ranks for 1 shares of a batch",
        "in order: DataLoader: several shares of a batch .* DistributedSampler",
        "statistics: exact=4, and a step changes the buffer .*running_mean",
    ):
        assert len(re.findall(words, told)) == 2, told
