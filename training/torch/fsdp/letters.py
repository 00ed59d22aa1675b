"""Gradients on their way to a buddy: in one piece of memory, where FSDP2 reduces them if it can.

A letter is laid out as FSDP2 reduces gradients: those of a group of parameters side by side, each with the
room that the longest shard takes. So a group's reduced gradients are made in the letter, and are not copied
before they are sent. Their memory is used again once no tensor over it is left; until then, and for
gradients of another dtype, they are made elsewhere and copied.
"""

from __future__ import annotations

import importlib
import math
import struct
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from zbmd.collectives.torch.tensors import Array, bytes_over
from zbmd.training.torch.transfer import ALIGNED, aligned
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")

NO_UPDATE: Final = -1
SETTINGS_BYTES_MAX: Final = 1 << 16
_NUMBER: Final = struct.Struct("<q")
_IDENTITY_BYTES: Final = 32
_SETTINGS_AT: Final = 128
_LEFT_HEAD_BYTES: Final = aligned(_SETTINGS_AT + 2 * SETTINGS_BYTES_MAX)


class Layout:
    """The places of gradients in a letter, the same on all ranks.

    updated: the parameters that have gradients. groups: of FSDP2, with others as well.
    """

    def __init__(self, updated: Sequence[Any], groups: Sequence[Any]) -> None:
        wanted, at, begins = {id(each) for each in updated}, aligned(len(updated)), dict[int, int]()
        self.slots: dict[int, tuple[int, int, Any]] = {}
        """Offset, number of elements and dtype of a group that is updated as a whole, by its identity."""
        for group in groups:
            begin, own = at, [each.sharded_param for each in group.fsdp_params]
            is_alike = len({each.dtype for each in own}) == 1
            for each, parameter in zip(group.fsdp_params, own, strict=True):
                begins[id(parameter)] = at = at if is_alike else aligned(at)
                at += each.padded_sharded_param_size.numel() * parameter.element_size()
            if is_alike and wanted.issuperset(map(id, own)):
                self.slots[id(group)] = begin, (at - begin) // own[0].element_size(), own[0].dtype
            at = aligned(at)
        for each in updated:
            if id(each) not in begins:  # it is not sharded
                begins[id(each)] = at
                at += aligned(each.numel() * each.element_size())
        self.begins = [begins[id(each)] for each in updated]
        self.nbytes = at


class Letter:
    """Gradients in one piece of memory, behind a byte for each parameter: whether it has one.

    parameters: local tensors, of this rank or of another; their gradients have the same dtypes and shapes.
    memory: where it lies, `Layout.nbytes` from an aligned place on; None: in new memory.
    """

    def __init__(self, parameters: Sequence[Any], layout: Layout, memory: Array | None = None) -> None:
        # The pages of new memory are mapped once they are used.
        room = np.zeros(layout.nbytes + ALIGNED, np.uint8) if memory is None else memory
        begin = -room.ctypes.data % ALIGNED
        whole = torch.from_numpy(room[begin : begin + layout.nbytes])
        self.data, self.layout = bytes_over(whole), layout
        self.has = whole[: len(parameters)]
        self.gradients = [
            whole[begin : begin + each.numel() * each.element_size()].view(each.dtype).view(each.shape)
            for begin, each in zip(layout.begins, parameters, strict=True)
        ]
        self._lent: dict[int, weakref.ref[Array]] = {}
        """The memory of a group that was lent last; it lives as long as any tensor over it."""

    def fill(self, gradients: Sequence[Any]) -> None:
        """Take in gradients; None: there is none. Those that lie here already are not copied."""
        self.has.copy_(torch.tensor([each is not None for each in gradients], dtype=torch.uint8))
        begin = self.has.data_ptr()
        others = [
            (into, each.clone() if begin <= each.data_ptr() < begin + self.data.nbytes else each)
            for into, each in zip(self.gradients, gradients, strict=True)
            if each is not None and (each.data_ptr(), each.stride()) != (into.data_ptr(), into.stride())
        ]
        for into, each in others:  # one that lies in the place of another is a copy by now
            into.copy_(each)

    def read(self) -> list[Any]:
        """Return the gradients, as `fill` takes them."""
        return [each if has else None for each, has in zip(self.gradients, self.has.tolist(), strict=True)]

    def lend(self, group: int, elements: int, dtype: Any) -> Any:
        """Return memory for all gradients of a group, flat; None if it is in use, or has another form."""
        begin, count, kind = self.layout.slots.get(group, (0, 0, None))
        last = self._lent.get(group)
        if (elements, dtype) != (count, kind) or not count or (last is not None and last() is not None):
            return None
        memory = self.data[begin : begin + count * dtype.itemsize].view(np.uint8)
        self._lent[group] = weakref.ref(memory)
        return torch.from_numpy(memory).view(dtype)


