"""Instructions that move data: loads, stores, `cp.async`, `ldmatrix`, `stmatrix`, shuffles and votes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from zbmd.tools.lab.ptx.barriers import bulk_copy
from zbmd.tools.lab.ptx.clocks import WARP, Flags, Ints
from zbmd.tools.lab.ptx.errors import DivergentThreads, PtxSyntaxError
from zbmd.tools.lab.ptx.memory import DeviceMemory, SharedMemory, Values
from zbmd.tools.lab.ptx.program import WIDTHS, Address, Group, Immediate, Instruction, Operand, Symbol
from zbmd.tools.lab.ptx.state import BITS, DTYPES, SHARED_WINDOW, Run, instruction, unsupported

_VECTORS: Final = {"v2": 2, "v4": 4}
_HINTS: Final = (
    "v2 v4 global shared shared::cta param nc volatile ca cg cs lu cv wb wt relaxed L1::no_allocate"
)


def items(operand: Operand) -> tuple[Operand, ...]:
    """Return the operands of a group, or the one operand."""
    return operand.items if isinstance(operand, Group) else (operand,)


def _space(run: Run, i: Instruction, addresses: Ints) -> tuple[SharedMemory | DeviceMemory, Ints]:
    """Return the memory of an access and the addresses in it; a generic address says itself which it is."""
    if {"shared", "shared::cta"} & set(i.modifiers):
        return run.shared, addresses
    if "global" in i.modifiers:
        return run.device, addresses
    inside = (addresses >= SHARED_WINDOW) & (addresses < SHARED_WINDOW + run.shared.nbytes)
    if inside.all():
        return run.shared, addresses - SHARED_WINDOW
    if inside.any():
        raise unsupported(i)
    return run.device, addresses


@instruction("ld", modifiers=_HINTS)
def _load(run: Run, i: Instruction) -> None:
    kind = i.modifiers[-1]
    results = items(i.operands[0])
    if "param" in i.modifiers:
        _load_parameter(run, i, kind, results)
        return
    memory, addresses = _space(run, i, run.addresses(i.operands[1]))
    values = memory.load(addresses, DTYPES[kind], len(results), run.threads, run.now, _where(i))
    for number, result in enumerate(results):
        run.put(result, values[:, number])


def _load_parameter(run: Run, i: Instruction, kind: str, results: tuple[Operand, ...]) -> None:
    address = i.operands[1]
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise unsupported(i)
    data = run.parameters.get(address.base.name, b"")
    for number, result in enumerate(results):
        at = address.offset + number * WIDTHS[kind]
        if at + WIDTHS[kind] > len(data):
            raise PtxSyntaxError(f"{address.base.name} has {len(data)} bytes, and byte {at} of it is read")
        value = np.frombuffer(data, DTYPES[kind], 1, at)
        run.put(result, np.broadcast_to(value, run.threads.shape))


@instruction("st", modifiers=_HINTS)
def _store(run: Run, i: Instruction) -> None:
    kind = i.modifiers[-1]
    memory, addresses = _space(run, i, run.addresses(i.operands[0]))
    values = np.stack([run.column(one, kind) for one in items(i.operands[1])], axis=1)
    memory.store(addresses, values, run.threads, run.now, _where(i))


def _where(i: Instruction) -> str:
    return f"{i.line}: {i.opcode}.{'.'.join(i.modifiers)}"


@dataclass(slots=True)
class _Copy:
    """Copies of one `cp.async`: by thread, its group, the places in shared memory, and the data."""

    threads: Ints
    groups: Ints
    places: Ints
    data: Values

    def kept(self, chosen: Flags) -> _Copy:
        return _Copy(self.threads[chosen], self.groups[chosen], self.places[chosen], self.data[chosen])


@instruction(
    "cp",
    modifiers="async ca cg shared shared::cta shared::cluster global commit_group wait_group wait_all bulk "
    "mbarrier::complete_tx::bytes L2::128B L2::256B tensor 2d tile read",
)
def _copy(run: Run, i: Instruction) -> None:
    if "bulk" in i.modifiers:
        bulk_copy(run, i)
    elif "commit_group" in i.modifiers:
        run.groups[run.threads] += 1
    elif "wait_group" in i.modifiers:
        if not isinstance(i.operands[0], Immediate):
            raise unsupported(i)
        _finish_copies(run, i.operands[0].value)
    elif "wait_all" in i.modifiers:
        _finish_copies(run, -1)
    else:
        _begin_copy(run, i)


def _begin_copy(run: Run, i: Instruction) -> None:
    target, source, size, *limit = i.operands
    if not isinstance(size, Immediate) or size.value not in (4, 8, 16):
        raise unsupported(i)
    into = run.addresses(target)
    wanted = np.full(run.threads.shape, size.value)
    if limit:
        wanted = run.column(limit[0], "u32").astype(np.int64)
        if not np.isin(wanted, (0, size.value)).all():
            raise unsupported(i)  # a part of a piece: no kernel of ours needs it
    places = run.shared.places(into, size.value, run.threads, _where(i))
    run.shared.shadow.write(run.shared.cells(places, size.value), run.threads, run.now, asynchronous=True)
    data = np.zeros((len(into), size.value), np.uint8)
    whole = np.flatnonzero(wanted)
    if len(whole):
        sources, threads = run.addresses(source)[whole], run.threads[whole]
        data[whole] = run.device.load(sources, np.uint32, size.value // 4, threads, run.now, _where(i)).view(
            np.uint8
        )
    run.under_way.append(_Copy(run.threads, run.groups[run.threads], places, data))


def _finish_copies(run: Run, pending: int) -> None:
    """End the copies of the current threads but those of their last `pending` groups; -1: all copies."""
    waits = np.zeros(run.count, np.bool_)
    waits[run.threads] = True
    left = list[_Copy]()
    for copy in run.under_way:
        closed = copy.groups < run.groups[copy.threads] - max(pending, 0)
        done = waits[copy.threads] & (closed | (pending < 0))
        if done.any():
            ended = copy.kept(done)
            size = ended.data.shape[1]
            run.shared.data[ended.places[:, None] + np.arange(size)] = ended.data
            own = (ended.threads % run.block)[:, None]
            run.shared.shadow.arrived(run.shared.cells(ended.places, size), own, run.now, generic=True)
        if not done.all():
            left.append(copy.kept(~done))
    run.under_way[:] = left


@instruction("ldmatrix", modifiers="sync aligned m8n8 x1 x2 x4 trans shared shared::cta")
def _load_matrices(run: Run, i: Instruction) -> None:
    """Each group of 8 lanes gives the addresses of the rows of one 8 x 8 matrix of 16-bit values."""
    warps, results = run.warps("ldmatrix"), items(i.operands[0])
    lanes = np.arange(8 * len(results))
    addresses = run.addresses(i.operands[1]).reshape(warps.shape)[:, lanes].reshape(-1)
    threads = warps[:, lanes].reshape(-1)
    rows = run.shared.load(addresses, np.uint16, 8, threads, run.now, _where(i))
    matrices = rows.reshape(len(warps), len(results), 8, 8)
    if "trans" in i.modifiers:
        matrices = matrices.swapaxes(-1, -2)
    words = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(warps), len(results), WARP)
    for number, result in enumerate(results):
        run.put(result, words[:, number].reshape(-1))


@instruction("stmatrix", modifiers="sync aligned m8n8 x1 x2 x4 trans shared shared::cta")
def _store_matrices(run: Run, i: Instruction) -> None:
    warps, sources = run.warps("stmatrix"), items(i.operands[1])
    words = np.stack([run.column(one, "b32").reshape(warps.shape) for one in sources], axis=1)
    matrices = np.ascontiguousarray(words).view(np.uint16).reshape(len(warps), len(sources), 8, 8)
    if "trans" in i.modifiers:
        matrices = matrices.swapaxes(-1, -2)
    lanes = np.arange(8 * len(sources))
    addresses = run.addresses(i.operands[0]).reshape(warps.shape)[:, lanes].reshape(-1)
    values = np.ascontiguousarray(matrices).reshape(-1, 8)
    run.shared.store(addresses, values, warps[:, lanes].reshape(-1), run.now, _where(i))


def _members(run: Run, i: Instruction, operand: Operand) -> None:
    """Check that all lanes of the mask are here, and that no other is."""
    mask = run.column(operand, "u32")
    bits = np.uint32(1) << (run.threads % WARP).astype(np.uint32)
    numbers, places = np.unique(run.threads // WARP, return_inverse=True)
    here = np.bincount(places, weights=bits, minlength=len(numbers)).astype(np.uint32)
    if (here[places] != mask).any():
        at = int(np.flatnonzero(here[places] != mask)[0])
        raise DivergentThreads(
            f"{i.opcode}: the mask is {int(mask[at]):#x}, and the lanes {int(here[places[at]]):#x} execute it"
        )


@instruction("shfl", modifiers="sync bfly up down idx")
def _shuffle(run: Run, i: Instruction) -> None:
    results = items(i.operands[0])
    _members(run, i, i.operands[4])
    value, lane = run.column(i.operands[1], "b32"), run.threads % WARP
    by, clamp = (run.column(one, "u32").astype(np.int64) for one in i.operands[2:4])
    limit, segment = clamp & 31, (clamp >> 8) & 31
    highest = (lane & segment) | (limit & ~segment)
    mode = i.modifiers[1]
    source = {
        "bfly": lane ^ by,
        "up": lane - by,
        "down": lane + by,
        "idx": (lane & segment) | (by & ~segment & 31),
    }[mode]
    valid = source >= highest if mode == "up" else source <= highest
    source = np.where(valid, source, lane)
    slots = np.zeros(run.count, np.uint32)
    slots[run.threads] = value
    present = np.zeros(run.count, np.bool_)
    present[run.threads] = True
    at = run.threads - lane + source
    if not present[at].all():
        raise DivergentThreads("shfl reads the register of a lane that does not execute it")
    run.put(results[0], slots[at])
    if len(results) > 1:
        run.put(results[1], valid)


@instruction("vote", modifiers="sync ballot any all")
def _vote(run: Run, i: Instruction) -> None:
    _members(run, i, i.operands[2])
    value = run.column(i.operands[1], "pred")
    numbers, places = np.unique(run.threads // WARP, return_inverse=True)
    bits = np.where(value, np.uint32(1) << (run.threads % WARP).astype(np.uint32), np.uint32(0))
    ballot = np.bincount(places, weights=bits, minlength=len(numbers)).astype(np.uint32)[places]
    if "ballot" in i.modifiers:
        run.put(i.operands[0], ballot)
    elif "any" in i.modifiers:
        run.put(i.operands[0], ballot != 0)
    else:
        run.put(i.operands[0], ballot == run.column(i.operands[2], "u32"))


@instruction("activemask")
def _active(run: Run, i: Instruction) -> None:
    raise unsupported(i)  # which lanes are together is the hardware's choice: no kernel may depend on it


def values_of(run: Run, operand: Operand, width: int) -> Values:
    """Return the values of all registers of a group, (threads, registers), as unsigned integers."""
    return np.stack([run.column(one, f"b{8 * width}") for one in items(operand)], axis=1).astype(BITS[width])
