"""The checks of `lab.gpu`, in the order of the table. They run on GPUs alone, by cupy."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from zbmd.actors.cluster.jobs.host import HostConfig
from zbmd.actors.system import ActorSystem
from zbmd.actors.view import OnLoss
from zbmd.tools.bench.run_ranks import run_ranks
from zbmd.tools.chaos.soak_operators import FlakyDevice
from zbmd.tools.chaos.supervised_recipe import SupervisedRecipe
from zbmd.tools.lab.gpu import engine, hopper, overlap
from zbmd.tools.lab.gpu.job import survive_kills
from zbmd.training.autograd.array_module import to_host, xp_for
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model_actors.operator_devices import HostDevice, cuda_device
from zbmd.training.scenarios.training import plain_job
from zbmd.transport.cuda.api import choose_copy_route, why_no_ipc
from zbmd.transport.cuda.array import DeviceHandle, DeviceSpan, decode_handle, encode_handle
from zbmd.transport.cuda.peer import CudaPeer
from zbmd.transport.cuda.region import CudaRegion, DeviceExports
from zbmd.transport.cuda.runtime import CudaRuntime, visible_devices
from zbmd.transport.errors import UserError
from zbmd.transport.host.topology.devices import read_rdma_devices
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native._native import WAIT_OK, address_of, now_ns


class CheckFailed(Exception):
    """A check has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Hardware that a check cannot run without."""

    gpus: int = 1
    rdma: bool = False
    module: str = ""

    def __str__(self) -> str:
        """Such as `2 GPUs` or `1 GPU, RDMA`."""
        module = f", {self.module}" if self.module else ""
        return f"{self.gpus} GPU{'s' * (self.gpus > 1)}" + ", RDMA" * self.rdma + module


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row. run: returns the text beside `ok`; it raises whatever is wrong."""

    name: str
    needs: Needs
    would: str
    run: Callable[[], str]
    limit_s: float = 300.0
    """Most take seconds."""


# Collectives: two ranks run `lab.gpu.ranks`; rank 0 prints the result.

RANKS: Final = 2
ARENA_BYTES: Final = 256 << 20


def run_on_ranks(what: str, gpus: int) -> str:
    """Run `what` on so many GPUs. Raises `UserError` if the ranks fail."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    config = HostConfig(
        target=str(Path(__file__).with_name("ranks.py")),
        arguments=(what,),
        world_size=RANKS,
        on_loss=OnLoss.STOP,
        arena_bytes=ARENA_BYTES,
        environment={"CUDA_VISIBLE_DEVICES": first} if gpus == 1 else {},
    )
    (report,) = asyncio.run(run_ranks(config))
    return str(report["told"])


def run_torch(what: str, gpus: int, ranks: int = RANKS, **environment: str) -> str:
    """Run a check of PyTorch's backend on so many GPUs. Raises `UserError` if the ranks fail."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    visible = {"CUDA_VISIBLE_DEVICES": first} if gpus == 1 else {}
    config = HostConfig(
        target=str(Path(__file__).with_name("torch_ranks.py")),
        arguments=(what,),
        world_size=ranks,
        on_loss=OnLoss.REPLACE,
        arena_bytes=ARENA_BYTES,
        environment={**visible, **environment},
        preload=("torch",),
    )
    reports = asyncio.run(run_ranks(config))
    return str(next(report["told"] for report in reports if "told" in report))


def resilient(gpus: int) -> str:
    """Kill a rank of a resilient loop on so many GPUs. Raises `UserError` if it ends with other bits."""
    workspace = ":4096:8"  # for PyTorch's deterministic algorithms
    calm, killed = (
        run_torch("resilient", gpus, CUBLAS_WORKSPACE_CONFIG=workspace, ZBMD_FAULT=fault)
        for fault in ("", "rank1:loop.prepared:9")
    )
    if calm != killed:
        raise UserError(f"undisturbed {calm}, and with a rank killed {killed}: expected the same bits")
    return f"{calm}, also with a rank killed"


OWN_SLOT, PEER_SLOT = 1, 2
INCARNATION: Final = 1
PUT_BYTES: Final = 64 << 20
DMA_BUF_BYTES: Final = 2 << 20
ROUNDS: Final = 20
WAIT_NS: Final = 60_000_000_000
TOLERANCE: Final = 1e-4
"""Relative, of float32 gradients whose sums are in another order."""