class LeftLetters:
    """Two letters in memory that outlives this rank, by the parity of steps, with the settings of the update.

    The gradients of one step stay while those of the next are made: until the updated state is whole in a
    slot, another rank can make the update again. identity: of the loop; other letters are cleared.
    """

    def __init__(self, memory: Array, parameters: Sequence[Any], layout: Layout, identity: bytes) -> None:
        self._memory, head = memory.data, identity[:_IDENTITY_BYTES].ljust(_IDENTITY_BYTES, b"\0")
        if bytes(self._memory[:_IDENTITY_BYTES]) != head:
            for parity in range(2):
                self._stamp(parity, NO_UPDATE, 0)
            self._memory[:_IDENTITY_BYTES] = head
        each = aligned(layout.nbytes)
        self.letters = [
            Letter(parameters, layout, memory[begin : begin + each])
            for begin in (_LEFT_HEAD_BYTES, _LEFT_HEAD_BYTES + each)
        ]

    @staticmethod
    def nbytes_of(layout: Layout) -> int:
        """Return the bytes of the memory that it takes."""
        return _LEFT_HEAD_BYTES + 2 * aligned(layout.nbytes)

    def open(self, parity: int) -> Letter:
        """Return the letter for the gradients of a step; what it held counts no more."""
        self._stamp(parity, NO_UPDATE, 0)
        return self.letters[parity]

    def close(self, parity: int, version: int, settings: bytes) -> None:
        """The letter is whole: it has the gradients of the update to `version`."""
        if len(settings) > SETTINGS_BYTES_MAX:
            raise UserError(
                f"an optimizer has {len(settings)} bytes of hyperparameters, and {SETTINGS_BYTES_MAX} are "
                "kept beside gradients: keep large tensors in its state, or run with --snapshots off"
            )
        begin = _SETTINGS_AT + parity * SETTINGS_BYTES_MAX
        self._stamp(parity, NO_UPDATE, len(settings))
        self._memory[begin : begin + len(settings)] = settings
        self._stamp(parity, version, len(settings))

    def _stamp(self, parity: int, version: int, length: int) -> None:
        at = _IDENTITY_BYTES + parity * 2 * _NUMBER.size
        _NUMBER.pack_into(self._memory, at + _NUMBER.size, length)
        _NUMBER.pack_into(self._memory, at, version)  # last: this process may be killed before it

    def version_in(self, parity: int) -> int:
        """Return the version that the update of a whole letter leads to; `NO_UPDATE`: it is not whole."""
        return int(_NUMBER.unpack_from(self._memory, _IDENTITY_BYTES + parity * 2 * _NUMBER.size)[0])

    def settings_in(self, parity: int) -> bytes:
        """Return the settings of that update."""
        at = _IDENTITY_BYTES + (2 * parity + 1) * _NUMBER.size
        length = min(max(0, _NUMBER.unpack_from(self._memory, at)[0]), SETTINGS_BYTES_MAX)
        begin = _SETTINGS_AT + parity * SETTINGS_BYTES_MAX
        return bytes(self._memory[begin : begin + length])

    def reach_of(self, version: int) -> int:
        """Return the version to which a state of `version` can be updated."""
        return version + 1 if version + 1 in map(self.version_in, range(2)) else version


class Placed:
    """Allocates for the reduce-scatter of a group: its results lie in a letter if they can."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._allocate = group._reduce_scatter_comm.allocate
        self.letter: Letter | None = None
        self._before = 0

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        """Return memory for gradients: first those of whole parameters, then those of shards."""
        elements, before = math.prod(size), self._before
        self._before = elements
        is_result = before == elements * self._group.mesh_info.shard_mesh_size and before > elements
        if is_result and self.letter is not None and device.type == "cpu":
            lent = self.letter.lend(id(self._group), elements, dtype)
            if lent is not None:
                return lent
        return self._allocate(size, dtype=dtype, device=device)


def place(groups: Sequence[Any]) -> list[Placed]:
    """Have groups of FSDP2 reduce their gradients into the letter that is given to the results.

    Those that have other memory than PyTorch's, as by `use_arena`, keep it.
    """
    found = list[Placed]()
    for group in groups:
        own = group._reduce_scatter_comm
        if type(own).__name__ == "DefaultReduceScatter":
            found.append(Placed(group))
            own.allocate = found[-1].allocate  # of this object alone: others may replace it
    return found
