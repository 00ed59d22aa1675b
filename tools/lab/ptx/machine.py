"""Run a kernel: at each step the threads with the lowest program counter execute one instruction.

So threads that diverge meet again where their paths do. Threads that wait, at a barrier or an mbarrier, stand
still until it completes; if all that are left wait, that is a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from zbmd.tools.lab.ptx import arithmetic, barriers, tensor_cores, transfers
from zbmd.tools.lab.ptx.clocks import WARP
from zbmd.tools.lab.ptx.counters import Counters
from zbmd.tools.lab.ptx.errors import Deadlock, PtxError
from zbmd.tools.lab.ptx.program import Instruction, Kernel, Symbol
from zbmd.tools.lab.ptx.shadow import name_thread
from zbmd.tools.lab.ptx.state import TABLE, Argument, Dim3, Run, unsupported

# They enter their instructions into the table.
INSTRUCTIONS: Final = (arithmetic, barriers, tensor_cores, transfers)
STEPS_MAX: Final = 2_000_000
THREADS_MAX: Final = 1024
_CONTROL: Final = {"bra": frozenset(("uni",)), "ret": frozenset(("uni",)), "exit": frozenset[str]()}


@dataclass(frozen=True, slots=True)
class Launch:
    """The result of a launch: its steps, and its counters."""

    steps: int
    counters: Counters


def launch(
    kernel: Kernel,
    *,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    arguments: Sequence[Argument],
    shared: int = 0,
) -> Launch:
    """Run `kernel` to its end; the arrays of `arguments` have its results.

    arguments: buffers for pointers, integers and floats by the parameters' widths, bytes for structures.
    shared: bytes of dynamic shared memory. Raises `PtxError` for whatever a GPU leaves undefined, with the
    instruction and its source line.
    """
    shape = _dimensions(block)
    if math.prod(shape) % WARP or math.prod(shape) > THREADS_MAX:
        raise PtxError(f"expected whole warps of at most {THREADS_MAX} threads in a block, found {shape}")
    if len(arguments) != len(kernel.parameters):
        raise PtxError(f"{kernel.name} has {len(kernel.parameters)} parameters, and got {len(arguments)}")
    for i in kernel.code:
        known = TABLE[i.opcode].modifiers if i.opcode in TABLE else _CONTROL.get(i.opcode)
        if known is None or not known.issuperset(i.modifiers):
            raise unsupported(i)
    run = Run(kernel, _dimensions(grid), shape, list(arguments), shared)
    with np.errstate(all="ignore"):
        _Scheduler(run).run_to_end()
    for buffer in run.device.buffers:
        if buffer.buffer.writable:
            buffer.copy_back()
    return Launch(run.now, run.counters)


def _dimensions(size: int | Sequence[int]) -> Dim3:
    given = (size,) if isinstance(size, int) else tuple(size)
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


class _Scheduler:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._code = run.kernel.code
        self._end = len(self._code)
        self._pc = np.zeros(run.count, np.int64)
        self._together: int | None = 0
        """The program counter of all threads, while it is one."""

    def run_to_end(self) -> None:
        """Execute until all threads have ended."""
        run = self._run
        while (at := self._next()) < self._end:
            i = self._code[at]
            run.now += 1
            if run.now > STEPS_MAX:
                raise Deadlock(f"{run.kernel.name} does not end: more than {STEPS_MAX} steps, at {i.where}")
            try:
                self._step(i, at)
            except PtxError as error:
                raise type(error)(f"{run.kernel.name}, at {i.where}: {error}") from error

    def _next(self) -> int:
        """Select the threads that are next, and return their program counter."""
        run = self._run
        if self._together is not None:
            run.select(None)
            return self._together
        pc = np.where(run.waiting, self._end + 1, self._pc)
        at = int(pc.min())
        if at >= self._end and run.waiting.any():
            thread = int(np.flatnonzero(run.waiting)[0])
            stands = self._code[int(self._pc[thread]) - 1].where
            raise Deadlock(
                f"{run.kernel.name}: {int(run.waiting.sum())} threads wait for what no thread does any more; "
                f"{name_thread(thread, run.block)} at {stands}"
            )
        threads = np.flatnonzero(pc == at)
        if len(threads) == run.count:
            self._together = at
            run.select(None)
        else:
            run.select(threads)
        return at

    def _step(self, i: Instruction, at: int) -> None:
        run, threads, all_threads = self._run, self._run.threads, self._together is not None
        taken = None
        if i.guard is not None:
            taken = run.get(i.guard, "pred") != i.negated
        if i.opcode == "bra":
            self._jump(i, at, taken)
            return
        if i.opcode in ("ret", "exit"):
            self._go(self._end, at, taken)
            return
        if taken is None or taken.any():
            if taken is not None and not taken.all():
                run.select(threads[taken])
            run.counters.instructions[i.opcode] += -(-len(run.threads) // WARP)
            TABLE[i.opcode].handler(run, i)
        if not all_threads:
            self._pc[threads] = at + 1
        elif run.waiting.any():
            self._together = None
            self._pc[:] = at + 1
        else:
            self._together = at + 1

    def _jump(self, i: Instruction, at: int, taken: np.typing.NDArray[np.bool_] | None) -> None:
        label = i.operands[0]
        if not isinstance(label, Symbol) or label.name not in self._run.kernel.labels:
            raise unsupported(i)
        self._go(self._run.kernel.labels[label.name], at, taken)

    def _go(self, target: int, at: int, taken: np.typing.NDArray[np.bool_] | None) -> None:
        """Move those of the current threads that are `taken` to `target`, and the others on."""
        threads = self._run.threads
        if self._together is not None:
            if taken is None or taken.all():
                self._together = target
                return
            if not taken.any():
                self._together = at + 1
                return
            self._together = None
        self._pc[threads] = target if taken is None else np.where(taken, target, at + 1)
