"""Resilient loops over FSDP2: a killed rank gets its shard from its buddy, and no bit differs."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from support.jobs.resilient_loops import (
    check_as_undisturbed,
    steps_in,
    survives_a_stop,
    takes_a_spare,
    train,
)
from support.processes.kept_lines import Lines
from support.processes.warm_template import template_of

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import Outcome
from zbmd.training.torch.ballots import DIGEST_EVERY

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

PROGRAM = Path(__file__).parents[3] / "programs" / "torch" / "resilient_fsdp.py"
MIRRORED = PROGRAM.with_name("mirrored.py")
STEPS = 8


@cache
def _undisturbed() -> dict[tuple[str, int], frozenset[str]]:
    return {}


async def undisturbed(mode: str, ranks: int, program: Path = PROGRAM) -> frozenset[str]:
    kept, mode = _undisturbed(), mode.removesuffix("+unseen")
    if (mode, ranks) not in kept:
        result, lines = await train(program, mode, ranks=ranks)
        assert result.outcome is Outcome.SUCCEEDED and result.restarts == 0, "\n".join(lines)
        kept[mode, ranks] = frozenset(steps_in(lines))
        assert len(kept[mode, ranks]) == ranks * (STEPS * 3 // ranks + 1)
    return kept[mode, ranks]


@pytest.mark.parametrize(
    ("mode", "fault", "ranks"),
    [
        ("plain", "rank2:loop.begin:1+~rank0:loop.begin:1", 3),  # whose buddy has its copy
        ("plain", "rank0:loop.prepared:3", 3),
        ("plain", "rank1:loop.delivered:4", 3),
        ("plain", "rank2:loop.voted:2", 3),
        ("plain", "rank0:loop.updated:5", 3),
        ("plain", "rank1:loop.done:8", 3),
        ("plain+unseen", "rank1:loop.voted:6", 3),
        ("plain", "rank1:loop.begin:5,rank1#2:loop.take:1", 3),
        ("plain", "rank1:loop.begin:5,rank1#2:loop.begin:1,rank0:loop.begin:8", 3),
        ("plain", "rank0:loop.prepared:4,rank2:loop.prepared:4", 4),
        ("fused", "rank1:loop.delivered:6", 3),
        ("momentum", "rank0:loop.voted:7", 3),
        ("mixed+every", "rank2:loop.prepared:4", 3),
        ("kept+every", "rank0:loop.begin:4", 3),
        ("scaler+fused", "rank1:loop.updated:2", 3),
        ("hybrid", "rank3:loop.delivered:2", 4),
        ("hybrid", "rank0:loop.prepared:3,rank1:loop.prepared:3", 4),
        ("plain", "rank1:loop.prepared:4", 2),
    ],
)
async def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, fault: str, ranks: int
) -> None:
    """Losses, rates, samples and scales of every step, once each on those who live; the final shards."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted = await undisturbed(mode, ranks)
    result, lines = await train(PROGRAM, mode, fault, ranks)
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert result.restarts == len(fault.split(","))
    check_as_undisturbed(steps_in(lines), wanted, fault)
    if "unseen" in mode:
        assert any("as if the votes had not come" in line for line in lines), "rank 0 has seen the votes"


@pytest.mark.parametrize(
    ("mode", "fault", "ranks"),
    [
        ("fsdp+normed", "rank1:test.before_reduce:2", 3),  # the first is that of a trial
        ("fsdp+normed", "rank2:test.after_reduce:3,rank0:loop.voted:6", 3),
        ("hybrid+muon", "rank3:test.after_reduce:5", 4),
        ("ddp+normed", "rank0:loop.delivered:2", 3),
        ("ddp+normed+exact", "rank1:test.after_reduce:1", 2),
    ],
)
async def test_an_update_that_communicates_is_made_by_all_or_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, fault: str, ranks: int
) -> None:
    """Ranks are killed in `optimizer.step()`, before and after its all-reduce, and about the vote behind it.

    Two optimizers, moments of their own kinds, an attribute that counts; DDP with moments of each rank.
    """
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted = await undisturbed(mode, ranks, program=MIRRORED)
    result, lines = await train(MIRRORED, mode, fault, ranks)
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert result.restarts == len(fault.split(","))
    check_as_undisturbed(steps_in(lines), wanted, fault)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("rank0:loop.prepared:4+rank1:loop.prepared:4", r"ranks 0 and 1 are lost together"),
        ("rank1:loop.begin:5,rank2:loop.give:2", r"ranks 1 and 2 are lost together"),
        ("rank0:loop.give:1", r"rank 0 is lost before rank 1 had a copy of its shard"),
    ],
)
async def test_a_rank_and_its_buddy_together_end_the_run_with_a_word_of_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    result, lines = await train(PROGRAM, "plain", fault)
    assert result.outcome is Outcome.FAILED
    assert re.search(says, "\n".join(lines)), "\n".join(lines)
    assert "from its last checkpoint" in "\n".join(lines)


async def test_what_cannot_be_copied_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output = Lines()
    config = HostConfig(target=str(PROGRAM.with_name("refused_fsdp.py")), world_size=2, arena_bytes=32 << 20)
    result = await Host(config, output=output, template=template_of(config)).run()
    told = "\n".join(output.lines)
    assert result.outcome is Outcome.SUCCEEDED, told
    for words in (
        "attribute: Hoarding keeps tensors in its attribute 'kept'",
        "outside: Hidden keeps its parameters outside of param_groups",
        r"late: UserError: an optimizer communicates in step\(\): .* mirror=True",
        "tensor parallel: weight is a DTensor",
    ):
        assert re.search(words, told), told


@pytest.mark.parametrize(
    ("what", "after", "owner", "keeper"), [("shard", 0, 1, 2), ("copy", 10, 0, 1), ("moment", 60, 0, 1)]
)
async def test_a_shard_and_a_copy_that_differ_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, after: int, owner: int, keeper: int
) -> None:
    """A bit is enough; the ranks and the parameter are named, on all, before a recovery could use it."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output = Lines()
    program = str(PROGRAM.parent / "differing/fsdp.py")
    config = HostConfig(target=program, arguments=(what, str(after)), world_size=3, arena_bytes=32 << 20)
    result = await Host(config, output=output, template=template_of(config)).run()
    version = 0 if after == 0 else DIGEST_EVERY
    words = (
        rf"after {version} steps: 0\.1\.weight: the shard of rank {owner} and its copy on rank {keeper} "
        rf"are not the same in version {version}"
    )
    told = [line for line in output.lines if re.search(words, line)]
    assert result.outcome is Outcome.SUCCEEDED and len(told) == 3, output.lines


async def test_a_spare_takes_the_place_of_a_killed_rank_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    await takes_a_spare(PROGRAM, tmp_path, await undisturbed("plain", 3))


async def test_a_rank_that_is_stopped_is_named_and_replaced_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    await survives_a_stop(PROGRAM, await undisturbed("plain", 3))
