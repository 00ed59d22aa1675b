"""Instructions by which threads wait for each other and for copies: barriers, mbarriers, bulk copies."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from zbmd.tools.lab.ptx.clocks import AGENTS_MAX, WARP, Ints
from zbmd.tools.lab.ptx.errors import DivergentThreads, PtxError, UninitialisedRead
from zbmd.tools.lab.ptx.program import Immediate, Instruction
from zbmd.tools.lab.ptx.shadow import name_thread
from zbmd.tools.lab.ptx.state import Arrivals, Run, instruction, unsupported


@instruction("bar", "barrier", modifiers="sync arrive aligned warp cta")
def _barrier(run: Run, i: Instruction) -> None:
    if "warp" in i.modifiers:
        mask = run.column(i.operands[0], "u32")
        numbers, places = np.unique(run.threads // WARP, return_inverse=True)
        bits = np.uint32(1) << (run.threads % WARP).astype(np.uint32)
        here = np.bincount(places, weights=bits, minlength=len(numbers)).astype(np.uint32)
        if (here[places] != mask).any():
            raise DivergentThreads("bar.warp.sync: other lanes than those of the mask execute it")
        run.clocks.meet_warps(run.threads, run.now)
        return
    run.warps(i.opcode)
    if len(i.operands) == 1 and "sync" in i.modifiers and len(run.threads) == run.count:
        run.clocks.meet_block(np.arange(run.blocks), run.now)
        return
    number = run.column(i.operands[0], "u32")
    for block in np.unique(run.threads // run.block).tolist():
        here = run.threads // run.block == block
        threads, which = run.threads[here], np.unique(number[here])
        if len(which) != 1:
            raise unsupported(i)
        _arrive(run, i, block, int(which[0]), threads)


def _arrive(run: Run, i: Instruction, block: int, number: int, threads: Ints) -> None:
    partial = len(i.operands) > 1
    expected = int(run.column(i.operands[1], "u32")[0]) if partial else run.block
    if expected % WARP or not 0 < expected <= run.block:
        raise PtxError(f"barrier {number} is for {expected} threads, of the {run.block} of a block")
    at = run.arrivals.setdefault((block, number), Arrivals())
    at.arrived += len(threads)
    if partial:
        row = run.clocks.row(threads, run.now)
        at.row = row if at.row is None else np.maximum(at.row, row)
    if "arrive" not in i.modifiers:
        at.waiting.extend(threads.tolist())
        run.waiting[threads] = True
    if at.arrived < expected:
        return
    if at.arrived > expected:
        raise PtxError(f"{at.arrived} threads came to barrier {number} of block {block}, for {expected}")
    waiting = np.array(at.waiting, np.int64)
    run.waiting[waiting] = False
    if at.row is None:
        run.clocks.meet_block(np.array([block]), run.now)
    else:
        run.clocks.acquire(waiting, at.row)
    del run.arrivals[block, number]


@instruction(
    "fence",
    "membar",
    modifiers="proxy async async::shared::cta shared::cta global cta gl sys acq_rel sc "
    "gpu mbarrier_init release cluster",
)
def _fence(run: Run, i: Instruction) -> None:
    if "proxy" in i.modifiers:
        run.shared.shadow.fence(run.threads, run.now)


@dataclass(slots=True)
class _MBarrier:
    """An mbarrier: its agent, arrivals wanted and still pending, bytes to come, and completed phases."""

    agent: int
    wanted: int
    pending: int
    nbytes: int = 0
    phase: int = 0
    row: Ints | None = None
    """Released by those that arrived in this phase."""
    released: Ints | None = None
    """Acquired by a wait for a completed phase."""
    copies: list[Ints] = field(default_factory=list)
    """Cells of copies of this phase."""


def _mbarrier(run: Run, thread: int, address: int) -> _MBarrier:
    found = run.mbarriers.get((thread // run.block, address))
    if found is None:
        raise UninitialisedRead(f"{name_thread(thread, run.block)}: there is no mbarrier at byte {address}")
    assert isinstance(found, _MBarrier)
    return found


def _settle(run: Run, block: int, barrier: _MBarrier) -> None:
    """Complete the phase if all have arrived and all bytes are there."""
    if barrier.pending or barrier.nbytes:
        return
    row = np.zeros(run.block + AGENTS_MAX, np.int32) if barrier.row is None else barrier.row
    for cells in barrier.copies:
        run.shared.shadow.arrived(cells, run.block + barrier.agent, run.now, generic=False)
        row[run.block + barrier.agent] = run.now
    barrier.released = row if barrier.released is None else np.maximum(barrier.released, row)
    barrier.row, barrier.copies = None, []
    barrier.pending = barrier.wanted
    barrier.phase += 1
    run.wake(block)


@instruction(
    "mbarrier",
    modifiers="init inval arrive expect_tx try_wait test_wait parity shared shared::cta acquire release cta",
)
def _mbarriers(run: Run, i: Instruction) -> None:
    if "init" in i.modifiers:
        _initialise(run, i)
    elif "arrive" in i.modifiers:
        _arrive_at(run, i)
    elif {"try_wait", "test_wait"} & set(i.modifiers) and "parity" in i.modifiers:
        _wait(run, i)
    else:
        raise unsupported(i)


def _initialise(run: Run, i: Instruction) -> None:
    wanted = run.column(i.operands[1], "u32")
    for thread, address, count in zip(
        run.threads.tolist(), run.addresses(i.operands[0]).tolist(), wanted.tolist(), strict=True
    ):
        block = thread // run.block
        agent = sum(1 for other, _ in run.mbarriers if other == block)
        if (block, address) in run.mbarriers or agent == AGENTS_MAX:
            raise PtxError(f"byte {address} has an mbarrier already, or the block has {AGENTS_MAX}")
        run.shared.places(np.array([address]), 8, np.array([thread]), "", counted=False)
        run.mbarriers[block, address] = _MBarrier(agent, count, count)


def _arrive_at(run: Run, i: Instruction) -> None:
    expects = "expect_tx" in i.modifiers
    nbytes = [0] * len(run.threads)
    if expects:
        nbytes = run.column(i.operands[2], "u32").tolist()
    for thread, address, size in zip(
        run.threads.tolist(), run.addresses(i.operands[1]).tolist(), nbytes, strict=True
    ):
        barrier = _mbarrier(run, thread, address)
        row = run.clocks.row(np.array([thread]), run.now)
        barrier.row = row if barrier.row is None else np.maximum(barrier.row, row)
        barrier.nbytes += size
        barrier.pending -= 1
        if barrier.pending < 0:
            raise PtxError(f"more than {barrier.wanted} threads arrive at the mbarrier at byte {address}")
        _settle(run, thread // run.block, barrier)


def _wait(run: Run, i: Instruction) -> None:
    """A thread that has to wait stands still until an mbarrier of its block changes, and looks again."""
    parity = run.column(i.operands[2], "u32")
    done = np.zeros(run.threads.shape, np.bool_)
    for at, (thread, address) in enumerate(
        zip(run.threads.tolist(), run.addresses(i.operands[1]).tolist(), strict=True)
    ):
        barrier = _mbarrier(run, thread, address)
        if barrier.phase % 2 != int(parity[at]) & 1:
            done[at] = True
            if barrier.released is not None:
                run.clocks.acquire(np.array([thread]), barrier.released)
    run.put(i.operands[0], done)
    run.waiting[run.threads[~done]] = True


def bulk_copy(run: Run, i: Instruction) -> None:
    """Copy from device to shared memory; the copy's bytes count for an mbarrier. It ends with the phase."""
    if "tensor" in i.modifiers or "mbarrier::complete_tx::bytes" not in i.modifiers or len(i.operands) != 4:
        raise unsupported(i)
    into, source, barriers = (run.addresses(i.operands[n]) for n in (0, 1, 3))
    sizes = run.column(i.operands[2], "u32").astype(np.int64)
    if isinstance(i.operands[2], Immediate) and i.operands[2].value % 16:
        raise unsupported(i)
    columns = np.stack([run.threads, into, source, sizes, barriers], axis=1)
    for thread, to, start, size, address in columns.tolist():
        barrier, one = _mbarrier(run, thread, address), np.array([thread])
        if size % 16 or to % 16 or start % 16:
            raise PtxError(f"a bulk copy of {size} bytes from {start:#x} to byte {to} is not aligned to 16")
        words = np.arange(size // 4)
        threads = np.broadcast_to(one, words.shape)
        place = run.shared.places(to + 4 * words, 4, threads, "", counted=False)
        cells = np.unique(run.shared.cells(place, 4))
        run.shared.shadow.write(cells[None], one, run.now, asynchronous=True)
        where = f"{i.line}: cp.async.bulk"
        data = run.device.load(start + 4 * words, np.uint32, 1, threads, run.now, where)
        run.shared.data.view(np.uint32)[place // 4] = data[:, 0]
        barrier.nbytes -= size
        barrier.copies.append(cells)
        _settle(run, thread // run.block, barrier)
