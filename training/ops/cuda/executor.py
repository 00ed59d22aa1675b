"""Launch the kernels of the table on one device, in order, on one stream, over arrays in its memory.

Memory is kept by size and handed out again in the order of the stream, so an array may be dropped while the
device still uses it. Bytes cross between host and device in pieces of page-locked memory. Nothing waits for
the device but `download`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog

from zbmd.collectives.flight.device_clock import DEVICE_TO_HOST, HOST_TO_DEVICE
from zbmd.training.ops.cuda.compiler import Compiler
from zbmd.training.ops.cuda.device_array import Block, DeviceArray, Out, Pool
from zbmd.training.ops.cuda.table import BY_NAME, PORTABLE, MatmulPrecision, compile_source
from zbmd.training.ops.cuda.timing import StepTimes, Timer
from zbmd.transport.cuda.api import (
    CudaApi,
    CudaFault,
    DeviceBytes,
    DeviceLost,
    KernelArgument,
    ModuleImage,
    OutOfDeviceMemory,
)
from zbmd.transport.cuda.tiles import DeviceTiles
from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.memory.memfd import in_words
from zbmd.transport.native._native import address_of

log: Final = structlog.stdlib.get_logger("zbmd.device")

PIECE_BYTES: Final = 1 << 22
PIECES: Final = 3
"""Page-locked buffers in each direction."""
_GRAIN: Final = 512
_LARGE: Final = 1 << 20
STEPS_COUNTED: Final = 4
"""Steps whose launches are known: one is committed during that after it."""
BLOCKS_MAX: Final = 4096
"""Of kernels that go over elements in strides of their grid."""

Argument = DeviceArray | DeviceTiles | Out | np.number[Any] | None
CompileSource = Callable[[str, str], ModuleImage]


class DeviceMemoryError(MemoryError):
    """The device has no memory left."""


class NoKernels(UserError):
    """The device is of an architecture that no kernel exists for."""


def architecture_of(capability: tuple[int, int], name: str) -> str:
    """Return which of `PORTABLE` a device of this compute capability runs. Raises `NoKernels`."""
    if capability[0] == 8:
        return PORTABLE[0]
    if capability == (9, 0):
        return PORTABLE[1]
    raise NoKernels(
        f"{name} has compute capability {capability[0]}.{capability[1]}, for which zbmd has no kernels: they "
        "exist for 8.0 to 8.9 and for 9.0. Train with --device cpu."
    )


@cache
def _compiler() -> Compiler:
    return Compiler()


def compiled_here(source: str, architecture: str) -> ModuleImage:
    """Return a source of the table compiled by NVRTC, or from its cache. Raises as `Compiler`."""
    found = compile_source(_compiler(), source, architecture)
    return ModuleImage(name=source, ptx=found.ptx, cubin=found.cubin)


def size_class(nbytes: int) -> int:
    """Return the bytes that are allocated for an array of `nbytes`."""
    grain = _GRAIN if nbytes < _LARGE else 2 * _LARGE
    return max(1, -(-nbytes // grain)) * grain


@dataclass(slots=True)
class _Piece:
    memory: memoryview
    address: int
    event: int
    is_used: bool = False


class _Pieces:
    """A ring of page-locked buffers, each with an event that says when the device is done with it."""

    def __init__(self, api: CudaApi) -> None:
        self._api, self._next = api, 0
        self._every: list[_Piece] = []

    def take(self) -> _Piece:
        """Return the buffer that was used longest ago, once the device is done with it."""
        if len(self._every) < PIECES:
            memory = self._api.host_alloc(PIECE_BYTES)
            address = address_of(np.frombuffer(memory, np.uint8))
            self._every.append(_Piece(memory, address, self._api.event_create()))
        found = self._every[self._next % len(self._every)]
        self._next = (self._next + 1) % PIECES
        if found.is_used:
            self._api.event_synchronize(found.event)
        found.is_used = True
        return found


class Downloads:
    """Copies to the host on a stream of their own, in page-locked pieces. For one thread at a time."""

    def __init__(self, api: CudaApi) -> None:
        self._api, self._pieces = api, _Pieces(api)
        self._stream, self._ordered = api.stream_create(), api.event_create()

    def follow(self, stream: int) -> None:
        """Let what is copied from now on come after what `stream` was asked for so far."""
        self._api.event_record(self._ordered, stream)
        self._api.stream_wait_event(self._stream, self._ordered)

    def copy_from(self, address: int, into: npt.NDArray[Any]) -> None:
        """Copy what lies at an address of the device, and return once it is done; no other stream waits."""
        data, api, waiting = into.reshape(-1).view(np.uint8), self._api, list[tuple[_Piece, Any]]()
        for start in range(0, data.nbytes, PIECE_BYTES):
            piece, part = self._pieces.take(), data[start : start + PIECE_BYTES]
            api.memcpy_async(piece.address, address + start, len(part), self._stream)
            api.event_record(piece.event, self._stream)
            waiting.append((piece, part))
            if len(waiting) == PIECES:
                self._arrived(*waiting.pop(0))
        for one in waiting:
            self._arrived(*one)

    def _arrived(self, piece: _Piece, part: npt.NDArray[np.uint8]) -> None:
        self._api.event_synchronize(piece.event)
        part[:] = np.frombuffer(piece.memory, np.uint8)[: len(part)]


class TimedDownloads(Downloads):
    """Those of arrays, which are timed."""

    def __init__(self, api: CudaApi, timer: Timer) -> None:
        super().__init__(api)
        self._timer = timer

    def copy(self, array: DeviceArray, into: npt.NDArray[Any], *, of_step: StepTimes | None = None) -> None:
        """Copy, and return once it is done; no other stream waits. of_step: times it, by default this one."""
        assert into.flags.c_contiguous and into.nbytes == array.nbytes
        with self._timer.copied(DEVICE_TO_HOST, array.nbytes, self._stream, of_step):
            self.copy_from(array.address, into)


@dataclass(slots=True)
class Graph:
    """Work that was captured, and how many kernels are in it."""

    number: int = 0
    launches: int = 0


class Executor:
    """One device as the engine uses it. Launches come from one thread; downloads from any.

    compile: makes the module of a source for an architecture. sharing: ranks that use the device.
    matmul_precision: what linear layers multiply in. Raises `NoKernels` and `CudaFault`.
    """

    def __init__(
        self,
        api: CudaApi,
        *,
        compile: CompileSource = compiled_here,
        sharing: int = 1,
        matmul_precision: MatmulPrecision = "default",
    ) -> None:
        facts = api.facts()
        self.api: Final = api
        self.name: Final = facts.name
        self.architecture: Final = architecture_of(facts.compute_capability, facts.name)
        self.sharing: Final = sharing
        self.matmul_precision: Final = matmul_precision
        self.stream: Final = api.stream_create()
        self.timer: Final = Timer(api, self.stream)
        self.launches = 0
        """Launches so far, of kernels and of graphs."""
        self.kernels = 0
        """Kernels that were asked for so far, those of graphs included."""
        self.retries = 0
        """Launches that were refused, and then tried again."""
        self._before_step, self._of_step = (0, 0), dict[int, tuple[int, int]]()
        self.uploads: Final = api.stream_create()
        """The stream of copies to the device that run beside what it computes."""
        self._captured: Final = api.stream_create()
        """Records graphs, so that other threads may copy in the order of `stream` meanwhile."""
        self._capturing_thread = 0
        self._compile = compile
        self._modules = dict[str, int]()
        self._functions = dict[str, int]()
        self._free: Final = Pool()
        self._within = threading.local()
        """The pool of a thread's new arrays, if it has one: other threads reduce meanwhile."""
        self._up, self._uploading = _Pieces(api), threading.Lock()
        self._down, self._downloading = TimedDownloads(api, self.timer), threading.Lock()
        self.held_bytes = 0
        """Memory that was allocated, in use or kept."""

    # ---- steps

    def begin_step(self) -> None:
        """Count launches and kernels of a step from now on."""
        self._before_step = self.launches, self.kernels

    def end_step(self, version: int) -> None:
        """Keep what was counted, of the step to `version`, while one of the next few is done."""
        launches, kernels = self._before_step
        self._of_step[version] = self.launches - launches, self.kernels - kernels
        self._of_step.pop(version - STEPS_COUNTED, None)

    def counted(self, version: int) -> tuple[int, int]:
        """Return the launches and kernels of the step to `version`; zeros if it was not done here."""
        return self._of_step.get(version, (0, 0))

    # ---- memory

    def empty(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> DeviceArray:
        """Return a new array with undefined contents. Raises `DeviceMemoryError`."""
        extents, kind = (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype)
        nbytes = size_class(int(np.prod(extents, dtype=np.int64)) * kind.itemsize)
        pool = getattr(self._within, "pool", self._free)
        address = pool.take(nbytes)
        if address is None:
            address = self._allocate(nbytes)
        return DeviceArray(self, address, extents, kind, Block(pool, nbytes, address))

    @contextmanager
    def within(self, pool: Pool) -> Generator[None]:
        """Let arrays that this thread makes in the block take memory from `pool`, and return it there."""
        before = getattr(self._within, "pool", self._free)
        self._within.pool = pool
        try:
            yield
        finally:
            self._within.pool = before

    def close_pool(self, pool: Pool) -> None:
        """Hand the memory of `pool` to all arrays. Nothing that uses it may be asked for any more."""
        pool.close(self._free)

    def zeros(self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> DeviceArray:
        """Return a new array of zeros."""
        made = self.empty(shape, dtype)
        self.clear(made)
        return made

    def clear(self, array: DeviceArray) -> None:
        """Set all bytes to zero."""
        if array.nbytes:
            self.api.memset_async(array.address, 0, array.nbytes, self._asked)

    def _allocate(self, nbytes: int) -> int:
        try:
            found = self.api.malloc(nbytes)
        except OutOfDeviceMemory:
            self.trim()
            try:
                found = self.api.malloc(nbytes)
            except OutOfDeviceMemory as error:
                free, total = self.api.memory_info()
                raise DeviceMemoryError(
                    f"{self.name} has no memory left for {in_words(nbytes)}: {in_words(free)} of "
                    f"{in_words(total)} are free, and this process holds {in_words(self.held_bytes)}. Choose "
                    "fewer --sequences-per-shard, --recompute on, or a smaller model."
                ) from error
        self.held_bytes += nbytes
        return found

    def trim(self) -> None:
        """Give memory that no array uses back to the device."""
        self.api.stream_synchronize(self.stream)
        for nbytes, addresses in self._free.free.items():
            while addresses:
                self.api.free(addresses.pop())
                self.held_bytes -= nbytes

    # ---- copies

    def upload(self, host: npt.NDArray[Any], into: DeviceArray | None = None) -> DeviceArray:
        """Return `host` on the device, in `into` if it is given. `host` may be changed afterwards."""
        array = self.empty(host.shape, host.dtype) if into is None else into
        data = np.ascontiguousarray(host, dtype=array.dtype).reshape(-1).view(np.uint8)
        assert data.nbytes == array.nbytes, f"{host.shape} was to be copied to {array.shape}"
        self._require_no_capture()
        with self._uploading, self.timer.copied(HOST_TO_DEVICE, data.nbytes, self.stream):
            for start in range(0, data.nbytes, PIECE_BYTES):
                piece, part = self._up.take(), data[start : start + PIECE_BYTES]
                np.frombuffer(piece.memory, np.uint8)[: len(part)] = part
                self.api.memcpy_async(array.address + start, piece.address, len(part), self.stream)
                self.api.event_record(piece.event, self.stream)
        return array

    def download(self, array: DeviceArray, into: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return a copy in host memory, in `into` if it is given, after what was asked of the device so far.

        The device computes on meanwhile: what it is asked from now on must not write `array`.
        """
        host = np.empty(array.shape, array.dtype) if into is None else into
        self._require_no_capture()
        with self._downloading:
            self._down.follow(self.stream)
            self._down.copy(array, host)
        return host

    def copy(self, into: DeviceArray, source: DeviceArray) -> None:
        """Copy on the device; dtypes may differ."""
        assert into.size == source.size
        if into.dtype == source.dtype:
            if into.nbytes:
                self.api.memcpy_async(into.address, source.address, into.nbytes, self._asked)
            return
        kinds = {source.dtype.itemsize: source, into.dtype.itemsize: into}
        assert set(kinds) == {2, 4}, f"{source.dtype} was to be copied to {into.dtype}"
        name = "cast_f32_bf16" if into.dtype.itemsize == 2 else "cast_bf16_f32"
        self.each(name, into.size, Out(into), source, np.uint64(into.size))

    # ---- kernels

    def launch(self, name: str, grid: tuple[int, ...] | int, *arguments: Argument) -> None:
        """Ask the device for a kernel of the table. Raises `CudaFault`."""
        entry = BY_NAME[name]
        x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        if not x * y * z:
            return
        given = [_given(one) for one in arguments]
        function, stream = self._function(name), self._asked
        self._tried(
            name,
            lambda: self.api.launch_function(
                function, (x, y, z), (entry.block, 1, 1), entry.dynamic, given, stream
            ),
        )
        self.launches += 1
        self.kernels += 1

    def _tried(self, what: str, ask: Callable[[], None]) -> None:
        """Ask the device for a launch, once more if it refuses: nothing of a launch that is refused has run.

        A capture ends by the first refusal. Raises `CudaFault`.
        """
        try:
            ask()
        except (DeviceLost, OutOfDeviceMemory):
            raise
        except CudaFault as error:
            if self._is_capturing:
                raise
            self.retries += 1
            log.warning("a launch was refused, and is tried again", kernel=what, reason=str(error))
            ask()

    def each(self, name: str, elements: int, *arguments: Argument) -> None:
        """Launch a kernel that goes over so many elements in strides of its grid."""
        self.launch(name, min(BLOCKS_MAX, -(-elements // BY_NAME[name].block)), *arguments)

    # ---- graphs

    @contextmanager
    def capturing(self) -> Generator[Graph]:
        """Record what this thread launches in the block, without running it; replay the result.

        The arrays in use must stay, and all that the block needs must exist, as after a run of the same work:
        CUDA neither allocates nor loads kernels meanwhile. Other threads may copy. Raises `CudaFault`.
        """
        graph, before, stream = Graph(), (self.launches, self.kernels), self._captured
        self.api.stream_begin_capture(stream)
        self._capturing_thread = threading.get_ident()
        try:
            yield graph
        except BaseException:
            with suppress(CudaFault):
                self.api.graph_destroy(self.api.stream_end_capture(stream))
            raise
        else:
            graph.number = self.api.stream_end_capture(stream)
        finally:
            self._capturing_thread = 0
            graph.launches = self.kernels - before[1]
            self.launches, self.kernels = before

    @property
    def _is_capturing(self) -> bool:
        return self._capturing_thread == threading.get_ident()

    @property
    def _asked(self) -> int:
        """The stream that launches of this thread go to."""
        return self._captured if self._is_capturing else self.stream

    def _require_no_capture(self) -> None:
        if self._is_capturing:
            raise LocalProtocolError(
                "a copy between host and device was to be captured, but its page-locked memory has other "
                "contents when the graph is replayed: copy before, and replay then"
            )

    def replay(self, graph: Graph) -> None:
        """Ask the device for all of a graph, as one launch, with what its arrays hold then."""
        self._tried("graph", lambda: self.api.graph_launch(graph.number, self.stream))
        self.launches += 1
        self.kernels += graph.launches

    def drop(self, graphs: Iterable[Graph]) -> None:
        """Forget graphs, after the device is done with them."""
        self.api.stream_synchronize(self.stream)
        for one in graphs:
            self.api.graph_destroy(one.number)

    def _function(self, name: str) -> int:
        found = self._functions.get(name)
        if found is None:
            entry = BY_NAME[name]
            module = self._modules.get(entry.source)
            if module is None:
                image = self._compile(entry.source, self.architecture)
                module = self._modules[entry.source] = self._loaded(image)
            found = self._functions[name] = self.api.get_function(module, name, entry.dynamic)
        return found

    def _loaded(self, image: ModuleImage) -> int:
        try:
            return self.api.load_module(image)
        except CudaFault as error:
            raise UserError(
                f"{self.name} did not load the kernels of {image.name} ({error}); its driver supports CUDA "
                f"{version_in_words(self.api.driver_version())}. Update the driver, or train with --device "
                "cpu."
            ) from error


def version_in_words(version: int) -> str:
    """Return CUDA's number of a version, such as 13000, as 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _given(argument: Argument) -> KernelArgument:
    if isinstance(argument, Out):
        return DeviceBytes(argument.array.address, argument.array.nbytes, written=True)
    if isinstance(argument, DeviceArray):
        return DeviceBytes(argument.address, argument.nbytes)
    return argument
