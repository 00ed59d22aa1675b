"""Fused graphs on the modelled device, captured as CUDA graphs: gradients near numpy's, one launch a step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from support.devices.cuda_model import ModelHost
from support.devices.cuda_model_launches import RunKernel
from support.devices.kernel_numbers import by_numpy, nothing_compiled

from zbmd.training.autograd.rng import Noise
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.graph.cuda_executor import CudaProgram
from zbmd.training.model.graph.fusion import fuse
from zbmd.training.model.graph.steps import FusedSteps
from zbmd.training.model.graph.trace import trace_step
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.errors import LocalProtocolError, UserError

Array = npt.NDArray[Any]
OURS = GPTConfig(context=16, width=64, heads=1, layers=1)
GPT2 = replace(OURS, family="gpt2", activation="gelu", dropout=0.1)
NOISE = Noise(3, 1, np.array([5, 9]))
TOKENS = np.random.default_rng(1).integers(0, 256, (2, 17))


def _executor(*, seed: int = 0, run_kernel: RunKernel = by_numpy) -> Executor:
    host = ModelHost(devices=1, run_kernel=run_kernel, seed=seed, memory_bytes=1 << 34)
    return Executor(host.process(), compile=nothing_compiled)


def _weights(host: GPT) -> Array:
    params, random = host.init(0), np.random.default_rng(0)
    for view in host.layout.views(params):
        view += random.standard_normal(view.shape) * 0.05
    return params.astype(ml_dtypes.bfloat16)


class _Device:
    """A model whose steps are fused graphs, its weights, and room for gradients."""

    def __init__(self, run: Executor, config: GPTConfig, *, recompute: bool = False, cuts: int = 0) -> None:
        self.run, self.model = run, GPT(config, xp=DeviceModule(run), recompute=recompute)
        layout = self.model.layout
        ends = [slot.offset for slot in layout.slots][:: max(1, len(layout.slots) // cuts)] if cuts else []
        spans = [slice(*pair) for pair in pairwise([*ends, layout.size])]
        self.steps = self.model.whole_step = FusedSteps(self.model, run, spans=spans)
        self.weights: Any = run.upload(_weights(self.model))

    def room(self) -> Any:
        made: Any = self.run.empty(self.model.layout.size, ml_dtypes.bfloat16)
        self.model.layout.clear_padding(made)
        return made

    def step(
        self, into: Any, tokens: Array = TOKENS, noise: Noise = NOISE, ready: Any = None
    ) -> tuple[float, Array]:
        """Return the loss and the bits of the gradient."""
        loss = self.model.loss_and_grads(
            self.weights, into, tokens, global_batch=len(tokens), noise=noise, on_grad_ready=ready
        )
        return loss, into.get().view(np.uint16)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", [OURS, GPT2], ids=["zbmd", "gpt2"])
def test_a_fused_graph_has_the_gradients_of_numpy(config: GPTConfig, recompute: bool) -> None:
    """Within 4 % of the norm of each parameter, as the tape on a device. Replayed: the same bits."""
    run, host = _executor(), GPT(config)
    narrow = _weights(host)
    expected = np.zeros_like(narrow)
    expected_loss = host.loss_and_grads(narrow, expected, TOKENS, global_batch=2, noise=NOISE)
    device = _Device(run, config, recompute=recompute)
    tape = GPT(config, xp=DeviceModule(run), recompute=recompute)
    tape.loss_and_grads(device.weights, device.room(), TOKENS, global_batch=2, noise=NOISE)
    by_tape, room = run.launches, device.room()
    found, launches = list[Array](), list[tuple[int, int]]()
    for _ in range(3):
        before = run.launches, run.kernels
        loss, bits = device.step(room)
        assert abs(loss - expected_loss) < 1e-3
        launches.append((run.launches - before[0], run.kernels - before[1]))
        found.append(bits)
    first = launches[0][0]
    assert launches == [(first, first), (1, first), (1, first)], "a step is replayed as one launch"
    assert first < by_tape
    for slot, view, wanted in zip(
        host.layout.slots,
        host.layout.views(found[0].view(ml_dtypes.bfloat16)),
        host.layout.views(expected),
        strict=True,
    ):
        wide = wanted.astype(np.float64)
        assert np.linalg.norm(view.astype(np.float64) - wide) < 0.04 * np.linalg.norm(wide), slot.name
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


def test_a_replayed_step_reads_its_own_batch_noise_and_weights() -> None:
    """Each step of a captured graph has the bits of the same step launched node by node."""
    random = np.random.default_rng(2)
    batches = [
        (random.integers(0, 256, (2, 17)), Noise(3, step, random.integers(0, 99, 2))) for step in range(3)
    ]
    replayed = _Device(_executor(), GPT2)
    rooms = [replayed.room() for _ in range(2)]
    replayed.step(rooms[0])
    for number, (tokens, noise) in enumerate(batches):
        alone = _Device(_executor(), GPT2)
        changed = _weights(alone.model) * np.float32(1 + number)
        for one in (alone, replayed):
            one.run.upload(changed.astype(ml_dtypes.bfloat16), one.weights)
        wanted_loss, wanted = alone.step(alone.room(), tokens, noise)
        for room in rooms:
            loss, found = replayed.step(room, tokens, noise)
            assert loss == wanted_loss
            np.testing.assert_array_equal(found, wanted)
    assert replayed.run.launches < replayed.run.kernels // 4, "steps after the first are replayed"


def test_another_shape_is_captured_again_and_old_graphs_are_destroyed() -> None:
    device = _Device(_executor(), OURS)
    room, wanted = device.room(), dict[int, Array]()
    for _ in range(2):
        for count in (2, 3, 1):  # more shapes than are kept
            tokens = np.random.default_rng(count).integers(0, 256, (count, 17))
            noise = Noise(3, 1, np.arange(count))
            for _ in range(2):
                _, bits = device.step(room, tokens, noise)
                np.testing.assert_array_equal(bits, wanted.setdefault(count, bits))
    held = device.run.held_bytes
    device.steps.close()
    api: Any = device.run.api
    assert not api._graphs, "destroyed"
    device.step(room)
    assert device.run.held_bytes < held + (1 << 14), "memory is used again"


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_handed_over_while_the_step_runs(seed: int) -> None:
    """In pieces of the flat gradient, from the last to the first; another thread copies them meanwhile."""
    device = _Device(_executor(seed=seed), GPT2, cuts=4)
    room, layout = device.room(), device.model.layout
    plain = _Device(_executor(), GPT2)
    _, wanted = plain.step(plain.room())
    with ThreadPoolExecutor(1) as copier:
        for number in range(3):
            copies = dict[int, Future[Array]]()

            def ready(index: int, copies: dict[int, Future[Array]] = copies) -> None:
                assert index not in copies
                view: Any = layout.views(room)[index]
                copies[index] = copier.submit(view.get)

            before = device.run.launches
            device.step(room, ready=ready)
            assert len(copies) == len(layout.slots)
            if number:
                assert 2 <= device.run.launches - before <= 5, "one launch a piece"
            for index, copy in copies.items():
                bits = copy.result().view(np.uint16)
                np.testing.assert_array_equal(bits, layout.views(wanted)[index])


def test_a_capture_permits_neither_memory_nor_copies_nor_waits() -> None:
    """What CUDA refuses, the model refuses; the capture is invalid from then on, also for its end."""
    run = _executor()
    array, api = run.upload(np.ones(64, np.float32)), run.api
    array += array  # which loads the kernel
    event = api.event_create()
    refused = (
        lambda: api.malloc(64),
        lambda: api.host_alloc(64),
        lambda: api.stream_synchronize(run.stream),
        lambda: api.event_synchronize(event),
        lambda: api.event_query(event),
        lambda: api.load_module(nothing_compiled("x", "sm_90a")),
    )
    for call in refused:
        with pytest.raises(CudaFault, match="previous error during capture"), run.capturing():
            array += array
            with pytest.raises(CudaFault, match="when a stream is capturing"):
                call()
            array += array
    for copy in (array.get, lambda: run.upload(np.zeros(64, np.float32), array)):
        with pytest.raises(LocalProtocolError, match="copy before, and replay then"), run.capturing():
            copy()
    with run.capturing() as graph:
        array += array
    run.replay(graph)
    np.testing.assert_array_equal(array.get(), np.full(64, 4.0))


def test_a_capture_is_isolated_from_other_streams() -> None:
    api, other = _executor().api, 0
    stream, other, event = api.stream_create(), api.stream_create(), api.event_create()
    api.event_record(event, other)
    api.stream_begin_capture(stream)
    with pytest.raises(CudaFault, match="captured already"):
        api.stream_begin_capture(stream)
    with pytest.raises(CudaFault, match="uncaptured work in another stream"):
        api.stream_wait_event(stream, event)
    with pytest.raises(CudaFault, match="previous error"):
        api.stream_end_capture(stream)
    api.stream_begin_capture(stream)
    api.event_record(event, stream)
    with pytest.raises(CudaFault, match="would join a capture"):
        api.stream_wait_event(other, event)
    with ThreadPoolExecutor(1) as another, pytest.raises(CudaFault, match="last recorded in a capturing"):
        another.submit(api.event_query, event).result()
    with ThreadPoolExecutor(1) as another:
        another.submit(api.malloc, 64).result()  # the mode is that of the thread
    graph = api.stream_end_capture(stream)
    api.graph_destroy(graph)
    with pytest.raises(CudaFault, match="there is no graph"):
        api.graph_launch(graph, stream)


def test_an_op_without_a_kernel_is_named() -> None:
    traced = trace_step(replace(OURS, heads=2), sequences=2, precision="bfloat16")
    with pytest.raises(UserError, match=r"ops without a kernel: mix, .*softmax_grad\. Attention has kernels"):
        CudaProgram(traced, fuse(traced.graph, target="cuda").graph, _executor())
