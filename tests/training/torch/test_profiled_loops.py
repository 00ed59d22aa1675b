"""Steps of PyTorch's loops whose ops are sampled: known products, passes and phases, and no bit changed."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import train

from zbmd.actors.view import Outcome
from zbmd.tools.dashboard import queries
from zbmd.tools.entry import zbmd as cli
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.training.ops.cuda.timing import Timer
from zbmd.training.profiler.lines import OPS_MAX, read_profiles
from zbmd.training.profiler.operations import EVERY_VARIABLE, OpSampler
from zbmd.training.profiler.profiler import open_profiler
from zbmd.transport.errors import UserError

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional
operations: Any = importlib.import_module("zbmd.training.torch.durable.operations")
cuda_events: Any = importlib.import_module("zbmd.training.torch.durable.cuda_events")
resilient: Any = importlib.import_module("zbmd.training.torch.resilient")

PROGRAM = PROGRAMS / "tools/profiled_loop.py"
RANKS, STEPS, BATCH, WIDTH, HIDDEN = 2, 6, 8, 16, 32
PRODUCT = 2 * BATCH * WIDTH * HIDDEN
FLOAT = 4


async def ends(out: Path, mode: str, fault: str = "", **more: str) -> set[str]:
    """Return the digests that the ranks of a run end with."""
    result, lines = await train(PROGRAM, mode, fault, RANKS, {"OUT": str(out), **more})
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(lines)
    assert result.restarts == bool(fault)
    return {found[0] for line in lines if (found := re.search(r"rank \d+ ends with .*", line))}


@cache
def _plain() -> dict[str, set[str]]:
    return {}


async def undisturbed(out: Path, mode: str) -> set[str]:
    """Return the digests of a run that samples nothing, and loses nobody."""
    if mode not in _plain():
        _plain()[mode] = await ends(out, mode)
        with RunDatabase(out) as database:
            database.update(spans=True)
            found = database.connection.execute("select count(*) from op_profile where kind = 'op'")
            assert found.fetchone() == (0,)
    return _plain()[mode]


def asked(capsys: pytest.CaptureFixture[str], out: Path, sql: str) -> list[dict[str, Any]]:
    """Return the rows of `zbmd query`."""
    capsys.readouterr()
    assert cli.main(["query", str(out), sql, "--json", "--limit", "10000"]) == 0
    rows: list[dict[str, Any]] = msgspec.json.decode(capsys.readouterr().out)["rows"]
    return rows


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
async def test_sampled_steps_have_the_products_of_both_passes_and_the_bits_of_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    out = tmp_path / "out"
    sampled = await ends(out, mode, EVERY="2")
    assert len(sampled) == RANKS and sampled == await undisturbed(tmp_path / "plain", mode)
    rows = asked(capsys, out, "select * from op_profile where kind = 'op'")
    assert {(row["rank"], row["step"]) for row in rows} == {(r, s) for r in (0, 1) for s in (2, 4, 6)}
    for rank in range(RANKS):
        mine = [row for row in rows if (row["rank"], row["step"]) == (rank, 4)]
        found = {(row["op"], row["pass"], row["shape"]): row for row in mine}
        ahead = found["aten::addmm", "forward", f"{HIDDEN}, {BATCH}x{WIDTH}, {WIDTH}x{HIDDEN}"]
        assert (ahead["calls"], ahead["flops"], ahead["dtype"]) == (1, PRODUCT, "float32")
        assert ahead["bytes"] == FLOAT * (HIDDEN + BATCH * WIDTH + WIDTH * HIDDEN + BATCH * HIDDEN)
        assert ahead["execute_ns"] > 0
        back = [row for row in mine if (row["op"], row["pass"]) == ("aten::mm", "backward")]
        # Of the second layer its input's gradient, too; the first one's input has none.
        assert sum(row["flops"] for row in back) == 3 * PRODUCT
        assert any((row["op"], row["pass"]) == ("aten::add_", "work") for row in mine)
        assert not any(row["op"].startswith(("c10d", "profiler")) for row in mine)
        wanted = {"ddp": {"all_reduce"}, "fsdp": {"all_gather", "reduce_scatter"}}
        collectives = [row for row in mine if row["pass"] == "collective"]
        assert wanted[mode] <= {row["op"] for row in collectives}
        assert all(row["bytes"] > 0 and row["execute_ns"] + row["wait_ns"] > 0 for row in collectives)
    phases = asked(capsys, out, "select * from step_timing where step > 1")
    assert len(phases) == RANKS * (STEPS - 1)
    names = ("forward", "backward", "grad_clip", "optimizer", "comm")
    assert all(row[f"{name}_ns"] > 0 for row in phases for name in names)
    with RunDatabase(out) as database:
        shown = queries.slowest_ops(database.connection)
    assert shown["sampled"] and all(row["calls_per_step"] > 0 for row in shown["rows"])
    assert cli.main(["export", str(out), "--format", "chrome", "-o", str(tmp_path / "trace.json")]) == 0
    assert "aten::addmm forward" in (tmp_path / "trace.json").read_text()


async def test_a_rank_that_is_lost_in_a_sampled_step_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable that a job uses says which steps are sampled, also to the replacement."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    out = tmp_path / "out"
    sampled = await ends(out, "ddp", "rank1:loop.prepared:4", **{EVERY_VARIABLE: "every=2"})
    assert sampled == await undisturbed(tmp_path / "plain", "ddp")
    rows = asked(
        capsys,
        out,
        "select distinct step, incarnation from op_profile join incarnations using (incarnation_id) "
        "where kind = 'op' and pass = 'backward' and op_profile.rank = 1 order by 1",
    )
    assert {(row["step"], row["incarnation"]) for row in rows} >= {(2, 1), (6, 2)}


def test_a_mode_of_the_script_that_is_still_entered_keeps_ours_beneath(tmp_path: Path) -> None:
    """It counts nothing more, and goes once it can."""
    counter = importlib.import_module("torch.utils.flop_counter")
    stack = importlib.import_module("torch.utils._python_dispatch")._get_current_dispatch_mode_stack
    profiler = open_profiler(tmp_path, None, sequences=1, ops_every=1, environ={})
    with profiler:
        profiler.begin_step(1)
        sampler: OpSampler = profiler.sampler
        mode, x = operations.OpMode(sampler), torch.ones(4, 4)
        mode.watch(is_on=True)
        with counter.FlopCounterMode(display=False) as theirs:
            torch.mm(x, x)
            mode.watch(is_on=False)
            torch.mm(x, x)
        assert len(stack()) == 1
        torch.mm(x, x)
        mode.watch(is_on=True)
        torch.mm(x, x)
        mode.watch(is_on=False)
        assert not stack()
        torch.mm(x, x)
        (row,) = sampler.rows()
    assert theirs.get_total_flops() == 2 * 2 * 4**3
    assert (row.op, row.calls, row.flops) == ("aten::mm", 2, 2 * 2 * 4**3)


def test_shapes_that_change_each_step_have_rows_in_each(tmp_path: Path) -> None:
    profiler = open_profiler(tmp_path, None, sequences=1, ops_every=1, environ={})
    with profiler:
        mode, steps = operations.OpMode(profiler.sampler), 3
        for step in range(steps):
            profiler.begin_step(step + 1)
            mode.watch(is_on=True)
            for size in range(OPS_MAX):
                torch.empty(OPS_MAX * step + size)
                torch.ones(OPS_MAX * step + size + 1).neg()
            mode.watch(is_on=False)
            rows = profiler.sampler.rows()
            assert OPS_MAX // 2 < len(rows) <= OPS_MAX
            assert sum(row.calls for row in rows) == 3 * OPS_MAX
            named = [row for row in rows if row.op == "aten::neg"]
            assert named and all(row.calls == 1 for row in named)


def test_a_compiled_model_is_compiled_in_a_sampled_step_as_in_any_other(tmp_path: Path) -> None:
    """Its code runs, and the products that it calls have rows."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    profiler = open_profiler(tmp_path, None, sequences=1, ops_every=1, environ={})
    with profiler:
        profiler.begin_step(1)
        mode, x = operations.OpMode(profiler.sampler), torch.ones(4, 4)
        compiled = torch.compile(lambda x: (x @ x).relu(), backend=backend)
        mode.watch(is_on=True)
        found = [compiled(x) for _ in range(3)]
        mode.watch(is_on=False)
        rows = {row.op: row.calls for row in profiler.sampler.rows()}
    assert len(graphs) == 1 and all(torch.equal(each, x @ x) for each in found)
    assert rows == {"aten::mm": 3, "aten::relu": 3}


