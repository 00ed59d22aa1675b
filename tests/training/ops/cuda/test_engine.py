"""The engine on a modelled GPU: gradients beside numpy's, and each launch beside its compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from support.devices.cuda_model import ModelHost
from support.devices.cuda_model_launches import KernelValue, ModelLaunch, RunKernel, TiledValue
from support.devices.kernel_numbers import by_interpreter, by_numpy, nothing_compiled
from support.devices.ptx_programs import compiler

from zbmd.training.autograd.rng import Noise
from zbmd.training.config import GPTConfig
from zbmd.training.model.generate import CachedGPT
from zbmd.training.model.gpt import GPT
from zbmd.training.ops.cuda.device_array import DeviceArray, Out
from zbmd.training.ops.cuda.executor import (
    DeviceMemoryError,
    Executor,
    NoKernels,
    architecture_of,
    compiled_here,
)
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.training.ops.cuda.table import BY_NAME, compile_source
from zbmd.training.optim import AdamWConfig, LionConfig, SGDConfig, optimizer_for
from zbmd.training.optim.clip import global_norm, squares_of
from zbmd.training.optim.elementwise import AdamWState, update_blocks
from zbmd.training.optim.on_device import DeviceOptimizer
from zbmd.transport.cuda.api import CudaFault, ModuleImage
from zbmd.transport.errors import UserError

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
OURS = GPTConfig(context=16, width=64, heads=1, layers=1)
GPT2 = replace(OURS, family="gpt2", activation="gelu", dropout=0.1)
LONG = replace(OURS, context=80)
NOISE = Noise(3, 1, np.array([5, 9]))


def _executor(*, run_kernel: RunKernel = by_numpy, seed: int = 0, memory_bytes: int = 1 << 34) -> Executor:
    host = ModelHost(devices=1, run_kernel=run_kernel, seed=seed, memory_bytes=memory_bytes)
    return Executor(host.process(), compile=nothing_compiled)


def _weights(model: GPT) -> Array:
    params, random = model.init(0), np.random.default_rng(0)
    for view in model.layout.views(params):
        view += random.standard_normal(view.shape) * 0.05
    return params.astype(BF16)


def _tokens(context: int = 16) -> Array:
    return np.random.default_rng(1).integers(0, 256, (2, context + 1))


def _gradient(model: GPT, run: Executor | None, params: Array) -> tuple[float, Array]:
    """Return loss and gradient, on the device of `run` or the CPU."""
    if run is None:
        grads = np.zeros_like(params)
        loss = model.loss_and_grads(params, grads, _tokens(model.config.context), global_batch=2, noise=NOISE)
        return loss, grads
    room: Any = run.empty(params.size, params.dtype)
    model.layout.clear_padding(room)
    given: Any = run.upload(params)
    loss = model.loss_and_grads(given, room, _tokens(model.config.context), global_batch=2, noise=NOISE)
    return loss, room.get()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", [OURS, GPT2], ids=["zbmd", "gpt2"])
def test_a_model_has_the_gradients_of_numpy(config: GPTConfig, recompute: bool) -> None:
    """Of each parameter, within 4 % of its norm: activations are rounded to bf16. Twice: the same bits."""
    run = _executor()
    host, device = GPT(config), GPT(config, xp=DeviceModule(run), recompute=recompute)
    params = _weights(host)
    expected_loss, expected = _gradient(host, None, params)
    loss, found = _gradient(device, run, params)
    assert abs(loss - expected_loss) < 1e-3
    for slot, view, wanted in zip(
        host.layout.slots, host.layout.views(found), host.layout.views(expected), strict=True
    ):
        error = np.linalg.norm(view.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64))
        assert error < 0.04, slot.name
    held = run.held_bytes
    again = _gradient(device, run, params)
    assert again[0] == loss
    np.testing.assert_array_equal(again[1].view(np.uint16), found.view(np.uint16))
    assert run.held_bytes == held, "memory is used again"


def test_logits_and_a_loss_without_gradients() -> None:
    run = _executor()
    host, device = GPT(OURS), GPT(OURS, xp=DeviceModule(run))
    params = _weights(host)
    given: Any = run.upload(params)
    assert abs(device.loss(given, _tokens()) - host.loss(params, _tokens())) < 1e-3
    found: Any = device.logits(given, _tokens()[:, :16])
    expected = host.logits(params, _tokens()[:, :16])
    np.testing.assert_allclose(found.get().astype(np.float32), expected, atol=0.05)


@pytest.mark.parametrize("config", [OURS, replace(GPT2, heads=4)], ids=["zbmd", "gpt2"])
def test_generation_has_the_logits_of_numpy(config: GPTConfig) -> None:
    """Read in two pieces, the cache filled in between, and again after the sequence was forgotten."""
    run = _executor()
    host, device = GPT(config), GPT(config, xp=DeviceModule(run))
    params, tokens = _weights(host), _tokens()[0]
    given: Any = run.upload(params)
    expected, found = CachedGPT(host, params), CachedGPT(device, given)
    for _ in range(2):
        for piece in (tokens[:9], tokens[9:10], tokens[10:16]):
            np.testing.assert_allclose(found.extend(piece), expected.extend(piece), atol=0.05)
        assert found.is_full
        found.forget()
        expected.forget()


@pytest.mark.parametrize("config", [AdamWConfig(), LionConfig(), SGDConfig(), SGDConfig(nesterov=True)])
def test_optimizers_on_a_device_have_the_bits_of_numpy(config: Any) -> None:
    run, layout = _executor(), GPT(OURS).layout
    random = np.random.default_rng(2)
    old = AdamWState(*(np.abs(random.standard_normal(layout.size)).astype(np.float32) for _ in range(3)))
    new = AdamWState(*(np.zeros(layout.size, np.float32) for _ in range(3)))
    grads = random.standard_normal(layout.size).astype(BF16)
    optimizer_for(config, layout).update(old, new, grads, step=2, learning_rate=0.01, grad_scale=0.5)
    count = 3 if isinstance(config, AdamWConfig) else 2
    arrays = [run.upload(one) for one in (old.weights, old.mean, old.square)[:count]]
    narrow, slope = run.empty(layout.size, BF16), run.upload(grads)
    DeviceOptimizer(config, update_blocks(layout), run).update(
        arrays, narrow, slope, step=2, learning_rate=0.01, grad_scale=0.5
    )
    for array, wanted in zip(arrays, (new.weights, new.mean, new.square), strict=False):
        np.testing.assert_array_equal(array.get(), wanted)
    np.testing.assert_array_equal(narrow.get().view(np.uint16), new.weights.astype(BF16).view(np.uint16))
    assert squares_of(cast("Any", slope), xp=np) ** 0.5 == pytest.approx(global_norm(grads, xp=np), rel=1e-6)


class _Watched(Executor):
    """Notes the dtypes of the arguments of each launch."""

    def __init__(self, host: ModelHost) -> None:
        super().__init__(host.process(), compile=nothing_compiled)
        self.noted: list[list[Any]] = []

    def launch(self, name: str, grid: tuple[int, ...] | int, *arguments: Any) -> None:
        arrays = [one.array if isinstance(one, Out) else one for one in arguments]
        self.noted.append([one.dtype if isinstance(one, DeviceArray) else None for one in arrays])
        super().launch(name, grid, *arguments)


def _kept(value: KernelValue) -> KernelValue:
    """Return an argument of a launch as it is now."""
    if isinstance(value, TiledValue):
        return replace(value, data=value.data.copy())
    return value.copy() if isinstance(value, np.ndarray) else value


def _launches_of_steps() -> Iterator[tuple[ModelLaunch, list[Any], list[Any]]]:
    """Yield one launch of each kernel that steps need, with its arguments after it, and their dtypes."""
    found: dict[str, tuple[ModelLaunch, list[Any], list[Any]]] = {}
    count = iter(range(1_000_000))

    def note(launch: ModelLaunch) -> None:
        dtypes, name = run.noted[next(count)], launch.kernel.name
        before = {id(one): _kept(one) for one in launch.arguments}
        by_numpy(launch)
        if name not in found:
            after = [one.copy() if isinstance(one, np.ndarray) else one for one in launch.arguments]
            given = [before[id(one)] for one in launch.arguments]
            found[name] = replace(launch, arguments=given), after, dtypes

    run = _Watched(ModelHost(devices=1, run_kernel=note))
    for config in (OURS, GPT2, LONG):
        model = GPT(config, xp=DeviceModule(run))
        _, grads = _gradient(model, run, _weights(model))
        arrays = [run.zeros(model.layout.size, np.float32) for _ in range(3)]
        slope = run.upload(grads)
        squares_of(cast("Any", slope), xp=np)
        DeviceOptimizer(AdamWConfig(), update_blocks(model.layout), run).update(
            arrays, run.empty(grads.size, BF16), slope, step=0, learning_rate=0.01, grad_scale=1.0
        )
        run.copy(run.empty(grads.size, BF16), arrays[0])
        cached = CachedGPT(model, run.upload(_weights(model)))  # type: ignore[arg-type]
        cached.extend(np.arange(5))
        cached.extend(np.arange(1))
    run.api.stream_synchronize(run.stream)
    yield from found.values()


def test_each_launch_of_a_step_is_what_its_code_computes() -> None:
    """One launch of each kernel, with the arguments that the engine gives, in the interpreter of its PTX."""
    names = set[str]()
    for launch, after, dtypes in _launches_of_steps():
        name = launch.kernel.name
        names.add(name)
        source = BY_NAME[name].source
        code = compile_source(compiler(), source, "sm_90a")
        image = ModuleImage(name=source, ptx=code.ptx, cubin=code.cubin)
        by_interpreter(replace(launch, kernel=replace(launch.kernel, image=image)))
        for given, wanted, dtype, writes in zip(launch.arguments, after, dtypes, launch.written, strict=True):
            if writes:
                assert isinstance(given, np.ndarray)
                _close(given.view(dtype), wanted.view(dtype), name)
    assert {"tma_nn_bf16", "tma_tn_f32", "matmul_nt_bf16", "dropout_bf16", "adamw_bf16"} <= names
    assert {"attention_keys_grad_64", "attention_wgmma_64", "attention_wgmma_keys_grad_64"} <= names
    assert len(names) >= 30


def _close(found: Array, expected: Array, name: str) -> None:
    unit = 2.0**-7 if found.dtype == BF16 else 2.0**-16
    wide = expected.astype(np.float64)
    atol = unit * max(1e-30, float(np.abs(wide).max()))
    np.testing.assert_allclose(found.astype(np.float64), wide, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("seed", range(3))
def test_bytes_cross_in_pieces_in_any_order_of_streams(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbmd.training.ops.cuda.executor.PIECE_BYTES", 4096)
    run = _executor(seed=seed)
    values = np.random.default_rng(seed).standard_normal(9 * 1024 + 77).astype(np.float32)
    array = run.upload(values)
    twice = array.copy()
    twice += array
    np.testing.assert_array_equal(twice.get(), values * 2)
    array[5:9] = 0
    array[20:24] = values[:4]
    assert array[5:9].get().tolist() == [0.0] * 4
    np.testing.assert_array_equal(array[20:24].get(), values[:4])


def test_memory_that_runs_out_is_given_back_first() -> None:
    run = _executor(memory_bytes=8 << 20)
    first = run.empty(3 << 20, np.uint8)
    del first
    second = run.empty(7 << 20, np.uint8)  # not beside what is kept for reuse
    with pytest.raises(DeviceMemoryError, match=r"Modelled GPU has no memory left for 2.* --recompute"):
        run.empty(2 << 20, np.uint8)
    assert second.nbytes == 7 << 20


def test_a_failed_launch_is_an_error_of_everything_that_follows() -> None:
    def fail(launch: ModelLaunch) -> None:
        raise CudaFault(f"an illegal memory access was encountered in {launch.kernel.name}")

    run = _executor(run_kernel=fail)
    array = run.upload(np.ones(8, np.float32))
    array += array
    for _ in range(2):
        with pytest.raises(CudaFault, match="illegal memory access"):
            array.get()


def test_an_architecture_without_kernels_is_named() -> None:
    assert [architecture_of(one, "x") for one in ((8, 0), (8, 9), (9, 0))] == ["sm_80", "sm_80", "sm_90a"]
    for capability in ((7, 5), (10, 0)):
        with pytest.raises(NoKernels, match=r"compute capability .* 8.0 to 8.9 and for 9.0"):
            architecture_of(capability, "x")


def test_a_driver_that_refuses_the_code_is_named() -> None:
    run = _executor()

    def refuse(image: ModuleImage) -> int:
        raise CudaFault("CUresult 218")

    run.api.load_module = refuse  # type: ignore[method-assign]
    run.api.host.driver = 12040  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"norm.cu .*CUresult 218.* supports CUDA 12.4"):
        run.launch("sum_runs", 1)


def test_modules_are_compiled_for_the_device() -> None:
    image = compiled_here("norm.cu", "sm_80")
    assert image.cubin[:4] == b"\x7fELF" and "sm_80" in image.ptx


def test_a_graph_repeats_what_was_captured_with_new_values() -> None:
    run = _executor()
    array, sums = run.upload(np.ones(64, np.float32)), run.zeros(64, np.float32)
    sums += array  # which loads the kernel
    run.clear(sums)
    with run.capturing() as graph:
        sums += array
    assert graph.launches == 1 and sums.get().sum() == 0
    before = run.launches
    for value in (1.0, 2.0):
        run.upload(np.full(64, value, np.float32), array)
        run.replay(graph)
    np.testing.assert_array_equal(sums.get(), np.full(64, 3.0))
    assert run.launches == before + 2, "a graph is one launch"
