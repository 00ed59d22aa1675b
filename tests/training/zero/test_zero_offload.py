"""States in files, of ZeRO and meshes: the bits are the same, and the files outlive whoever is killed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.jobs.by_words import plain_by
from support.jobs.small_jobs import SmallJobs

from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.small_job import SHAPE, STEPS, run_small_job, write_text
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.optim import OPTIMIZERS
from zbmd.training.optim.elementwise import AdamWState
from zbmd.training.optim.mixed_precision import Precision
from zbmd.training.redundancy import state_file as paging
from zbmd.training.redundancy.stamped import StateName
from zbmd.training.redundancy.state_file import StateFile, found_in
from zbmd.training.step.reduction import ShardSum
from zbmd.training.zero.layout import ShardLayout
from zbmd.training.zero.rank import ZeroRank, slot_elements
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import LocalProtocolError, UserError

CASES = (
    (3, "rank0:job.begin:3+rank1:job.begin:3+rank2:job.begin:3"),  # all of them, none has a buddy
    (1, "rank1:file.stamp:2"),
    (2, "rank2:file.stamped:3,rank2#2:job.met"),
)
MESH_CASES: tuple[tuple[str, int, Precision, str], ...] = (
    ("dp=2,pp=2", 0, "float32", "+".join(f"rank{rank}:job.begin:3" for rank in range(4))),  # all of them
    ("dp=2,tp=2", 0, "float32", "rank1:file.stamp:2,rank1#2:job.met"),
    ("dp=2", 0, "float16", "rank0:file.stamped:3,rank1:pipeline.compute:9"),
    ("dp=2,tp=2", 3, "float32", "+".join(f"rank{rank}:job.begin:3" for rank in range(4))),
    ("dp=2,pp=2", 1, "float16", "rank2:file.stamped:3,rank1:pipeline.compute:15"),
)
SHRINK_CASES: tuple[tuple[str, int, Precision, str], ...] = (
    ("dp=3", 3, "float32", "rank1:job.begin:3"),
    ("dp=3", 0, "float32", "rank0:mirror.commit:3"),
    ("dp=4", 1, "float32", "rank0:job.begin:4+rank1:job.begin:4"),  # at once: their files are there
    ("dp=4", 2, "float16", "rank3:file.stamped:3,rank1:mirror.resharded"),
    ("dp=3", 3, "float32", "rank2:file.stamp:3,rank0:mirror.divide"),
    ("dp=2,pp=2", 0, "float32", "rank1:mirror.forget,rank2:job.begin:3"),
    ("dp=2,tp=2", 2, "float32", "rank3:job.begin:3"),
    ("dp=3,pp=2", 1, "float32", "rank2:pipeline.compute:20,rank5:job.met:2"),
)
NAME = StateName(run=7, place=1, ranks=2, elements=3000)


def test_kills_leave_no_trace_in_the_weights(small_jobs: SmallJobs, tmp_path: Path) -> None:
    data, files = write_text(tmp_path / "text"), tmp_path / "files"
    arguments = [*SHAPE, "--steps", str(STEPS), "--data", str(data), "--out", str(tmp_path / "plain")]
    calm = plain_by(arguments)
    for number, (stage, fault) in enumerate(CASES):
        found = small_jobs.run(
            tmp_path / str(number), data, fault=fault, zero=stage, offload=files / str(number)
        )
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == calm.weights_sha256, fault
        assert not list((files / str(number)).iterdir()), "a run that is over leaves no state"


async def test_all_ranks_of_a_job_with_many_shards_are_killed_at_once(tmp_path: Path) -> None:
    """The last step's report is in the files at any number of logical shards: here, of two pages."""
    data, changes = write_text(tmp_path / "text"), {"shards": 600, "sequences_per_shard": 1}
    more = ("--shards", "600", "--sequences-per-shard", "1")
    arguments = [*SHAPE, "--steps", str(STEPS), "--data", str(data), "--out", str(tmp_path / "plain"), *more]
    calm = plain_by(arguments)
    fault, files = CASES[0][1], tmp_path / "files"
    found = await run_small_job(tmp_path / "run", data, fault=fault, zero=1, offload=files, changes=changes)
    assert (found.deaths, found.digest) == (3, calm.weights_sha256), found.told