def test_views_and_what_nobody_has_written_move_no_bytes(tmp_path: Path) -> None:
    profiler = open_profiler(tmp_path, None, sequences=1, ops_every=1, environ={})
    with profiler:
        profiler.begin_step(1)
        mode, q = operations.OpMode(profiler.sampler), torch.ones(2, 4, 8, 16)
        mode.watch(is_on=True)
        q.view(-1).expand(3, -1)
        torch.empty(5).add_(1)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        mode.watch(is_on=False)
        rows = {row.op: row for row in profiler.sampler.rows()}
    assert [rows[f"aten::{op}"].nbytes for op in ("view", "expand", "empty", "add_")] == [0, 0, 0, 5 * FLOAT]
    (attention,) = [row for op, row in rows.items() if "attention" in op]
    assert attention.flops == 2 * 2 * (2 * 4 * 8 * 8 * 16)


def test_a_block_of_a_transformer_has_the_flops_of_both_passes(tmp_path: Path) -> None:
    """Its products of weights, and those of all pairs that attention computes."""
    batch, length, width, heads = 2, 8, 16, 2
    nn = torch.nn
    norm, packed, out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
    profiler = open_profiler(tmp_path, None, sequences=1, ops_every=1, environ={})
    with profiler:
        profiler.begin_step(1)
        mode = operations.OpMode(profiler.sampler)
        mode.watch(is_on=True)
        x = torch.ones(batch, length, width, requires_grad=True)
        q, k, v = packed(norm(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out(y.transpose(1, 2).reshape(x.shape)).sum().backward()
        mode.watch(is_on=False)
        rows = profiler.sampler.rows()
    products = 2 * batch * length * 4 * width * width
    pairs = 2 * batch * length * length * width
    ahead, back = (sum(row.flops for row in rows if row.which == which) for which in ("forward", "backward"))
    assert (ahead, back) == (products + 2 * pairs, 2 * products + 5 * pairs)


@pytest.mark.parametrize("given", [-1, True, "every=5", 10_000_000_000])
def test_what_is_no_number_of_steps_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r"profile_ops=…\): expected 0 to"):
        resilient._ops_every(given, True)


def test_the_variable_says_which_steps_of_a_recorded_loop_are_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="needs a directory"):
        resilient._ops_every(5, False)
    monkeypatch.setenv(EVERY_VARIABLE, "every=7")
    assert resilient._ops_every(None, True) == 7
    assert resilient._ops_every(None, False) == 0
    assert resilient._ops_every(0, True) == 0
    monkeypatch.setenv(EVERY_VARIABLE, "often")
    with pytest.raises(UserError, match=f"{EVERY_VARIABLE}: expected off or every=N"):
        resilient._ops_every(None, True)


