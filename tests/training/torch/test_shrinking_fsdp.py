"""Loops over FSDP2 go on with fewer ranks: the state is divided again, and no sample is lost."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import shrink
from support.processes.kept_lines import Lines
from support.processes.warm_template import template_of

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome
from zbmd.tools.runs.commands import audit_run
from zbmd.training.checkpoint.sharded import read_names
from zbmd.training.run.audit import LoopAudit, Proof
from zbmd.training.run.ledger import LOG_NAME, loss_of, read_log

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

PROGRAM = PROGRAMS / "torch/resilient_fsdp.py"
MIRRORED = PROGRAM.with_name("mirrored.py")


def losses_in(out: Path, ranks: int) -> list[float]:
    """Return the losses of a run whose log proves that each sample of each pass came once."""
    found = audit_run(out)
    assert isinstance(found, LoopAudit) and found.is_whole and found.proves is Proof.SAMPLES, found
    assert found.passes == 2 and not found.passes_unfinished, found
    losses = [loss_of(record) for record in read_log(out / LOG_NAME)[1]]
    assert len(losses) == 2 * 96 // (8 * ranks)
    return losses


@cache
def _undisturbed() -> dict[tuple[str, int], list[float]]:
    return {}


async def undisturbed(out: Path, mode: str, ranks: int) -> list[float]:
    if (mode, ranks) not in _undisturbed():
        _undisturbed()[mode, ranks] = losses_in(*await shrunk(out, mode, "", ranks))
    return _undisturbed()[mode, ranks]


async def shrunk(out: Path, mode: str, fault: str, ranks: int) -> tuple[Path, int]:
    """Run a loop whose ranks are killed: those that are left end with the same parameters and moments."""
    program = MIRRORED if mode.startswith("fsdp+") else PROGRAM
    lines = await shrink(program, fault, ranks, {"MODE": mode, "OUT": str(out), "WHOLE": "1"})
    ends = [line.partition("ends with ")[2] for line in lines if "ends with" in line]
    killed = len(fault.split(",")) if fault else 0
    assert len(ends) == ranks - killed and len(set(ends)) == 1, "\n".join(lines)
    return out, ranks


@pytest.mark.parametrize(
    ("mode", "fault", "ranks"),
    [
        ("plain", "rank1:loop.begin:3", 4),
        ("plain", "rank0:loop.voted:4,rank2:loop.begin:6", 4),
        ("plain", "rank3:loop.prepared:2,rank1:loop.prepared:2", 4),
        ("plain", "rank1:loop.begin:3,rank0:loop.agreed:1", 4),
        ("scaler+fused", "rank2:loop.updated:3,rank1:loop.done:5", 3),
        ("mixed+kept+fused", "rank0:loop.delivered:3", 2),
        ("fsdp+normed", "rank1:test.after_reduce:3,rank3:loop.updated:4", 4),
        ("fsdp+muon", "rank2:loop.mirroring:2", 3),
    ],
)
async def test_a_loop_goes_on_with_those_who_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, fault: str, ranks: int
) -> None:
    """Clipping, a scheduler, accumulation; mirrored updates; also ranks lost while the state is divided."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted = await undisturbed(tmp_path / "whole", mode, ranks)
    losses = losses_in(*await shrunk(tmp_path / "run", mode, fault, ranks))
    first = min(int(each.rpartition(":")[2]) for each in fault.split(",")) - 1
    if "divided" not in fault and "agreed" not in fault:
        assert losses[: first - 1] == wanted[: first - 1]
    assert losses == pytest.approx(wanted, rel=0.02 if "mixed" in mode else 1e-4)


