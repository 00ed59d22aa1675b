"""The state of a loop in memory that outlives its rank: each committed step, in one of two slots.

The launcher keeps that memory, and so does the snapshot process of the host, which outlives the launcher. So
a loop all of whose ranks are killed at once goes on in memory, when the same command is given again. A thread
copies the state beside the next forward and backward pass, before this rank votes for the next step: so no
two ranks are ever further apart than one step, and a step that all hold is in one of the two slots.

A slot has what a replacement gets from a survivor (`transfer`), and this rank's shard. A state that all ranks
have alike is kept by the first rank of each node, so one node's memory is enough. Of a sharded state, a rank
whose ward is alone on another node has the copy of the ward's shard in its slot, too (`keeps_ward`).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import struct
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import structlog
import xxhash

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.host_contracts import KEPT_STATE
from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.continuity import CONTINUITY, LOSSES
from zbmd.collectives.torch.tensors import bytes_over
from zbmd.training.autograd.array_module import Array
from zbmd.training.redundancy.holdings import SLOTS
from zbmd.training.redundancy.left_memory import left_in
from zbmd.training.redundancy.stamped import (
    STATE_BLOCKS,
    FoundState,
    Note,
    StampedSlots,
    StateName,
)
from zbmd.training.torch import points
from zbmd.training.torch.durable.devices import LoopDevice, address_of
from zbmd.training.torch.encoding import decode, encode
from zbmd.training.torch.exchange import Exchange
from zbmd.training.torch.fsdp.division import Held, Report, absent_in_words, keeps_ward, newest_held
from zbmd.training.torch.fsdp.letters import LeftLetters
from zbmd.training.torch.fsdp.modules import local_of
from zbmd.training.torch.state import LoopState
from zbmd.training.torch.transfer import (
    Header,
    aligned,
    decode_header,
    described,
    empty,
    loaded,
    placed_again,
    require_same,
    rest_of,
    shapes_of,
    tensor_at,
)
from zbmd.training.torch.votes import without_wishes
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import OutOfMemory
from zbmd.transport.memory._region import copy as copy_bytes
from zbmd.transport.memory.kept import KeptFile, take_kept_file
from zbmd.transport.memory.memfd import in_words

torch: Any = importlib.import_module("torch")

log: Final = structlog.stdlib.get_logger("zbmd.torch")

PIECE_BYTES: Final = 1 << 18
"""Read for the digest at once, and copied while the processor's cache has it."""
_LENGTH: Final = struct.Struct("<Q")
_IDENTITY_BITS: Final = 48
"""Of the digest of a loop's identity: a note has float64 numbers."""
_NOTED: Final = 5
"""Numbers of a note: version, identity, launch, whether the copy of the ward's shard is there, and the last
version whose transaction has not changed the shard."""
_UNTIL: Final = 4
_GRADIENTS: Final = "gradients"
"""The name of the block in which those of the last updates are left."""
_SPARE_BYTES: Final = 64 << 10
"""Room for what a state grows by: what is not tensors may be longer in a later step."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A state to be copied: where each piece of memory goes, in order, and the bytes of all."""

    pieces: list[tuple[int, Any]]
    nbytes: int
    device: LoopDevice | None
    """That of the pieces that are tensors, and not bytes."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Two slots in one block of the memory."""

    name: StateName
    slots: StampedSlots
    release: Callable[[], None]


@dataclass(slots=True)
class _Store:
    """The memory of this process that outlives it, and what its loops have there: the newest block last."""

    kept: KeptFile
    blocks: list[_Block]
    has_gradients: bool = False