class EventsOfAModel:
    """Stands for `torch.cuda`: a device on which 1 µs passes from one event to the next."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def Event(self, *, enable_timing: bool, interprocess: bool) -> Any:
        assert enable_timing and not interprocess
        return EventOfAModel(self)


class EventOfAModel:
    """An event of PyTorch: it has a time once it was waited for."""

    def __init__(self, device: EventsOfAModel) -> None:
        self._device = device
        self._at_ms = -1.0
        self._is_done = False

    def record(self) -> None:
        self._device.now_ms += 1e-3
        self._at_ms, self._is_done = self._device.now_ms, False

    def query(self) -> bool:
        return self._is_done

    def synchronize(self) -> None:
        self._is_done = True

    def elapsed_time(self, end: EventOfAModel) -> float:
        if not (self._is_done and end._is_done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end._at_ms - self._at_ms


def test_ops_on_a_device_have_the_times_of_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those on the host have the host's, in the same step."""
    on_device = torch.ones(4, 4)
    monkeypatch.setattr(operations, "_is_on_device", lambda tensor: tensor is on_device)
    timer = Timer(cuda_events.TorchEvents(EventsOfAModel()), 0)
    profiler = open_profiler(tmp_path, None, sequences=1, ops_every=2, timer=timer, environ={})
    with profiler:
        profiler.begin_step(2)
        mode, on_host = operations.OpMode(profiler.sampler), torch.ones(64, 64)
        mode.watch(is_on=True)
        for _ in range(3):
            torch.mm(on_device, on_device)
            torch.mm(on_host, on_host)
        mode.watch(is_on=False)
        profiler.begin_step(3)
    (life,) = read_profiles(tmp_path)
    (line,) = life.ops
    there, here = (next(row for row in line.ops if row.shape.startswith(shape)) for shape in ("4x4", "64x64"))
    assert (there.calls, there.execute_ns) == (3, 3 * 1000) and there.enqueue_ns > 0
    assert here.calls == 3 and here.execute_ns == here.enqueue_ns > 0
