"""The state of a launch that instructions work on, registers, memories and clocks, and their table.

A register is one array over all threads of the grid, of unsigned integers that hold its bits. An instruction
runs for many threads at once: `Run.threads`, those that are at it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from zbmd.tools.lab.ptx.clocks import WARP, Clocks, Ints
from zbmd.tools.lab.ptx.counters import Counters
from zbmd.tools.lab.ptx.errors import DivergentThreads, PtxError, PtxSyntaxError, UninitialisedRead
from zbmd.tools.lab.ptx.memory import Buffer, DeviceMemory, SharedMemory, Tiles, Values
from zbmd.tools.lab.ptx.program import (
    WIDTHS,
    Address,
    Group,
    Immediate,
    Instruction,
    Kernel,
    Operand,
    Register,
    SpecialRegister,
    Symbol,
)
from zbmd.transport.cuda.tiles import MAP_BYTES, TileLayout

SHARED_WINDOW: Final = 0x7E00_0000_0000
"""The address of shared memory in the generic address space."""
BITS: Final = {0: np.bool_, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
PARAMETER_WINDOW: Final = 0x7D00_0000_0000
"""The address of the first tensor map in the generic address space."""
DTYPES: Final[dict[str, Any]] = {
    "pred": np.bool_,
    **{f"b{8 * n}": BITS[n] for n in (1, 2, 4, 8)},
    **{f"u{8 * n}": BITS[n] for n in (1, 2, 4, 8)},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
    **{"f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64},
    **{"f16x2": np.uint32, "bf16x2": np.uint32, "tf32": np.uint32},
}
Dim3: TypeAlias = tuple[int, int, int]
Argument: TypeAlias = Buffer | Tiles | int | float | bytes
Handler: TypeAlias = "Callable[[Run, Instruction], None]"


@dataclass(frozen=True, slots=True)
class Known:
    """An instruction of the table, and the modifiers that it may have."""

    handler: Handler
    modifiers: frozenset[str]


TABLE: Final = dict[str, Known]()


def instruction(*opcodes: str, modifiers: str = "") -> Callable[[Handler], Handler]:
    """Enter a function into the table. modifiers: those it knows, beside all types."""

    def enter(handler: Handler) -> Handler:
        for opcode in opcodes:
            TABLE[opcode] = Known(handler, frozenset(modifiers.split()) | frozenset(WIDTHS))
        return handler

    return enter


def unsupported(i: Instruction) -> PtxSyntaxError:
    """Return the error of an instruction with a form that is not known."""
    return PtxSyntaxError(f"the interpreter does not know this form of {i.opcode}: {i.where}")


@dataclass(slots=True)
class Arrivals:
    """Those at a barrier of a block: threads that wait, how many came, and what they release."""

    waiting: list[int] = field(default_factory=list)
    arrived: int = 0
    row: Ints | None = None


class Run:
    """One launch under way."""

    def __init__(
        self, kernel: Kernel, grid: Dim3, block: Dim3, arguments: list[Argument], dynamic: int
    ) -> None:
        self.kernel: Final = kernel
        self.grid: Final = grid
        self.block_shape: Final = block
        self.block: Final = block[0] * block[1] * block[2]
        self.blocks: Final = grid[0] * grid[1] * grid[2]
        self.count: Final = self.block * self.blocks
        self.now = 0
        self.counters: Final = Counters()
        self.clocks: Final = Clocks(self.blocks, self.block, vectors=_needs_vectors(kernel))
        grain = _grain(kernel)
        named = [
            (variable.name, argument.buffer if isinstance(argument, Tiles) else argument)
            for variable, argument in zip(kernel.parameters, arguments, strict=True)
            if isinstance(argument, Buffer | Tiles)
        ]
        self.device: Final = DeviceMemory(named, grain, self.clocks, self.counters)
        self.parameters: Final = self._encode(arguments)
        self.symbols, nbytes = _place_shared(kernel, dynamic)
        self.tiles: Final = dict[int, tuple[int, TileLayout]]()
        """Tensor maps by their own address: the matrix's address, and its layout."""
        self._place_tiles(arguments)
        self.shared: Final = SharedMemory(self.blocks, nbytes, grain, self.clocks, self.counters)
        self.everyone: Final = np.arange(self.count)
        self.threads: Ints = self.everyone
        self._selection: slice | Ints = slice(None)
        self.waiting: Final = np.zeros(self.count, np.bool_)
        self.arrivals: Final = dict[tuple[int, int], Arrivals]()
        self.groups: Final = np.zeros(self.count, np.int64)
        """Groups of `cp.async` that each thread has closed."""
        self.under_way: Final = list[Any]()
        """Copies of `cp.async`."""
        self.busy: Final = dict[int, npt.NDArray[np.bool_]]()
        """Accumulators that `wgmma` has not written yet, and of which threads."""
        self.products: Final = list[Any]()
        self.product_groups: Final = np.zeros(self.count, np.int64)
        self.mbarriers: Final = dict[tuple[int, int], Any]()
        self._registers: Final[list[Values | None]] = [None] * len(kernel.registers)
        self._special: Final = self._specials()

    def select(self, threads: Ints | None) -> None:
        """Let the next instruction run for `threads`; None: for all."""
        self.threads = self.everyone if threads is None else threads
        self._selection = slice(None) if threads is None else threads

    def get(self, operand: Operand, kind: str) -> Values:
        """Return the operand's values as `kind`: (threads,), or 0-D for a constant."""
        dtype = np.dtype(DTYPES[kind])
        if isinstance(operand, Register):
            bits = self._read(operand)
            if operand.width != dtype.itemsize and kind != "pred":
                if operand.width < dtype.itemsize:
                    raise PtxSyntaxError(f"{operand.name} has {operand.width} bytes, and is read as .{kind}")
                bits = bits.astype(BITS[dtype.itemsize])
            return bits.view(dtype)
        if isinstance(operand, Immediate):
            if operand.is_bits:
                wide = BITS[8 if kind == "f64" else 4]
                value: Values = np.array(operand.value, wide)
                return value.view(dtype) if value.dtype.itemsize == dtype.itemsize else value.astype(dtype)
            mask = (1 << 8 * dtype.itemsize) - 1
            return np.array(operand.value & mask, BITS[dtype.itemsize]).view(dtype)
        if isinstance(operand, SpecialRegister):
            return self._special[operand.name][self._selection].astype(dtype)
        if isinstance(operand, Symbol) and operand.name in self.symbols:
            return np.array(self.symbols[operand.name], dtype)
        raise PtxSyntaxError(f"expected a value, found {operand}")

    def column(self, operand: Operand, kind: str) -> Values:
        """Return the operand's values, one for each thread."""
        return np.broadcast_to(self.get(operand, kind), self.threads.shape)

    def put(self, operand: Operand, values: Values) -> None:
        """Write `values` to a register: their bits, extended by zeros or the sign."""
        if not isinstance(operand, Register):
            raise PtxSyntaxError(f"expected a register, found {operand}")
        kind = BITS[operand.width]
        if operand.width and values.dtype.itemsize != operand.width:
            values = values.astype(f"{'i' if values.dtype.kind == 'i' else 'u'}{operand.width}")
        values = np.ascontiguousarray(values).view(kind)
        old = self._registers[operand.index]
        if isinstance(self._selection, slice):
            self._registers[operand.index] = np.array(np.broadcast_to(values, self.count))
            return
        if old is None:
            old = self._registers[operand.index] = np.zeros(self.count, kind)
        old[self._selection] = values

    def _read(self, register: Register) -> Values:
        values = self._registers[register.index]
        if values is None:
            raise UninitialisedRead(f"{register.name} is read, and nothing has written it")
        if self.busy and (busy := self.busy.get(register.index)) is not None and busy[self._selection].any():
            raise UninitialisedRead(f"{register.name} is read while wgmma has still to write it")
        found: Values = values[self._selection]
        return found

    def addresses(self, operand: Operand) -> Ints:
        """Return the byte addresses of an operand in brackets, one for each thread."""
        if not isinstance(operand, Address):
            raise PtxSyntaxError(f"expected an address, found {operand}")
        kind = "u32" if isinstance(operand.base, Register) and operand.base.width == 4 else "u64"
        base = self.column(operand.base, kind)
        found: Ints = base.astype(np.int64) + operand.offset
        return found

    def warps(self, what: str) -> Ints:
        """Return the threads by warp, (warps, 32). Raises `DivergentThreads` if a warp is not complete."""
        threads = self.threads
        if len(threads) % WARP == 0:
            rows: Ints = threads.reshape(-1, WARP)
            if (rows[:, 0] % WARP == 0).all() and (rows[:, -1] - rows[:, 0] == WARP - 1).all():
                return rows
        numbers, counts = np.unique(threads // WARP, return_counts=True)
        warp = int(numbers[counts != WARP][0])
        raise DivergentThreads(
            f"{what} needs all 32 lanes of a warp, and {int(counts[counts != WARP][0])} of warp "
            f"{warp % self.clocks.warps} of block {warp // self.clocks.warps} execute it"
        )

    def wake(self, block: int) -> None:
        """Let threads of a block that stand still at an mbarrier look at it again."""
        span = slice(block * self.block, (block + 1) * self.block)
        at_barriers = [t for (b, _), one in self.arrivals.items() if b == block for t in one.waiting]
        self.waiting[span] = False
        self.waiting[at_barriers] = True

    def _place_tiles(self, arguments: list[Argument]) -> None:
        for number, (variable, argument) in enumerate(zip(self.kernel.parameters, arguments, strict=True)):
            if isinstance(argument, Tiles):
                if argument.buffer.array.nbytes < argument.layout.nbytes:
                    raise PtxError(f"{variable.name}: {argument.layout} is longer than its buffer")
                address = PARAMETER_WINDOW + number * MAP_BYTES
                self.symbols[variable.name] = address
                self.tiles[address] = self.device.addresses[variable.name], argument.layout

    def _encode(self, arguments: list[Argument]) -> dict[str, bytes]:
        found = dict[str, bytes]()
        for variable, argument in zip(self.kernel.parameters, arguments, strict=True):
            if isinstance(argument, Buffer):
                data = self.device.addresses[variable.name].to_bytes(8, "little")
            elif isinstance(argument, Tiles):
                data = bytes(MAP_BYTES)
            elif isinstance(argument, bytes):
                data = argument
            elif isinstance(argument, int):
                data = argument.to_bytes(variable.nbytes, "little", signed=argument < 0)
            else:
                data = np.array(argument, np.float32 if variable.nbytes == 4 else np.float64).tobytes()
            if len(data) != variable.nbytes:
                raise PtxError(f"{variable.name} has {variable.nbytes} bytes, its argument {len(data)}")
            found[variable.name] = data
        return found

    def _specials(self) -> dict[str, Values]:
        number, inside = self.everyone // self.block, self.everyone % self.block
        found: dict[str, Values] = {"%laneid": inside % WARP, "%warpid": inside // WARP}
        for name, index, shape in (("tid", inside, self.block_shape), ("ctaid", number, self.grid)):
            for axis, low, size in (
                ("x", 1, shape[0]),
                ("y", shape[0], shape[1]),
                ("z", shape[0] * shape[1], shape[2]),
            ):
                found[f"%{name}.{axis}"] = (index // low % size).astype(np.uint32)
                found[f"%n{name}.{axis}"] = np.full(self.count, size, np.uint32)
        return found


def _needs_vectors(kernel: Kernel) -> bool:
    """Whether threads meet elsewhere than at barriers of whole blocks and whole warps."""
    for i in kernel.code:
        if i.opcode == "mbarrier" or (i.opcode in ("bar", "barrier") and len(i.operands) > 1):
            return True
    return False


def _grain(kernel: Kernel) -> int:
    """Return the bytes of the narrowest access, 4 at most."""
    widths = [4]
    for i in kernel.code:
        if i.opcode in ("ld", "st") and "param" not in i.modifiers:
            vector = {"v2": 2, "v4": 4}.get(next((m for m in i.modifiers if m in ("v2", "v4")), ""), 1)
            widths.append(WIDTHS[i.modifiers[-1]] * vector)
    return min(widths)


def _place_shared(kernel: Kernel, dynamic: int) -> tuple[dict[str, int], int]:
    """Return where each shared variable that the kernel uses begins, and the bytes of all."""
    used = set[str]()

    def visit(operand: Operand) -> None:
        if isinstance(operand, Symbol):
            used.add(operand.name)
        elif isinstance(operand, Address):
            visit(operand.base)
        elif isinstance(operand, Group):
            for item in operand.items:
                visit(item)

    for i in kernel.code:
        for operand in i.operands:
            visit(operand)
    found, at = dict[str, int](), 0
    variables = [one for one in kernel.shared if one.name in used]
    for variable in sorted(variables, key=lambda one: one.nbytes == 0):  # the dynamic part comes last
        at = -(-at // variable.alignment) * variable.alignment
        found[variable.name] = at
        at += variable.nbytes
    return found, at + dynamic