class LoopMemory:
    """That of one rank, and what the process before has left there. Used by the thread that trains.

    identity: what another run must have alike to go on from there.
    """

    def __init__(self, worker: Worker, launched: RankEnvironment, identity: str) -> None:
        self._worker, self._store = worker, _taken() if launched.holds else None
        self._launch, self._ranks_per_node = launched.launch, launched.ranks_per_host
        digest = hashlib.blake2b(identity.encode(), digest_size=_IDENTITY_BITS // 8).digest()
        self._identity = float(int.from_bytes(digest, "little"))
        self._found: dict[Held, tuple[FoundState, int]] = {}
        self._refused = False
        self._sources: list[int] = []
        """The ranks whose memory the loop goes on from."""
        self._is_first = self._keeps_ward = self._has_reported = False
        self._copy: Future[None] | None = None
        self._arrays: dict[tuple[int, int], Bytes] = {}
        """Over the tensors of the last step, by address and size: most are where they were."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zbmd-held")
        self._left: LeftLetters | None = None
        """The gradients of the last updates; None: buddies have copies of shards."""
        self._is_one_node = False
        if self._store is not None:
            self._find(self._store)

    def _find(self, store: _Store) -> None:
        """Read what the process before has left: whole versions, by their digests."""
        for found in left_in(store.kept, self._worker.job, 0):
            store.blocks.append(_Block(found.name, StampedSlots(found.memory, found.name), found.release))
            for slot in range(SLOTS):
                note = found.noted(slot)
                if len(note) == _NOTED and note[1] == self._identity:
                    held = Held(
                        version=int(note[0]),
                        place=found.name.place,
                        size=found.name.ranks,
                        keeps=bool(note[3] > 0),
                        launch=int(note[2]),
                    )
                    self._found[held] = found, slot
                else:
                    self._refused = self._refused or len(note) > 0

    # What a run before has left.

    @property
    def held(self) -> tuple[Held, ...]:
        """The whole versions that the process before has left, of this loop."""
        found = sorted(self._found, key=lambda each: (each.launch, each.version, each.size, each.place))
        return tuple(
            replace(each, reach=self._reach(self._found[each][0].noted(self._found[each][1])))
            for each in found
        )

    def _reach(self, note: Note) -> int:
        """Return the last version that a shard with this note leads to; -1: none."""
        if len(note) != _NOTED or note[1] != self._identity or note[2] != self._launch or self._left is None:
            return -1
        return self._left.reach_of(int(note[_UNTIL]))

    # Shards of which no buddy has a copy.

    def leave(self, state: LoopState) -> None:
        """Have gradients of a sharded state be left here, where all ranks can do without buddies."""
        nbytes = 0 if state.shards is None else state.shards.left_bytes
        if self._store is None or not nbytes or state.shards is None:
            return
        kept, identity = self._store.kept, f"{self._identity} {state.rank} {state.ranks} {nbytes}"
        try:
            if self._store.has_gradients:
                kept.release(_GRADIENTS)
            memory, _ = kept.block(_GRADIENTS, nbytes)
        except (OutOfMemory, OSError) as error:
            log.warning("no memory for gradients outlives this rank: buddies keep copies", reason=str(error))
            return
        self._store.has_gradients = True
        digest = hashlib.blake2b(identity.encode(), digest_size=32).digest()
        self._left = state.shards.leave_in(memory, digest)

    def outlives(self, version: int) -> bool:
        """Return whether this rank's part of `version` is here for the rank that replaces it."""
        if self._store is None or self._left is None or not self._is_one_node:
            return False
        notes = (each.slots.noted(slot) for each in self._store.blocks for slot in range(SLOTS))
        return any(self._reach(note) >= version for note in notes)

    def found(self, group: Group, state: LoopState, version: int) -> None:
        """Hold the part that the loop begins with, before the first meeting."""
        self.enter(group, is_sharded=state.shards is not None)
        if self._left is not None and self._is_one_node:
            self.keep(state, version, is_step=False)
            self.staged()

    def replaced(self, group: Group, state: LoopState, version: int) -> None:
        """Hold the part that this rank has taken, if the rank before has not left it whole."""
        self.enter(group, is_sharded=state.shards is not None)
        if self._left is not None and not any(version <= until for _, _, until in self._whole()):
            self.keep(state, version)

    def left(self, state: LoopState, version: int, *, updates: bool) -> None:
        """Have what leads to `version` here, before the vote for it: gradients, or that there are none."""
        if updates and state.shards is not None:
            state.shards.leave(state.position.step + 1, version)
            return
        for slots, slot, until in self._whole():
            if until == version - 1:
                slots.amend_note(slot, _UNTIL, version)

    def _whole(self) -> list[tuple[StampedSlots, int, int]]:
        """Return the slots with versions of this loop, and the last version that each is a shard of."""
        blocks = [] if self._store is None else self._store.blocks
        every = [(each.slots, slot, each.slots.noted(slot)) for each in blocks for slot in range(SLOTS)]
        return [
            (slots, slot, int(note[_UNTIL]))
            for slots, slot, note in every
            if len(note) == _NOTED and note[1] == self._identity
        ]

    def _drop_later(self, version: int) -> None:
        """The loop goes on from `version`: a later one, which was not committed by all, is made again."""
        for block in () if self._store is None else self._store.blocks:
            for slot in range(SLOTS):
                note = block.slots.noted(slot)
                if len(note) == _NOTED and note[0] > version:
                    block.slots.begin(slot)

    def recall_shard(self, version: int, state: LoopState) -> None:
        """Load the shard of `version` alone: of what the rank before has left."""
        assert state.shards is not None and self._left is not None
        fits = [
            (int(found.noted(slot)[_UNTIL]) < version, number, held)
            for number, (held, (found, slot)) in enumerate(self._found.items())
            if held.version <= version <= self._reach(found.noted(slot))
            and (held.place, held.size) == (state.rank, state.ranks)
        ]
        is_before, _, held = min(fits)
        _, kept = self._read(held, state, loads=False)
        state.shards.recall_left(kept["shard"], version if is_before else None)
        self._drop_later(version)
        log.info("the shard is that in memory", version=version, updates=is_before)

    def agree(self, exchange: Exchange, rank: int) -> bool:
        """Return whether the loop goes on from memory: all of one step is there.

        All ranks call it, before the first step. Rank 0 says why what some of them hold is not used.
        """
        own = Report(version=0, voted=False, fresh=True, held=self.held)
        try:
            reports, refused = exchange.reports(own, divides=self._refused)
        except LOSSES as error:  # all meet again before the first step, and then see what is there
            CONTINUITY.note(error)
            return bool(self._found)
        newest = newest_held(reports)
        if newest is None:
            if rank == 0 and (refused or any(each.held for each in reports)):
                other = "it is of a loop over another model, optimizer or number of shares"
                print(
                    f"the memory of a run before is not used: {absent_in_words(reports) or other}",
                    file=sys.stderr,
                    flush=True,
                )
            self._forget()
            return False
        chosen = newest.launch, newest.version, newest.size
        self._sources = [
            at
            for at, each in enumerate(reports)
            if any((held.launch, held.version, held.size) == chosen for held in each.held)
        ]
        return True

    def tell_resumed(self, step: int, rank: int, *, otherwise: str) -> None:
        """Have rank 0 say which step the loop goes on from. otherwise: from where, if not from memory."""
        if rank == 0:
            memory = f"the memory of rank {', '.join(map(str, self._sources))}"
            source = memory if self._sources else f"the checkpoint in {otherwise}"
            print(f"resumed step {step} from {source}", file=sys.stderr, flush=True)

    def _forget(self) -> None:
        """The loop begins without what is there, so no later run must find it."""
        for block in () if self._store is None else self._store.blocks:
            for slot in range(SLOTS):
                block.slots.begin(slot)
        self._found.clear()

    def recall(self, held: Held, state: LoopState) -> None:
        """Load what this memory holds. Raises `UserError` if the model is another one."""
        held = replace(held, reach=-1)
        _, kept = self._read(held, state, loads=True)
        carried = loaded(kept["rest"], state.optimizers, state.boundary)
        if state.shards is not None:
            state.shards.recall(held, kept["shard"], kept["ward"])
        state.adopt(replace(carried, rows=tuple(without_wishes(row) for row in carried.rows)))
        self._drop_later(held.version)
        log.info("the state is that in memory", step=state.position.step, part=held.place, of=held.size)

    def _read(self, held: Held, state: LoopState, *, loads: bool) -> tuple[Header, Any]:
        """Return the header and the tree of what is held. loads: the tensors that no shard has are loaded."""
        found, slot = self._found[held]
        memory = torch.from_numpy(found.slots[slot].view(np.uint8))
        (length,) = _LENGTH.unpack_from(found.slots[slot].data.cast("B"))
        begin = _LENGTH.size
        header = decode_header(memory[begin : begin + length].numpy().tobytes())
        require_same([described(name, tensor) for name, tensor in state.tensors], header.own)
        at, inner = begin + length, list[Any]()
        with torch.no_grad():
            for number, into in enumerate([*(one for _, one in state.tensors), *map(empty, header.tensors)]):
                came, at = tensor_at(memory, at, into)
                if loads or number >= len(header.own):
                    into.detach().copy_(came)
                inner.append(into)
        return header, decode(header.tree, placed_again(inner[len(header.own) :], header.tensors))

    # Each committed step.

    def enter(self, group: Group, *, is_sharded: bool) -> None:
        """Go on with these ranks, between two steps. is_sharded: whether each has a part of the state."""
        nodes = [member // self._ranks_per_node for member in group.members]
        self._is_first = is_sharded or nodes.index(nodes[group.rank]) == group.rank
        self._keeps_ward = is_sharded and keeps_ward(nodes, group.rank)
        self._is_one_node = len(set(nodes)) == 1
        self._arrays.clear()

    def keep(self, state: LoopState, version: int, *, is_step: bool = True) -> None:
        """Begin to copy the state after a committed step. version: of the machine.

        Nothing may write parameters and moments before `staged`; the rest is copied at once.
        """
        if self._store is None or not self._is_first:
            return
        self.staged()
        self._found.clear()
        ward = None if state.shards is None or not self._keeps_ward else state.shards.ward_state()
        prepared, self._arrays = _prepared(state, version, ward, self._arrays)
        part = (0, 1) if state.shards is None else (state.rank, state.ranks)
        note = np.array([version, self._identity, self._launch, ward is not None, version])
        self._copy = self._pool.submit(
            self._write, self._store, prepared, part, state.position.step, note, is_step
        )

    def staged(self) -> None:
        """Wait until the last step is whole in memory. One that cannot be kept is reported and the last."""
        copy, self._copy = self._copy, None
        if copy is not None:
            try:
                copy.result()
            except (OutOfMemory, OSError) as error:
                self._give_up(error)

    def close(self) -> None:
        """Keep no more; what is there stays until the job ends. Idempotent."""
        self.staged()
        self._pool.shutdown()

    def _give_up(self, error: Exception) -> None:
        self._forget()  # what is there would soon be older than a checkpoint
        self._store = None
        log.warning(
            "memory keeps no state of this loop any more: if all ranks are killed at once, it goes on from "
            "its last checkpoint",
            reason=str(error),
        )

    def _write(
        self,
        store: _Store,
        prepared: _Prepared,
        part: tuple[int, int],
        step: int,
        note: Note,
        is_step: bool,
    ) -> None:
        """Copy a state into its slot. On the thread."""
        slots, slot = self._room(store, prepared.nbytes, part), step % SLOTS
        slots.begin(slot)
        if is_step:
            faults.hit(points.HELD)
        digest = _copied(prepared, slots.slots[slot])
        slots.put_note(slot, note)
        slots.end(slot, step, digest)
        if is_step:
            faults.hit(points.HELD_WHOLE)
        if all(slots.version_in(each) is not None for each in range(SLOTS)):
            while len(store.blocks) > 1:
                store.blocks.pop(0).release()

    def _room(self, store: _Store, nbytes: int, part: tuple[int, int]) -> StampedSlots:
        """Return slots for so many bytes of a part, in the block that is the newest from now on."""
        for block in store.blocks:
            if (block.name.place, block.name.ranks) == part and 4 * block.name.elements >= nbytes:
                store.blocks.remove(block)
                break
        else:
            block = self._made(store.kept, -(-(nbytes + _SPARE_BYTES) // 4), *part)
        store.blocks.append(block)
        if not self._has_reported:
            self._has_reported = True
            self._worker.report({"kind": KEPT_STATE, "bytes": block.name.nbytes})
        return block.slots

    def _made(self, kept: KeptFile, elements: int, place: int, ranks: int) -> _Block:
        name = StateName(run=self._worker.job, place=place, ranks=ranks, elements=elements)
        where = next(one for one in STATE_BLOCKS if not kept.has(one))
        memory, _ = kept.block(where, name.nbytes)
        slots = StampedSlots(memory, name)
        slots.made = 1
        log.info("each step is kept in memory that outlives this rank", takes=in_words(name.nbytes))
        return _Block(name, slots, partial(kept.release, where))


def _prepared(
    state: LoopState, version: int, ward: Any, known: dict[tuple[int, int], Bytes]
) -> tuple[_Prepared, dict[tuple[int, int], Bytes]]:
    """Return the memory of a state, in which what may change before the next vote is a copy.

    ward: as `Shards.ward_state` returns it. known: arrays over tensors of the step before, by address and
    size, which keep that memory; those of this step are returned.
    """
    shards = state.shards
    rest = rest_of(state.optimizers, state.boundary, state.carried(version), moments=shards is None)
    tree = {"rest": rest, "shard": None if shards is None else shards.state(), "ward": ward}
    data, inner = encode(tree, "the state of a loop")
    header = msgspec.msgpack.encode(
        Header(data, shapes_of(inner), [described(*each) for each in state.tensors])
    )
    head = np.frombuffer(_LENGTH.pack(len(header)) + header, np.uint8)
    pieces, at, settled = list[tuple[int, Any]]([(0, head)]), head.size, _settled(state, ward)
    found = dict[tuple[int, int], Bytes]()
    for tensor in [*(each for _, each in state.tensors), *inner]:
        whole: Any = tensor.detach()
        at = aligned(at)
        is_settled = whole.is_contiguous() and whole.numel() > 0 and address_of(whole) in settled
        if whole.is_cpu and is_settled:
            place = whole.data_ptr(), whole.nbytes
            array = known.get(place)
            found[place] = piece = bytes_over(whole) if array is None else array
        else:
            copy = whole if is_settled else whole.clone(memory_format=torch.contiguous_format)
            piece = bytes_over(copy) if copy.is_cpu else copy
        pieces.append((at, piece))
        at += whole.nbytes
    if state.device is not None:
        state.device.follow()
    return _Prepared(pieces, at, state.device), found


def _settled(state: LoopState, ward: Any) -> set[int]:
    """Return the addresses of what only an update writes: parameters and moments, and those of the ward."""
    parameters = [each for model in state.models for each in model.parameters()]
    moments = [
        value for one in state.optimizers for values in one.state.values() for value in values.values()
    ]
    if ward is not None:
        parameters += ward["parameters"]
        moments += [value for values in ward["moments"] for value in values.values()]
    tensors = (local_of(each) for each in (*parameters, *moments) if isinstance(each, torch.Tensor))
    return {address_of(tensor) for tensor in tensors if tensor.numel()}


def _copied(prepared: _Prepared, slot: Array) -> int:
    """Copy a state into a slot, and return the digest of all of that."""
    flat, digest, at = slot.view(np.uint8), xxhash.xxh3_64(), 0
    for begin, source in prepared.pieces:
        digest.update(flat[at:begin].data)
        at = begin + source.nbytes
        if isinstance(source, torch.Tensor) and prepared.device is not None:
            prepared.device.copy(source, flat[begin:at])
            digest.update(flat[begin:at].data)
            continue
        for first in range(0, source.size, PIECE_BYTES):
            piece = source[first : first + PIECE_BYTES]
            digest.update(piece.data)
            # Of a large state past the caches: the slot is not read again, and its lines need not be loaded.
            copy_bytes(flat[begin + first : begin + first + piece.size], piece, prepared.nbytes)
    digest.update(flat[at:].data)
    return digest.intdigest()


_stores: Final = list[_Store]()
"""That of this process, once a loop has asked for it."""


def _taken() -> _Store | None:
    """Return the memory that outlives this process; None if it was given none, or if there is no more."""
    if not _stores:
        try:
            kept = take_kept_file(os.environ)  # workers of loaders have it, too, until they notice
        except (OutOfMemory, OSError) as error:
            log.warning("no memory outlives this rank", reason=str(error))
            return None
        if kept is not None:
            _stores.append(_Store(kept, []))
    return _stores[0] if _stores else None
