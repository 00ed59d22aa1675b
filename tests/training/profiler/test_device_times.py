"""Times of ops on a device: by its own clock, without what is nested, beside copies on other streams.

The modelled device has a clock: a kernel takes as long as the test says, so that the times that a profile has
to have are known, and no other clock has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from support.devices.cuda_model import ModelHost
from support.devices.cuda_model_launches import ModelLaunch
from support.devices.cuda_model_timing import BYTES_PER_NS, KERNEL_NS
from support.devices.device_threads import ThreadRank, run_threads
from support.devices.device_worlds import model_host, on_device
from support.devices.kernel_numbers import by_numpy, nothing_compiled

from zbmd.tools.runs.profile import op_shares
from zbmd.training.autograd._spans import SpanRecorder
from zbmd.training.autograd.op_watch import watched
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.graph.steps import FusedSteps
from zbmd.training.ops.cuda import timing
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.training.ops.cuda.transfers import StateCopy
from zbmd.training.profiler.lines import OpRow, OpsLine, StepLine, read_profiles
from zbmd.training.profiler.operations import COLLECTIVE, COPY, OpSampler, Timed, own_times
from zbmd.training.profiler.peak import device_machine, known
from zbmd.training.profiler.profiler import open_profiler, unit_flops
from zbmd.training.profiler.ring import RING_BYTES

CONFIG = GPTConfig(context=16, width=64, heads=1, layers=2)
MS = 1_000_000
"""The time of a kernel of products, in ns."""
SEQUENCES = 2


class Device:
    """A model on a modelled device, whose every step is sampled. ran: the kernels of the device."""

    def __init__(self, folder: Path, *, fused: bool = False, recompute: bool = False) -> None:
        self.ran: Counter[str] = Counter()
        self.host = ModelHost(devices=1, run_kernel=self._run)
        self.host.kernel_ns = self.kernel_ns
        self.run = Executor(self.host.process(), compile=nothing_compiled)
        self.model = GPT(CONFIG, xp=DeviceModule(self.run), recompute=recompute)
        if fused:
            self.model.whole_step = FusedSteps(self.model, self.run)
        self.folder = folder
        self.profiler = open_profiler(
            folder, self.model, sequences=SEQUENCES, ops_every=2, executor=self.run, environ={}
        )
        params = self.model.init(1) + np.float32(0.01)
        self.params: Any = self.run.upload(params.astype(ml_dtypes.bfloat16))
        self.tokens = np.arange(SEQUENCES * 17, dtype=np.int64).reshape(SEQUENCES, 17) * 7 % 256

    @staticmethod
    def kernel_ns(name: str) -> int:
        return MS if name.startswith(("matmul", "wgmma", "tma")) else 1000

    def _run(self, launch: ModelLaunch) -> None:
        self.ran[launch.kernel.name] += 1
        by_numpy(launch)

    def step(self, number: int, then: Callable[[], None] = lambda: None) -> bytes:
        """Return the bits of the gradient of a step."""
        self.profiler.begin_step(number)
        grads: Any = self.run.zeros(self.model.layout.size, ml_dtypes.bfloat16)
        self.ran.clear()
        with self.profiler.operations():
            self.model.loss_and_grads(self.params, grads, self.tokens, global_batch=SEQUENCES)
            then()
        self.run.api.stream_synchronize(self.run.stream)
        return bytes(grads.get().tobytes())

    def kernels_ns(self) -> int:
        """Return what the kernels of the last step took."""
        return sum(count * self.kernel_ns(name) for name, count in self.ran.items())

    def lines(self) -> tuple[list[StepLine], list[OpsLine]]:
        """Return what was written."""
        self.profiler.close()
        (life,) = read_profiles(self.folder)
        return list(life.steps), list(life.ops)


def computing(rows: tuple[OpRow, ...]) -> list[OpRow]:
    return [row for row in rows if row.which != COPY]


@pytest.mark.parametrize("fused", [False, True], ids=["tape", "fused"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recompute"])
def test_ops_have_the_times_of_the_device_and_the_flops_of_the_model(
    tmp_path: Path, fused: bool, recompute: bool
) -> None:
    """They add up to what the kernels took; the host's time is a column of its own."""
    made = Device(tmp_path, fused=fused, recompute=recompute)
    with made.profiler.recording():
        bits = [made.step(number) for number in range(1, 4)]
        bits.append(made.step(4))
        kernels_ns = made.kernels_ns()
        bits.append(made.step(5))
    assert len(set(bits)) == 1, "whether a step is sampled or replayed changes no bit"
    steps, (_, line) = made.lines()
    rows = computing(line.ops)
    assert line.step == 4
    assert kernels_ns <= sum(row.execute_ns for row in rows) <= kernels_ns + MS // 2, "memory is cleared too"
    assert all(row.enqueue_ns > 0 for row in rows)
    products = [row for row in rows if row.flops and "attention" not in row.op]
    assert all(row.execute_ns >= row.calls * MS for row in products)
    assert all(row.nbytes > 0 for row in rows)
    (step,) = [one for one in steps if one.step == 4]
    unused = 2 * SEQUENCES * 16 * 4 * 64 * 64 * CONFIG.layers if fused and recompute else 0
    assert sum(row.flops for row in rows) == step.hardware_flops - unused, (
        "no gradient needs a block's last product"
    )
    assert not recompute or step.hardware_flops - unused > 1.1 * step.flops
    assert step.flops == sum(
        one.forward + one.backward for one in unit_flops(made.model, sequences=SEQUENCES, length=16)
    )