async def test_a_part_that_all_have_received_counts_although_nobody_has_seen_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three dies that have received their parts: the two divide those again."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    more = {"OUT": str(tmp_path / "run"), "WHOLE": "1"}
    fault = "rank1:loop.begin:3,rank0:loop.divided+~rank2:loop.divided+~rank3:loop.divided"
    lines = await shrink(PROGRAM, fault, 4, more)  # rank 0's copy is lost with rank 1
    ends = [line.partition("ends with ")[2] for line in lines if "ends with" in line]
    assert len(ends) == 2 and len(set(ends)) == 1, "\n".join(lines)
    wanted = await undisturbed(tmp_path / "whole", "plain", 4)
    assert losses_in(tmp_path / "run", 4) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("ranks", "fault", "sizes", "ended"),
    [
        (4, "rank2:loop.begin:3+rank3:loop.begin:3", [4, 2], {"0", "1"}),
        (4, "rank1:loop.prepared:2", [4, 2], {"0", "2"}),
        (6, "rank1:loop.begin:3,rank0:loop.begin:5", [6, 3], {"2", "3", "4"}),
    ],
)
async def test_a_hybrid_mesh_goes_on_with_whole_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, fault: str, sizes: list[int], ended: set[str]
) -> None:
    """A whole replica is lost; ranks that are left over wait; one that has waited takes a part."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    if ("hybrid", ranks) not in _undisturbed():
        _undisturbed()["hybrid", ranks] = losses_in(*await shrunk(tmp_path / "whole", "hybrid", "", ranks))
    out = tmp_path / "run"
    lines = await shrink(PROGRAM, fault, ranks, {"MODE": "hybrid", "OUT": str(out), "WHOLE": "1"})
    ends = {line.partition(":")[0]: line.partition("ends with ")[2] for line in lines if "ends with" in line}
    assert ends.keys() == ended and len({*ends.values()}) == 1, "\n".join(lines)
    records = read_log(out / LOG_NAME)[1]
    assert [size for size, _ in itertools.groupby(len(each.members) for each in records)] == sizes
    assert losses_in(out, ranks) == pytest.approx(_undisturbed()["hybrid", ranks], rel=1e-4)


async def test_a_checkpoint_of_fewer_ranks_is_read_by_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four ranks write it; two go on with the parameters and moments."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    out = {"OUT": str(tmp_path / "run"), "WHOLE": "1", "EVERY": "2"}
    lines = await shrink(PROGRAM, "rank2:loop.begin:2", 4, {**out, "EPOCHS": "1"})
    ends = {line.partition("ends with ")[2] for line in lines if "ends with" in line}
    names = read_names(tmp_path / "run")
    assert names.version == 3 and len(names.files) == 3 and len(ends) == 1
    lines = await shrink(PROGRAM, "", 2, {**out, "RESUME": "1", "EPOCHS": "2"})
    assert {line.partition("begins with ")[2] for line in lines if "begins with" in line} == ends
    assert audit_run(tmp_path / "run").is_whole


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("fsdp+cornered", "an optimizer's state 'of ranks' has others: the part of a lost rank could not be"),
        ("ddp+normed", "takes mirror=True over FSDP2 alone"),
    ],
)
async def test_a_mirrored_state_that_no_other_number_of_ranks_can_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, says: str
) -> None:
    """Before an update counts: one whose shape follows from the ranks, and those of DDP, which may differ."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output = Lines()
    config = HostConfig(
        target=str(MIRRORED),
        world_size=2,
        on_loss=OnLoss.SHRINK,
        arena_bytes=32 << 20,
        environment={"MODE": mode, "OUT": str(tmp_path / "run")},
    )
    result = await Host(config, output=output, template=template_of(config)).run()
    told = "\n".join(output.lines)
    assert result.outcome is Outcome.FAILED
    assert re.search(f"on-loss shrink .*{says}", told), told


async def test_a_rank_and_its_buddy_together_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output, fault = Lines(), "rank1:loop.prepared:3+rank2:loop.prepared:3"
    config = HostConfig(
        target=str(PROGRAM),
        world_size=3,
        on_loss=OnLoss.SHRINK,
        arena_bytes=32 << 20,
        environment={"ZBMD_FAULT": fault},
    )
    result = await Host(config, output=output, template=template_of(config)).run()
    assert result.outcome is Outcome.FAILED
    assert re.search("ranks 1 and 2 are lost together", "\n".join(output.lines)), output.lines