@dataclass(slots=True, kw_only=True)
class _Owner:
    """Another process's device memory, open here, and the cells that notify it."""

    process: subprocess.Popen[str]
    runtime: CudaRuntime
    peer: CudaPeer
    region: CudaRegion
    cells: Segment

    def crc(self) -> int:
        """Of what that process sees in its memory."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("look\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self, channel: int, value: int) -> None:
        """Until its cell is set: its cells are in this process, whose own life is not at stake here."""
        outcome = self.cells.wait(OWN_SLOT, channel, value, deadline_ns=now_ns() + WAIT_NS)
        if outcome != WAIT_OK:
            raise CheckFailed(f"a put was not told: {outcome}")


@contextmanager
def _owner(own_device: int, their_device: int, nbytes: int = PUT_BYTES) -> Generator[_Owner]:
    command = [
        sys.executable,
        "-m",
        "zbmd.tools.lab.gpu.checks",
        str(their_device),
        str(nbytes),
        str(PEER_SLOT),
    ]
    own = Segment.create(slot=OWN_SLOT, incarnation=1, arena_bytes=0, inbox_bytes=4096)
    cells = Segment.create(slot=PEER_SLOT, incarnation=INCARNATION, arena_bytes=0, inbox_bytes=4096)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            told = bytes.fromhex(process.stdout.readline())
            handle = decode_handle(told, DeviceHandle, slot=PEER_SLOT, incarnation=INCARNATION)
            anchor = cells.regions.register(cells.inbox.empty(64, np.uint8))
            cell = PeerSegment.attach(cells.fds, slot=PEER_SLOT).open_region(anchor, own)
            runtime = CudaRuntime(own_device)
            peer = CudaPeer(runtime, cell)
            try:
                with CudaRegion(peer, handle) as region:
                    yield _Owner(process=process, runtime=runtime, peer=peer, region=region, cells=cells)
            finally:
                peer.close()
        finally:
            process.stdin.close()
    cells.close()
    own.close()


def facts() -> str:
    """What CUDA says of the devices, and the way between each two."""
    found = [CudaRuntime(index) for index in range(visible_devices())]
    lines = [f"{each.facts().name} at {each.facts().pci}" for each in found]
    lines += [f"IPC of GPU {each.device}: {why_no_ipc(each.facts()) or 'yes'}" for each in found]
    lines += [f"dma-buf of GPU {each.device}: {each.facts().dma_buf}" for each in found]
    for a in found:
        for b in found[a.device + 1 :]:
            reaches = a.can_access_peer(b.device)
            choice = choose_copy_route(
                a.facts(), b.facts(), same_host=True, visible=True, can_access_peer=reaches
            )
            lines.append(f"{a.device} to {b.device}: {choice.route.value}, {choice.reason}")
    return "; ".join(lines)


def put_between_processes(their_device: int) -> str:
    """Puts of host and device arrays, gets, and what the owner sees."""
    xp: Any = xp_for("cuda")
    random = np.random.default_rng(1)
    with _owner(0, their_device) as owner, xp.cuda.Device(0):
        for value, nbytes in enumerate((1, 4095, 1 << 20, PUT_BYTES), 1):
            src = random.integers(0, 256, PUT_BYTES, np.uint8)
            owner.region.put(src, channel=0, value=2 * value - 1).wait()
            new = random.integers(0, 256, nbytes, np.uint8)
            src[:nbytes] = new
            owner.region.put(xp.asarray(new), channel=0, value=2 * value)
            owner.wait(0, 2 * value)
            if owner.crc() != zlib.crc32(src.tobytes()):
                raise CheckFailed(f"after a put of {nbytes} bytes the owner sees something else")
            into = xp.empty(PUT_BYTES, xp.uint8)
            owner.region.get(into).wait()
            if not np.array_equal(to_host(into), src):
                raise CheckFailed("a get brought something else")
    return f"4 sizes up to {PUT_BYTES >> 20} MiB, from the host and from the device, and back"


def signals_between_streams(their_device: int) -> str:
    """Puts that are notified at once; a stream of ours follows the event that was recorded after them."""
    xp: Any = xp_for("cuda")
    with _owner(0, their_device) as owner, xp.cuda.Device(0):
        owner.region.put(np.zeros(PUT_BYTES, np.uint8), channel=0, value=1).wait()
        owner.peer.offer_event(OWN_SLOT, 1, 1)
        spans_ns: list[int] = []
        for value in range(1, ROUNDS + 1):
            src = xp.full(1 << 20, value, xp.uint8)
            xp.cuda.get_current_stream().synchronize()
            begin_ns = time.monotonic_ns()
            transfer = owner.region.put_behind(src, channel=1, value=value)
            spans_ns.append(time.monotonic_ns() - begin_ns)
            owner.wait(1, value)
            transfer.wait()
        if owner.crc() != zlib.crc32(bytes([ROUNDS]) * (1 << 20) + bytes(PUT_BYTES - (1 << 20))):
            raise CheckFailed("the owner sees something else")
    return f"asked and told in {statistics.median(spans_ns) / 1e3:.1f} us (median of {ROUNDS}, 1 MiB)"


def put_beside_cupy(their_device: int) -> str:
    """Puts of 64 MiB beside copies by cupy alone, turn by turn."""
    xp: Any = xp_for("cuda")
    with _owner(0, their_device) as owner, xp.cuda.Device(0):
        src = xp.asarray(np.random.default_rng(1).integers(0, 256, PUT_BYTES, np.uint8))
        with xp.cuda.Device(their_device):
            into = xp.empty(PUT_BYTES, xp.uint8)
        stream = xp.cuda.Stream(non_blocking=True)

        def raw() -> None:
            into.data.copy_from_device_async(src.data, PUT_BYTES, stream)
            stream.synchronize()

        def ours(value: int) -> None:
            owner.region.put(src, channel=0, value=value)
            owner.wait(0, value)

        raw_ns: list[int] = []
        ours_ns: list[int] = []
        for value in range(1, ROUNDS + 1):
            raw_ns.append(_span_ns(raw))
            ours_ns.append(_span_ns(partial(ours, value)))
    theirs, mine = statistics.median(raw_ns), statistics.median(ours_ns)
    return (
        f"put {PUT_BYTES / mine:.1f} GB/s, cupy {PUT_BYTES / theirs:.1f} GB/s: {mine / theirs:.2f} times its "
        f"time (medians of {ROUNDS})"
    )


def _span_ns(call: Callable[[], None]) -> int:
    begin_ns = time.monotonic_ns()
    call()
    return time.monotonic_ns() - begin_ns


def gpt_step() -> str:
    """Loss and gradients of a small GPT in float32, beside the processor's."""
    xp: Any = xp_for("cuda")
    config = GPTConfig(context=64, width=128, heads=4, layers=2)
    host, device = GPT(config), GPT(config, xp=xp)
    params = host.init(0)
    params += np.random.default_rng(0).standard_normal(params.shape).astype(np.float32) * np.float32(0.02)
    tokens = np.random.default_rng(1).integers(0, 256, (4, 65), dtype=np.uint8)
    grads = np.zeros_like(params)
    loss = host.loss_and_grads(params, grads, tokens, global_batch=4)
    there, device_grads = xp.asarray(params), xp.zeros(params.shape, xp.float32)
    device_loss = device.loss_and_grads(there, device_grads, tokens, global_batch=4)
    again = xp.zeros_like(device_grads)
    device.loss_and_grads(there, again, tokens, global_batch=4)
    found = to_host(device_grads)
    error = float(np.abs(found - grads).max() / np.abs(grads).max())
    if error > TOLERANCE or abs(device_loss - loss) > TOLERANCE * abs(loss):
        raise CheckFailed(f"gradients differ by {error:.2e} of the largest, losses {device_loss} and {loss}")
    same = "the same" if found.tobytes() == to_host(again).tobytes() else "other"
    return f"gradients within {error:.1e} of the processor's; {same} bits when run again"