def test_copies_on_other_streams_are_timed_beside_the_ops(tmp_path: Path) -> None:
    """The copy of a state that a step begins ends after it, is that step's, and takes no op any time."""
    made = Device(tmp_path)
    state: Any = made.run.upload(np.ones(1 << 16, np.float32))
    slot, copy = np.zeros(1 << 16, np.float32), StateCopy(made.run)
    with made.profiler.recording():
        made.step(1)
        made.step(2, lambda: copy.begin([(state, slot)]))
        kernels_ns = made.kernels_ns()
        made.profiler.begin_step(3)
        copy.settle()
    _, (line,) = made.lines()
    (of_state,) = [row for row in line.ops if row.which == COPY and row.nbytes == state.nbytes]
    assert (of_state.op, of_state.calls, of_state.enqueue_ns) == ("device_to_host", 1, 0)
    assert of_state.execute_ns >= state.nbytes // BYTES_PER_NS
    assert any(row.op == "host_to_device" for row in line.ops)
    own_ns = sum(row.execute_ns for row in computing(line.ops))
    assert kernels_ns - 2 * 1000 <= own_ns, "kernels of the digest are no op's"
    assert (slot == 1).all()


def test_a_step_with_too_many_ops_has_the_rest_in_one_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "EVENTS_MAX", 12)
    made = Device(tmp_path)
    with made.profiler.recording():
        made.step(1)
        made.step(2)
        kernels_ns = made.kernels_ns()
    _, (line,) = made.lines()
    (rest,) = [row for row in line.ops if row.op == "others"]
    assert rest.calls >= 1 and rest.execute_ns > 0.5 * kernels_ns
    assert sum(row.execute_ns for row in line.ops) >= kernels_ns
    assert len(made.run.timer._events) == 12


def test_nothing_waits_for_the_device_within_a_sampled_step(tmp_path: Path) -> None:
    """Its work is still queued when the step is over; the rows are written once that is done."""
    made = Device(tmp_path)
    with made.profiler.recording():
        made.profiler.begin_step(2)
        array: Any = made.run.zeros(64, np.float32)
        with made.profiler.operations(), watched("update", array):
            array += array
        queued = len(made.run.api._streams[made.run.stream].queue)  # type: ignore[attr-defined]
        assert queued > 0
        made.profiler.begin_step(3)
        made.run.api.stream_synchronize(made.run.stream)
        made.profiler.begin_step(5)
    _, (line,) = made.lines()
    (update,) = line.ops
    assert (line.step, update.op, update.execute_ns) == (2, "update", 1000)


def test_operations_on_devices_have_rows_with_the_times_of_the_devices() -> None:
    """Those between devices by events of their streams, and the copies of those that the host carries out."""
    host, count = model_host(devices=2), 8_000

    def body(p: ThreadRank) -> tuple[OpRow, ...]:
        direct, staged = p.communicator(), p.communicator(channel=1)
        x = on_device(p.process, np.ones(count, np.float32))
        assert direct.connect_devices(x, deadline_ns=p.soon()).direct
        sampler = OpSampler(SpanRecorder(bytearray(RING_BYTES), 0))
        sampler.start([direct.flight, staged.flight])
        for c in (direct, direct, staged):
            c.all_reduce(x, deadline_ns=p.soon())
        sampler.end()
        rows = sampler.rows()
        p.close(direct, staged)
        return rows

    copy_ns = count * 4 // BYTES_PER_NS
    for rows in run_threads(host, 2, body):
        found = {(row.op, row.shape): row for row in rows}
        between = found["all_reduce", f"{count * 4} B devices"]
        assert (between.which, between.calls, between.nbytes) == (COLLECTIVE, 2, 2 * count * 4)
        assert between.execute_ns == 2 * (copy_ns + KERNEL_NS + copy_ns) and between.wait_ns > 0
        for way in ("device_to_host", "host_to_device"):
            copies = found[way, f"{count * 4} B"]
            assert (copies.which, copies.calls, copies.execute_ns) == (COPY, 1, copy_ns)
        assert sum(row.which == COLLECTIVE for row in rows) == 2, "the host's all-reduce has a row as well"
    host.drain()


def test_own_times_are_without_what_is_nested() -> None:
    """Of calls whose marks are a..h at 0..70: an outer one with two inner ones, one of which has a third."""
    calls = [Timed("leaf", 2, 3), Timed("left", 1, 4), Timed("right", 5, 6), Timed("outer", 0, 7)]
    found = dict(own_times(calls, range(0, 80, 10)))
    assert found == {"leaf": 10, "left": 20, "right": 10, "outer": 30}
    late = [Timed("op", 0, 2), Timed("copy of another thread", 1, 3)]
    assert dict(own_times(late, [0, 10, 20, 30])) == {"op": 10, "copy of another thread": 20}


def test_a_device_of_the_table_has_its_peaks_and_another_one_none() -> None:
    found = known(device_machine("NVIDIA H200", sharing=2))
    assert found is not None and (found.flops_per_s, found.bytes_per_s) == (989.4e12, 4.8e12)
    assert known(device_machine("NVIDIA H200 NVL", sharing=1)) is None


def test_a_profile_of_a_device_is_compared_with_its_peaks(tmp_path: Path) -> None:
    """Copies between host and device are not: they pass by another memory."""
    made = Device(tmp_path)
    with made.profiler.recording():
        made.step(2)
    made.lines()
    (life,) = read_profiles(tmp_path)
    assert life.run.machine.processor == "Modelled GPU" and life.run.peak is None
    known_run = msgspec.structs.replace(life.run, peak=1e12, stream=1e12)
    life = type(life)(known_run, life.steps, ops=life.ops)
    shares = op_shares([life])
    assert {one.of_peak is None for one in shares if one.which == COPY} == {True}
    linear = next(one for one in shares if one.op == "linear" and one.which == "forward")
    assert linear.of_peak == pytest.approx(linear.gflops / 1e3, rel=0.5) and linear.enqueue_ms > 0
