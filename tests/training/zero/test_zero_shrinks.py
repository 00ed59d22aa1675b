"""ZeRO under a host that does not replace the dead: the state is recut, and the bits stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs.small_jobs import SmallJobs
from support.processes.captures import Captures

from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import write_text
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.optim.mixed_precision import Precision
from zbmd.training.zero.layout import ShardLayout
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

CASES: tuple[tuple[int, int, Precision, str], ...] = (
    (3, 3, "float32", "rank1:job.begin:3"),
    (1, 3, "float32", "rank0:mirror.commit:3"),
    (2, 3, "float16", "rank2:zero.updated:2"),
    (3, 4, "float32", "rank1:zero.update:3,rank3:mirror.divide"),
    (2, 4, "float32", "rank0:job.begin:4,rank2:mirror.reshard_middle"),
    (1, 4, "float32", "rank3:mirror.commit:2,rank1:mirror.resharded"),
    (3, 4, "float32", "rank2:job.begin:4,rank0:mirror.forget"),
    (3, 2, "float32", "rank0:job.begin:3"),
)


def test_a_run_that_shrinks_ends_with_the_same_bits(
    small_jobs: SmallJobs, tmp_path: Path, captures: Captures
) -> None:
    data = write_text(tmp_path / "text")
    calm = {}
    for precision in ("float32", "float16"):
        found = small_jobs.run(tmp_path / precision, data, mesh="dp=1", world_size=1, precision=precision)
        calm[precision] = found.digest
    for number, (stage, ranks, precision, fault) in enumerate(CASES):
        captured = captures.into(tmp_path / f"{number}.zlog")
        found = small_jobs.run(
            tmp_path / str(number),
            data,
            fault=fault,
            zero=stage,
            mesh=f"dp={ranks}",
            world_size=ranks,
            precision=precision,
            on_loss=OnLoss.SHRINK,
        )
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == calm[precision], fault
        exit_code, kinds = captures.played(captured)
        assert (exit_code, kinds >= {"zero-step", "resizing-mirror"}) == (0, True), (fault, kinds)


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=9),
    ranks=st.integers(1, 6),
    parts=st.integers(1, 6),
)
def test_a_part_is_made_up_of_those_of_another_cut(sizes: list[int], ranks: int, parts: int) -> None:
    """Every element comes from one place, and the rest is padding."""
    layout = ParameterLayout.of({str(number): (size,) for number, size in enumerate(sizes)})
    middle = (len(sizes) + 1) // 2
    groups = [slice(0, middle), slice(middle, len(sizes))] if middle < len(sizes) else [slice(0, middle)]
    new = ShardLayout.of(layout, tuple(groups), ranks=ranks)
    old, flat = new.recut(parts), np.arange(1, layout.size + 1, dtype=np.float32)
    whole = np.zeros_like(flat)
    for slot in layout.slots:
        whole[slot.span] = flat[slot.span]
    shards = [old.shard_of(whole, part) for part in range(parts)]
    for rank in range(ranks):
        made = np.zeros(new.shard_size, np.float32)
        for part, start, length, into in new.spans_from(old, rank):
            assert not made[into : into + length].any()
            made[into : into + length] = shards[part][start : start + length]
        assert np.array_equal(made, new.shard_of(whole, rank))


def test_a_part_and_its_copy_lost_at_once_are_told_in_words(small_jobs: SmallJobs, tmp_path: Path) -> None:
    data, fault = write_text(tmp_path / "text"), "rank0:job.begin:3,rank1:job.begin:3"
    with pytest.raises(UserError, match="neither originals nor copies are left: a rank and its buddy"):
        small_jobs.run(
            tmp_path / "run", data, fault=fault, zero=3, mesh="dp=3", world_size=3, on_loss=OnLoss.SHRINK
        )