def operators_leave_a_failed_device() -> str:
    """Compare operator actors on the GPU with the processor; then let the GPU fail under them."""
    recipe = plain_job(2, 3).recipe
    weights = recipe.model.init(0) + np.float32(0.01)

    def gradients(made: Any) -> Any:
        grads = np.zeros_like(weights)
        made.shard_gradient(weights, grads, recipe.sample_ids(1)[0], step=1)
        return grads

    async def run(device: FlakyDevice) -> tuple[Any, int]:
        system = ActorSystem("gpu-check")
        made = SupervisedRecipe(recipe, devices=(device, HostDevice()))
        await made.actors.start(system)
        try:
            return await asyncio.to_thread(gradients, made), made.actors.moves
        finally:
            await system.stop()

    wanted = gradients(recipe)

    def measure(fault_after: int | None) -> tuple[float, int, int]:
        """Return the relative error of the gradients, the moves and the failures of one run."""
        device = FlakyDevice(cuda_device(0), Random(0), share=0.0, fault_after=fault_after)
        found, moves = asyncio.run(run(device))
        return float(np.abs(found - wanted).max() / np.abs(wanted).max()), moves, device.failures

    on_gpu, stayed, _ = measure(None)
    after_fault, moves, failures = measure(5)
    if stayed or on_gpu > TOLERANCE:
        raise CheckFailed(f"without a fault: {stayed} moves, gradients differ by {on_gpu:.2e}")
    if not moves or failures != 1 or after_fault > TOLERANCE:
        raise CheckFailed(f"{moves} moves, {failures} failures, gradients differ by {after_fault:.2e}")
    return (
        f"on the GPU gradients within {on_gpu:.1e}; {moves} operators moved after one fault, "
        f"then within {after_fault:.1e}"
    )


