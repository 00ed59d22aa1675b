"""The profiler of a rank: FLOPs counted by hand and by PyTorch, bounded files, damage told in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from zbmd.training.autograd import spans
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.tensor_parallel import TensorShards
from zbmd.training.profiler import lines, peak, profiler
from zbmd.training.profiler.lines import IDLE, StepLine, lines_path, old_path, read_profiles, summary_of
from zbmd.training.profiler.profiler import Profiler, open_profiler, unit_flops
from zbmd.training.profiler.ring import RINGS_KEPT, RingFile, read_ring, ring_path
from zbmd.transport.errors import UserError

MODEL = GPTConfig(context=8, width=16, heads=2, layers=1)


def opened(directory: Path, **environ: str) -> Profiler:
    return open_profiler(directory, GPT(MODEL), sequences=2, environ=environ)


def step(made: Profiler, number: int) -> StepLine | None:
    ended = made.begin_step(number)
    with made.recording():
        with spans.FORWARD[1], spans.COMM:
            pass
        with spans.BACKWARD[1]:
            pass
    return ended


# ---- FLOPs


def test_flops_are_those_of_the_products_counted_by_hand() -> None:
    embed, block, head = unit_flops(GPT(MODEL), sequences=3, length=8)
    rows, width = 3 * 8, 16
    matrices = 3 * width * width + width * width + 4 * width * width + 4 * width * width
    pairs = 8 * 9 // 2
    attention = 2 * (2 * 3 * pairs * width)  # scores and their sums of values, all heads together
    assert (embed.forward, embed.backward) == (0, 0)
    assert block.name == "blocks.0" and block.attention == attention
    assert block.forward == 2 * rows * matrices + attention
    assert block.backward == 2 * block.forward and block.again == attention // 2
    assert head.forward == 2 * rows * width * 256 and head.attention == 0


def test_parts_of_a_cut_model_add_up_to_the_whole() -> None:
    config = GPTConfig(
        family="gpt2", activation="gelu", context=8, width=16, heads=4, layers=1, vocabulary=259
    )
    whole = unit_flops(GPT(config), sequences=2, length=8)
    shards, parts = TensorShards(config, 2), []
    for part in range(2):
        model = GPT(config)
        model.layout = shards.layout(part)
        parts.append(unit_flops(model, sequences=2, length=8))
    for unit, *own in zip(whole, *parts, strict=True):
        assert unit.forward == sum(one.forward for one in own)
        assert unit.backward == sum(one.backward for one in own)
    assert whole[-1].forward == 2 * 16 * 16 * 259  # the tied head's table is a matrix there


@pytest.mark.optional
def test_flops_are_those_that_pytorch_counts() -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    counter: Any = pytest.importorskip("torch.utils.flop_counter")
    sequences, length, width = 2, MODEL.context, MODEL.width

    def block(x: Any, weights: list[Any]) -> Any:
        qkv, proj, into, out = weights
        q, k, v = (x @ qkv).reshape(sequences, length, 3, MODEL.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        mixed = (scores @ v).transpose(1, 2).reshape(sequences * length, width)
        return (torch.relu((mixed @ proj + x) @ into)) @ out

    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    weights = [torch.rand(shape, requires_grad=True) for shape in shapes]
    x = torch.rand(sequences * length, width, requires_grad=True)
    with counter.FlopCounterMode(display=False) as forward:
        y = block(x, weights)
    with counter.FlopCounterMode(display=False) as backward:
        y.sum().backward()
    ours = unit_flops(GPT(MODEL), sequences=sequences, length=length)[1]
    # PyTorch counts all pairs of a query and a key; we count those that it may see.
    unseen = ours.attention * (2 * length / (length + 1) - 1)
    assert forward.get_total_flops() == pytest.approx(ours.forward + unseen)
    assert backward.get_total_flops() == pytest.approx(ours.backward + 2 * unseen)


# ---- the files


def test_steps_are_written_as_they_end_and_add_up(tmp_path: Path) -> None:
    with opened(tmp_path) as made:
        assert step(made, 1) is None
        ended = step(made, 2)
        assert ended is not None and ended.step == 1 and made.last == ended
        # What is there before the end is there after a kill too.
        (life,) = read_profiles(tmp_path)
        assert [one.step for one in life.steps] == [1]
        assert len(read_ring(ring_path(tmp_path, 0, 1)).records) == 6
    (life,) = read_profiles(tmp_path)
    assert [one.step for one in life.steps] == [1, 2]
    block = life.run.units[1]
    for line in life.steps:
        assert sum(line.ns.values()) == line.wall_ns and line.ns[IDLE] > 0
        assert line.flops == block.forward + block.backward
        assert line.hardware_flops == line.flops + block.again
        assert line.passes == {"forward": (0, 1, 0), "backward": (0, 1, 0)}
    found = summary_of([life], lambda machine: 1e12)
    assert found.units[1].flops == life.steps[1].flops and found.ranks[0].steps == 1
    assert found.utilisation(lambda rank: rank.flops) == pytest.approx(
        life.steps[1].flops / (life.steps[1].wall_ns / 1e9 * 1e12)
    )
    assert summary_of([life], lambda machine: None).utilisation(lambda rank: rank.flops) is None


def test_it_can_be_switched_off_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    with opened(tmp_path, ZBMD_PROFILE="off") as made:
        step(made, 1)
        assert step(made, 2) is not None
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="ZBMD_PROFILE=off"):
        read_profiles(tmp_path)
    with pytest.raises(UserError, match="ZBMD_PROFILE"):
        opened(tmp_path, ZBMD_PROFILE="maybe")


def test_a_full_file_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "LINES_BYTES_MAX", 4096)
    with opened(tmp_path) as made:
        for number in range(60):
            step(made, number)
    path = lines_path(tmp_path, 0, 1)
    assert path.stat().st_size <= 4096 and old_path(path).stat().st_size <= 4096
    steps = [line.step for life in read_profiles(tmp_path) for line in life.steps]
    assert steps == list(range(steps[0], 60)) and steps[0] > 0


def test_where_nothing_can_be_written_the_steps_go_on(tmp_path: Path) -> None:
    (tmp_path / lines.PROFILE_DIRECTORY).write_text("a file is in the way")
    with opened(tmp_path) as made:
        step(made, 1)
        assert step(made, 2) is not None


def test_rings_of_lives_long_gone_are_deleted(tmp_path: Path) -> None:
    with opened(tmp_path) as made:
        run = made.run
    for incarnation in range(2, RINGS_KEPT + 3):
        Profiler(tmp_path, msgspec.structs.replace(run, incarnation=incarnation)).close()
    kept = {path.name for path in (tmp_path / lines.PROFILE_DIRECTORY).glob("*.spans")}
    assert kept == {ring_path(tmp_path, 0, 3 + number).name for number in range(RINGS_KEPT)}


def test_damage_is_told_and_the_line_that_a_kill_cut_off_is_not(tmp_path: Path) -> None:
    with opened(tmp_path) as made:
        step(made, 1)
        step(made, 2)
    path, ring = lines_path(tmp_path, 0, 1), ring_path(tmp_path, 0, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert [one.step for one in read_profiles(tmp_path)[0].steps] == [1]
    for damaged, steps in (
        (whole.replace(b'"forward"', b'"fo\xffward"', 1), [2]),  # left out, and reported
        (whole.split(b"\n", 1)[1], []),  # nobody knows whose they are
    ):
        path.write_bytes(damaged)
        assert [one.step for life in read_profiles(tmp_path) for one in life.steps] == steps
    for damaged, words in (
        (whole.replace(b'"end_ns":', b'"end_ns":1', 1), "do not add up"),
        (whole.replace(b'"version":1', b'"version":9'), "format 9"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=words):
            read_profiles(tmp_path)
    bits = bytearray(ring.read_bytes())
    for place, value, words in (
        (0, 0, "not a span file"),
        (14, 0xFF, "bytes of text"),
        (17, 0xFF, "damaged"),
        ((1 << 20) + 8 + 37, 9, "invalid spans"),
    ):
        before = bits[place]
        bits[place] = value
        ring.write_bytes(bits)
        with pytest.raises(UserError, match=words):
            read_ring(ring)
        bits[place] = before
    ring.write_bytes(bits[:-1])
    with pytest.raises(UserError, match="not a span file"):
        read_ring(ring)


# ---- the peak


def test_a_peak_is_measured_once_and_kept_with_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = peak.this_machine(parallel=1, environ={"OMP_NUM_THREADS": "1"})
    assert machine.threads == 1 and peak.known_peak(machine) is None
    found = peak.peak_of(machine)
    assert found > 1e6
    monkeypatch.setattr(peak, "measured", lambda machine: pytest.fail("it was measured"))
    assert peak.peak_of(machine) == peak.known_peak(machine) == found
    assert peak.known_peak(msgspec.structs.replace(machine, threads=2)) is None
    with opened(tmp_path / "run", OMP_NUM_THREADS="1") as made:
        step(made, 1)
        line = step(made, 2)
    assert line is not None and made.run.peak == found
    assert made.mfu(line) == pytest.approx(line.flops / (line.wall_ns / 1e9 * found))
    cached = peak.cache_path()
    assert cached is not None
    cached.write_bytes(b"[{]")
    assert peak.known_peak(machine) is None


def test_more_ranks_than_processors_have_the_peak_of_all_processors() -> None:
    many = peak.this_machine(parallel=500, environ={"OMP_NUM_THREADS": "1"})
    assert many.parallel == many.processors
    whole = peak.this_machine(parallel=3, environ={})
    assert (whole.threads, whole.parallel) == (whole.processors, 1)


def test_a_ring_that_another_run_replaces_stays_whole(tmp_path: Path) -> None:
    """Cut short, it would end the process that has mapped it (SIGBUS)."""
    first = RingFile(tmp_path / "a.spans")
    first.ring[:8] = b"x" * 8
    second = RingFile(tmp_path / "a.spans")
    assert bytes(first.ring[:8]) == b"x" * 8 and not any(second.ring[:8])
    first.close()
    second.close()