def test_a_note_that_is_too_long_is_refused_and_the_longest_is_kept(tmp_path: Path) -> None:
    name = StateName(run=7, place=0, ranks=2, elements=3000, note=1000)
    file = StateFile(tmp_path, name, again=False)
    file.slots[0][:], file.slots[1][:] = 1.0, 2.0
    file.written(0, 4, np.arange(1000.0))
    file.written(1, 5, np.arange(1000.0) + 1.0)
    found = StateFile(tmp_path, name, again=True)
    assert [found.noted(slot).tolist()[-1] for slot in (0, 1)] == [999.0, 1000.0]
    assert [set(slot.tolist()) for slot in found.slots] == [{1.0}, {2.0}]
    with pytest.raises(LocalProtocolError, match="has 1001 numbers, at most 1000 fit"):
        found.written(0, 6, np.arange(1001.0))


def check_kills_on_meshes(
    small_jobs: SmallJobs, tmp_path: Path, cases: Sequence[tuple[str, int, Precision, str]], **options: Any
) -> None:
    """Kill ranks of jobs over a folder each: the weights are those of a calm run, and the folder is empty."""
    data, files = write_text(tmp_path / "text"), tmp_path / "files"
    kinds: tuple[tuple[str, Precision], ...] = (("dp=1", "float32"), ("tp=2", "float32"), ("dp=1", "float16"))
    calm = small_jobs.undisturbed(tmp_path, data, kinds)
    for number, (mesh, stage, precision, fault) in enumerate(cases):
        found = small_jobs.run(
            tmp_path / str(number),
            data,
            fault=fault,
            mesh=mesh,
            zero=stage,
            world_size=math.prod(int(axis[-1]) for axis in mesh.split(",")),
            precision=precision,
            offload=files / str(number),
            **options,
        )
        assert found.deaths == len(faults.parse(fault)), (fault, found.failures, found.told)
        assert found.digest == calm["tp" in mesh, precision], (mesh, fault)
        assert not list((files / str(number)).iterdir()), "a run that is over leaves no state"


def test_kills_on_meshes_leave_no_trace_in_the_weights(small_jobs: SmallJobs, tmp_path: Path) -> None:
    check_kills_on_meshes(small_jobs, tmp_path, MESH_CASES)


def test_a_run_that_shrinks_recuts_its_files(small_jobs: SmallJobs, tmp_path: Path) -> None:
    """Survivors read the files of the dead; a folder has no file of a cut that is over, or of a run."""
    check_kills_on_meshes(small_jobs, tmp_path, SHRINK_CASES, on_loss=OnLoss.SHRINK)


def test_the_files_of_a_run_are_found_and_no_others(tmp_path: Path) -> None:
    for made, run in ((0, 7), (3, 7), (4, 7), (4, 8)):
        name = StateName(run=run, place=made % 2, ranks=2, elements=3000)
        write(StateFile(tmp_path / str(run), name, again=False, made=made), 5)
    folder = tmp_path / "7"
    for path in (tmp_path / "8").iterdir():
        (folder / f"zero-9-of-9-{path.name}").write_bytes(path.read_bytes())
    (folder / "zero-0-of-1.state").write_bytes(b"no state")
    (folder / "zero-1-of-1.state").write_bytes(next(folder.glob("*-3.state")).read_bytes()[:5000])
    found = found_in(folder, 7)
    assert [(one.made, one.name.place, one.version_in(1)) for one in found] == [(4, 0, 5), (3, 1, 5)]
    assert all((one.slots[1] == 6.0).all() and one.noted(1).tolist() == [5.0, 0.5] for one in found)
    StateFile(folder, StateName(run=7, place=0, ranks=2, elements=9), again=False, made=9).remove_all()
    assert not found_in(folder, 7) and len(list(folder.iterdir())) == 4


def parts(file: StateFile, slot: int) -> list[list[np.ndarray]]:
    return [[file.slots[slot][:1000]], [file.slots[slot][1000:]]]