def tests_with_cupy() -> str:
    """The project's own tests that want cupy."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "tests").is_dir():
        root = Path.cwd()
    paths = ["tests/training/autograd/test_xp.py", "tests/transport/cuda/test_cuda_runtime.py"]
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "cupy", *paths]
        code = subprocess.run(command, cwd=root, stdout=output, stderr=output, check=False).returncode
        output.seek(0)
        last = output.read().strip().splitlines()[-1:]
    if code or (last and "skipped" in last[0]):
        raise CheckFailed(f"pytest ended with {code}: {' '.join(last)}")
    return " ".join(last)


def dma_buf() -> str:
    """Device memory is exported and registered with a network card."""
    # Here, not above: they need libibverbs, other checks do not.
    from zbmd.transport.rdma.dmabuf import Staged, register_device_memory
    from zbmd.transport.rdma.native._rdma_device import Device

    runtime = CudaRuntime(0)
    name = read_rdma_devices()[0].name
    base = runtime.malloc(DMA_BUF_BYTES)
    try:
        found = register_device_memory(
            Device(name), runtime, base, DMA_BUF_BYTES, remote_read=True, remote_write=True
        )
        if isinstance(found, Staged):
            raise CheckFailed(found.reason)
        found.registration.revoke()
    finally:
        runtime.free(base)
    return f"2 MiB exported, and registered with {name}"


_PEERS: Final = ((0, "one GPU", Needs()), (1, "two GPUs", Needs(gpus=2)))


def _of_a_pair(
    name: str, would: str, run: Callable[[int], str], device: int, where: str, needs: Needs
) -> Check:
    return Check(name=f"{name}, {where}", needs=needs, would=would, run=lambda: run(device))


_OF_TORCH: Final = (
    *(
        (what, f", {where}", needs.gpus, would, partial(run_torch, what, needs.gpus))
        for what, would in (
            ("operations", "compare every operation and dtype on CUDA tensors with the host's"),
            ("streams", "have streams wait for calls of the backend, and calls for streams"),
            ("kill", "kill a rank in an all-reduce of CUDA tensors, and go on with its replacement"),
            ("overlap", "time an all-reduce of 64 MiB and matrix products, alone and at once"),
        )
        for _, where, needs in _PEERS
    ),
    *(
        (
            "resilient",
            f", {where}",
            needs.gpus,
            "kill a rank of a DDP loop, which ends with the same bits",
            run,
        )
        for _, where, needs in _PEERS
        for run in [partial(resilient, needs.gpus)]
    ),
    (
        "streams",
        ", one hardware queue",
        1,
        "the same where all streams share a queue: a call could wait behind its own gate",
        partial(run_torch, "streams", 1, CUDA_DEVICE_MAX_CONNECTIONS="1"),
    ),
    ("nccl", ", one GPU", 1, "use NCCL beside zbmd, and abort it", partial(run_torch, "nccl", 1, 1)),
    ("nccl", ", two GPUs", 2, "kill a rank that NCCL waits for, and go on", partial(run_torch, "nccl", 2)),
    (
        "profile",
        "",
        1,
        "compare the times of sampled ops of PyTorch with those of its events",
        partial(run_torch, "profile", 1, 1),
    ),
)

CHECKS: Final = (
    Check(name="facts", needs=Needs(), would="ask CUDA for the devices and the ways between them", run=facts),
    Check(name="tests", needs=Needs(), would="run the tests that want cupy", run=tests_with_cupy),
    *(
        _of_a_pair(name, would, run, *pair)
        for name, would, run in (
            (
                "put",
                "put to and get from another process's device memory, which says what it sees",
                put_between_processes,
            ),
            ("signal", "order streams by events that are notified at once", signals_between_streams),
            ("bandwidth", "time puts of 64 MiB beside cupy's own copies", put_beside_cupy),
        )
        for pair in _PEERS
    ),
    *(
        Check(name=f"{name}, {where}", needs=needs, would=would, run=partial(run_on_ranks, what, 1 + device))
        for name, what, would in (
            (
                "collectives",
                "compare",
                "compare every operation and dtype of two ranks' arrays there with the same of numpy's",
            ),
            (
                "collectives between devices",
                "between",
                "the same, once the ranks read the memory of each other's devices",
            ),
            (
                "collectives' speed",
                "time",
                "time an all-reduce of 64 MiB between devices, through the host and on it, and NCCL's",
            ),
        )
        for device, where, needs in _PEERS
    ),
    *(
        Check(
            name=f"torch, {what}{more}",
            needs=Needs(gpus=gpus, module="torch"),
            would=would,
            run=run,
            limit_s=90.0,
        )
        for what, more, gpus, would, run in _OF_TORCH
    ),
    Check(
        name="engine, gradients",
        needs=Needs(),
        would="launch the engine's kernels on a GPT, and compare its gradients with the processor's",
        run=lambda: engine.gradients(engine.on_gpu()),
    ),
    Check(
        name="engine, graph",
        needs=Needs(),
        would="capture launches in a graph, replay them with new inputs, and time both",
        run=lambda: engine.graph(engine.on_gpu()),
    ),
    Check(
        name="engine, sm_90a",
        needs=Needs(),
        would="compare TMA and FP8 products, and attention by wgmma, with proved kernels, and time them",
        run=lambda: hopper.kernels(engine.on_gpu()),
    ),
    Check(
        name="engine, fused",
        needs=Needs(),
        would="compute steps by a fused graph and by the tape, replay the graph, and time both",
        run=lambda: engine.fused(engine.on_gpu()),
    ),
    Check(
        name="engine, op times",
        needs=Needs(),
        would="sample the ops of steps by CUDA events, and compare their sum with the steps' time",
        run=lambda: engine.op_times(engine.on_gpu()),
    ),
    Check(
        name="engine, uploads",
        needs=Needs(),
        would="upload batches beside the step before them, and compare the bits",
        run=lambda: overlap.uploads(engine.on_gpu()),
    ),
    Check(
        name="engine, state",
        needs=Needs(),
        would="copy a state to the host beside kernels, and compare its digest with the device's",
        run=lambda: overlap.state(engine.on_gpu()),
    ),
    Check(
        name="engine, job",
        needs=Needs(),
        would="train by zbmd train --device cuda on two ranks, kill one, and compare the weights' bits",
        run=engine.job,
    ),
    Check(
        name="engine, meshes",
        needs=Needs(),
        would="train along dp, fsdp, pp and tp with a rank killed, and compare the bits with calm jobs",
        run=engine.meshes,
    ),
    Check(name="gpt", needs=Needs(), would="compute a GPT's gradients beside the processor's", run=gpt_step),
    Check(
        name="operators",
        needs=Needs(),
        would="let the GPU fail under operator actors, which move to the processor",
        run=operators_leave_a_failed_device,
    ),
    Check(
        name="job",
        needs=Needs(module="torch"),
        would="train a PyTorch model on two ranks, kill each once, and compare the state's bits",
        run=survive_kills,
    ),
    Check(
        name="dma-buf",
        needs=Needs(rdma=True),
        would="register device memory with a network card",
        run=dma_buf,
    ),
)


def own(device: int, nbytes: int, slot: int) -> None:
    """Own device memory, as the other process of a check, until the input ends.

    Writes the handle of the memory as a line of hexadecimal digits, and for each line of the input the CRC-32
    of the memory's bytes.
    """
    runtime = CudaRuntime(device)
    base = runtime.malloc(nbytes)
    exports = DeviceExports(runtime, slot=slot, incarnation=INCARNATION)
    handle = exports.register(DeviceSpan(address=base, shape=(nbytes,), typestr="|u1"))
    print(encode_handle(handle).hex(), flush=True)
    stream = runtime.stream_create()
    seen = bytearray(nbytes)
    for _ in sys.stdin:
        runtime.memcpy_async(address_of(seen), base, nbytes, stream)
        runtime.stream_synchronize(stream)
        print(zlib.crc32(seen), flush=True)


if __name__ == "__main__":
    own(*(int(argument) for argument in sys.argv[1:4]))
