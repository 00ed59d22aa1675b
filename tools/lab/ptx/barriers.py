"""Instructions by which threads wait for each other and for copies: barriers, mbarriers, bulk copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from zbmd.tools.lab.ptx.clocks import AGENTS_MAX, WARP, Flags, Ints
from zbmd.tools.lab.ptx.errors import DivergentThreads, PtxError, RaceFound, UninitialisedRead
from zbmd.tools.lab.ptx.program import Address, Immediate, Instruction
from zbmd.tools.lab.ptx.shadow import name_thread
from zbmd.tools.lab.ptx.state import Arrivals, Run, instruction, unsupported
from zbmd.transport.cuda.tiles import ELEMENT_BYTES

PIECE: Final = 16
"""Bytes: what bulk copies move at least, and swizzles exchange."""
TILE_ALIGNMENT: Final = 128


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
    if {"proxy", "mbarrier_init"} & set(i.modifiers):
        makers = set(run.threads.tolist())
        for barrier in run.mbarriers.values():
            barrier.is_fenced |= barrier.maker in makers


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
    maker: int = -1
    made: int = 0
    is_fenced: bool = False
    """Whether the thread that made it has let bulk copies see it."""
    known: set[int] = field(default_factory=set[int])
    """Threads that are known to come after its making."""


def _mbarrier(run: Run, thread: int, address: int) -> _MBarrier:
    found = run.mbarriers.get((thread // run.block, address))
    if found is None:
        raise UninitialisedRead(f"{name_thread(thread, run.block)}: there is no mbarrier at byte {address}")
    assert isinstance(found, _MBarrier)
    if thread not in found.known:
        maker = np.array([found.maker % run.block])
        if not run.clocks.ordered(np.array([thread]), maker, np.array([found.made])).all():
            raise RaceFound(
                f"{name_thread(thread, run.block)} uses the mbarrier at byte {address}, and its making by "
                f"thread {found.maker % run.block} has no order"
            )
        found.known.add(thread)
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
        run.mbarriers[block, address] = _MBarrier(agent, count, count, maker=thread, made=run.now)


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
    is_tile = "tensor" in i.modifiers
    if "mbarrier::complete_tx::bytes" not in i.modifiers or len(i.operands) != 4 - is_tile:
        raise unsupported(i)
    into, source, barriers = (run.addresses(i.operands[n]) for n in (0, 1, -1))
    if is_tile:
        _copy_boxes(run, i, into, source, barriers)
        return
    sizes = run.column(i.operands[2], "u32").astype(np.int64)
    if isinstance(i.operands[2], Immediate) and i.operands[2].value % 16:
        raise unsupported(i)
    columns = np.stack([run.threads, into, source, sizes, barriers], axis=1)
    for thread, to, start, size, address in columns.tolist():
        if size % 16 or to % 16 or start % 16:
            raise PtxError(f"a bulk copy of {size} bytes from {start:#x} to byte {to} is not aligned to 16")
        pieces = np.arange(size // PIECE)
        _bulk(run, i, (thread, address), to + PIECE * pieces, start + PIECE * pieces, pieces >= 0)


def _copy_boxes(run: Run, i: Instruction, into: Ints, maps: Ints, barriers: Ints) -> None:
    """Copy a box of a matrix for each thread; pieces of 16 bytes are swizzled by their address."""
    target = i.operands[1]
    if not isinstance(target, Address) or len(target.coordinates) != 2 or "2d" not in i.modifiers:
        raise unsupported(i)
    column, row = (run.column(one, "s32") for one in target.coordinates)
    every = np.stack([run.threads, into, maps, column, row, barriers], axis=1)
    for thread, to, at, first_column, first_row, address in every.tolist():
        if at not in run.tiles:
            raise PtxError(f"a bulk copy of a tile by what is no tensor map, at {at:#x}")
        start, layout = run.tiles[at]
        if to % max(TILE_ALIGNMENT, 8 * layout.swizzle):
            raise PtxError(
                f"a tile with a swizzle of {layout.swizzle} bytes is copied to byte {to}: not aligned"
            )
        size = ELEMENT_BYTES[layout.element]
        per, width = layout.box_columns * size // PIECE, layout.columns * size
        if width % PIECE or first_column * size % PIECE:
            raise unsupported(i)  # a piece that is in the matrix in part: no kernel of ours needs it
        piece = np.arange(layout.box_rows * per)
        rows, offsets = first_row + piece // per, first_column * size + piece % per * PIECE
        inside = (rows >= 0) & (rows < layout.rows) & (offsets >= 0) & (offsets < width)
        places = to + PIECE * piece
        mask = max(layout.swizzle // PIECE, 1) - 1
        _bulk(
            run,
            i,
            (thread, address),
            places ^ ((places >> 7 & mask) << 4),
            start + rows * layout.row_bytes + offsets,
            inside,
        )


def _bulk(run: Run, i: Instruction, who: tuple[int, int], to: Ints, start: Ints, wanted: Flags) -> None:
    """Copy pieces of 16 bytes, or zeros where they are not wanted. who: the thread, and its mbarrier."""
    thread, address = who
    barrier, one = _mbarrier(run, thread, address), np.array([thread])
    if not barrier.is_fenced:
        raise RaceFound(
            f"a bulk copy counts for the mbarrier at byte {address}, and the thread that made it has "
            "executed no fence.mbarrier_init or fence.proxy.async since"
        )
    threads = np.broadcast_to(one, to.shape)
    places = run.shared.places(to, PIECE, threads, "", counted=False)
    cells = np.unique(run.shared.cells(places, PIECE))
    run.shared.shadow.write(cells[None], one, run.now, asynchronous=True)
    data = np.zeros((len(to), PIECE // 4), np.uint32)
    if wanted.any():
        where = f"{i.line}: cp.async.bulk"
        data[wanted] = run.device.load(start[wanted], np.uint32, PIECE // 4, threads[wanted], run.now, where)
    run.shared.data.view(np.uint32).reshape(-1, PIECE // 4)[places // PIECE] = data
    barrier.nbytes -= PIECE * len(to)
    barrier.copies.append(cells)
    _settle(run, thread // run.block, barrier)