def write(file: StateFile, version: int) -> None:
    slot = version % 2
    file.begin(slot)
    file.slots[slot][:] = version + 1
    for part in parts(file, slot):
        file.wrote(part)
        file.rest(part)
    file.written(slot, version, np.array([version, 0.5]))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_update_run_by_run_has_the_bits_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "RUN_ELEMENTS", 1000)  # less than a matrix, which Muon takes whole
    layout, luck = GPT(GPTConfig(context=8, width=32, heads=2, layers=2)).layout, np.random.default_rng(3)
    elements = 3 * layout.size
    file = StateFile(tmp_path, StateName(run=7, place=0, ranks=1, elements=elements, note=0), again=False)
    arrays = [luck.random(elements, np.float32), np.zeros(elements, np.float32)]
    file.slots[0][:] = arrays[0]
    file.begin(1)
    grads = luck.standard_normal(layout.size, np.float32)
    for slots, kept in ((arrays, None), (file.slots, file)):
        old, new = (AdamWState.of(slot, layout.size, 3) for slot in slots)
        update = paging.PagedUpdate(OPTIMIZERS[name], layout, kept)
        assert len(list(update.parts_of(old))) == 1 or kept is not None
        update.update(old, new, grads, step=3, learning_rate=0.01, grad_scale=0.5)
    for slot in layout.slots:
        for place in range(3):
            at = slice(place * layout.size + slot.span.start, place * layout.size + slot.span.stop)
            assert file.slots[1][at].tobytes() == arrays[1][at].tobytes(), (slot.name, place)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_shard_that_is_written_run_by_run_has_the_bits_of_one_written_at_once(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stage, which is one unit of several runs."""
    monkeypatch.setattr(paging, "RUN_ELEMENTS", 1000)
    model = GPT(GPTConfig(context=8, width=24, heads=2, layers=2))
    shards = ShardLayout.of(model.layout, (slice(0, len(model.layout.slots)),), ranks=3)
    optimizer, sums = OPTIMIZERS["adamw"], ShardSum.of(3, 3)
    elements = slot_elements(shards, optimizer, np.dtype(np.float32))
    for rank in range(3):
        name = StateName(run=7, place=rank, ranks=3, elements=elements, note=0)
        file = StateFile(tmp_path, name, again=False)
        held = [
            ZeroRank(
                *(model, shards, sums),
                rank=rank,
                stage=stage,
                storage="float32",
                optimizer=optimizer,
                seed=1,
                keep_previous=True,
                offload=kept,
            )
            for kept in (None, file)
        ]
        luck = np.random.default_rng(rank)
        grads = luck.standard_normal(shards.shard_size, np.float32)
        for one in held:
            one.begin_anew()
            one.gradients[0][:] = grads
            file.begin(1)
            one.update(step=3, learning_rate=0.01, grad_scale=0.5)
        assert len(list(held[1].parts_in(1))) > 2 and len(list(held[0].parts_in(1))) == 2
        assert held[0].state_flat.tobytes() == held[1].state_flat.tobytes()
        assert held[0].part(0).tobytes() == held[1].part(0).tobytes()
        file.written(1, 5)
        file.drop_damaged(1, held[1].parts_in(1))
        assert file.version_in(1) == 5, "the digest is of the parts in their order"


def test_a_replacement_finds_what_was_whole(tmp_path: Path) -> None:
    file = StateFile(tmp_path, NAME, again=False)
    assert (file.version_in(0), file.version_in(1)) == (None, None)
    write(file, 4)
    write(file, 5)
    file.begin(0)
    file.slots[0][:10] = -1.0  # killed on the way
    found = StateFile(tmp_path, NAME, again=True)
    for slot in range(2):
        found.drop_damaged(slot, parts(found, slot))
    assert (found.version_in(0), found.version_in(1)) == (None, 5)
    assert found.digest_in(1) == file.digest_in(1)
    assert (found.slots[1] == 6.0).all()
    assert (found.noted(0).tolist(), found.noted(1).tolist()) == ([], [5.0, 0.5])
    found.slots[1][2999] = 7.0
    found.drop_damaged(1, parts(found, 1))
    assert found.version_in(1) is None


@pytest.mark.parametrize("other", [{"run": 8}, {"place": 0}, {"ranks": 3}, {"elements": 2999}, {"note": 219}])
def test_a_file_of_another_run_is_not_taken_over(tmp_path: Path, other: dict[str, int]) -> None:
    there = StateFile(tmp_path, NAME, again=False)
    write(there, 5)
    changed = {name: getattr(NAME, name) for name in ("run", "place", "ranks", "elements", "note")} | other
    wanted = StateName(**changed)
    (tmp_path / f"zero-{wanted.place}-of-{wanted.ranks}.state").write_bytes(there.path.read_bytes())
    assert StateFile(tmp_path, wanted, again=True).version_in(1) is None
    assert (there.slots[1] == 6.0).all(), "who has it mapped keeps it"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be offloaded"):
        StateFile(tmp_path / "file", NAME, again=False)
