"""A `torch.distributed` process group over a group of ours.

`queue` carries its operations out, in the order of the calls; `messages` has sends and receives. Needs
PyTorch; imported by `backend` when a process group is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from zbmd.collectives.algorithms import catalogue
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.operations import TIMEOUT_S_MAX
from zbmd.collectives.communicator.turns import NO_ROOT
from zbmd.collectives.device.staged_calls import Cut
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.torch.barrier import monitored_barrier, seconds
from zbmd.collectives.torch.continuity import CONTINUITY
from zbmd.collectives.torch.cuda.calls import DeviceWork
from zbmd.collectives.torch.cuda.companions import Companions, wanted_beside
from zbmd.collectives.torch.cuda.devices import SEAM, buffer_of
from zbmd.collectives.torch.flights import profiled
from zbmd.collectives.torch.functions import uncompiled
from zbmd.collectives.torch.identity import Unmade
from zbmd.collectives.torch.messages import raising
from zbmd.collectives.torch.queue import Queue
from zbmd.collectives.torch.reductions import Reduction, all_reduce_sparse
from zbmd.collectives.torch.tensors import (
    Array,
    Called,
    TensorBuffer,
    array_in_place,
    list_of,
    only,
    require_elements,
    row_elements,
    splits_text,
)
from zbmd.collectives.torch.work import OVER, MessageWork, Work, as_torch_error, in_call
from zbmd.collectives.torch.world import world
from zbmd.transport.errors import ZbmdError
from zbmd.transport.native._native import now_ns

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

_ALL_REDUCE: Final = catalogue.Operation.ALL_REDUCE.value
_ALL_GATHER: Final = catalogue.Operation.ALL_GATHER.value
_BROADCAST: Final = catalogue.Operation.BROADCAST.value
_REDUCE_SCATTER: Final = catalogue.Operation.REDUCE_SCATTER.value


def create(options: Any, of_others: Any = None) -> Any:
    """Return the process group that `torch.distributed` asks for. Raises `DistBackendError`.

    of_others: options for a backend beside ours, of `cpu:zbmd,cuda:nccl`.
    """
    timeout_s = min(options.timeout.total_seconds(), TIMEOUT_S_MAX)
    ranks = list(options.global_ranks_in_group)
    rank, size = options.group_rank, options.group_size
    try:
        CONTINUITY.require_groups()
        if ranks and CONTINUITY.is_alone:
            made: Any = Unmade(rank, size)
        else:
            made = world().group(ranks, rank=rank, size=size, timeout_s=timeout_s)
    except (ZbmdError, TimeoutError) as error:
        raise as_torch_error(error) from error
    group = ProcessGroup(made, options.store, timeout_s, str(options.group_id), ranks)
    CONTINUITY.add(group)
    wanted = wanted_beside()
    if wanted:
        try:
            group.join_beside(Companions(wanted, of_others, group.group_name, ranks))
        except ZbmdError as error:
            group.shutdown()
            raise as_torch_error(error) from error
        world().at_loss(CONTINUITY.lost)
    return group


class Operations(Queue):
    """The methods of a process group; `ProcessGroup` has torch's class below it.

    Each collective takes its tensors as buffers, and queues a call of the communicator's operation.
    """

    # Collectives.

    @raising
    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Reduce a tensor over all ranks, in place."""
        tensor, reduction = only(tensors), self._op(opts, op)
        if self.buckets is not None:
            self.buckets.take(tensor)
        if tensor.layout is not torch.strided:
            on = None if tensor.is_cpu else self.device_calls.at(SEAM.require(tensor))
            text, run = all_reduce_sparse(tensor, reduction)
            called = Called("all_reduce", [], f"{text}{reduction.said}", terms=text)
            return self._queue(called, run, [tensor], opts, timeout, on=on)
        if CONTINUITY.is_usual and reduction.factor is None and self._is_first() and not profiled():
            array = array_in_place(tensor)
            if array is not None and getattr(opts, "asyncOp", True):
                called = Called("all_reduce", (), reduction.said, tensor=tensor)
                call = _ALL_REDUCE, array, None, reduction.name, NO_ROOT
                work = self._begin_here(called, call, [tensor], opts, timeout)
                if work is not None:
                    return work
            elif array is not None:
                return self._all_reduce_here(tensor, array, reduction, opts, timeout)
        return self._reduce_in_place([tensor], reduction, opts, timeout)

    def _all_reduce_here(self, tensor: Any, array: Array, op: Reduction, opts: Any, timeout: Any) -> Any:
        """As `_queue` and `_begin` in the usual case: most of a small all-reduce is their Python."""
        called, c = Called("all_reduce", (), op.said, tensor=tensor), self._group.communicator
        self._number(called, opts, timeout)
        called.began_ns = called.called_ns
        self.flights.append(called)
        c.label(called.text)
        try:
            c.all_reduce(array, op=op.name, deadline_ns=called.called_ns + called.limit_ns)
        except ZbmdError as error:
            self._note(error, self._group.epoch)
            raise in_call(error, called.text()) from None
        called.ended_ns = now_ns()
        CONTINUITY.record(self._name, called.number, [tensor])
        return OVER

    @raising
    def allreduce_coalesced(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Reduce tensors over all ranks, in place; small ones together."""
        return self._reduce_in_place(tensors, self._op(opts, op), opts, timeout)

    def _reduce_in_place(self, tensors: Any, reduction: Reduction, opts: Any, timeout: Any) -> Any:
        buffers = _buffers(tensors, numbers=True, factor=reduction.factor)
        run = partial(_all_reduce, buffers, reduction.name)
        called = Called("all_reduce", buffers, reduction.said, together=True)
        cut = Cut(buffers[0].array.size, 1, as_placed=True) if len(buffers) == 1 else None
        return self._queue(called, run, tensors, opts, timeout, reads=buffers, home=buffers, cut=cut)

    @raising
    def broadcast(self, tensors: Any, opts: Any = None, root: int | None = None, timeout: Any = None) -> Any:
        """Copy a tensor of one rank to all."""
        buffer, place = buffer_of(only(tensors)), self._root(opts, root)

        def run(c: Communicator, end_ns: int) -> None:
            c.broadcast(buffer.array, place, deadline_ns=end_ns)

        called = Called("broadcast", [buffer], f", src={place}")
        call = _BROADCAST, buffer.array, None, "sum", place
        home = [] if place == self.rank() else [buffer]
        cut = Cut(buffer.array.size, 1, as_placed=True)
        return self._queue(
            called, run, [only(tensors)], opts, timeout, reads=[buffer], home=home, call=call, cut=cut
        )

    @raising
    def reduce(
        self, tensors: Any, opts: Any = None, root: int | None = None, op: Any = None, timeout: Any = None
    ) -> Any:
        """Reduce a tensor over all ranks, into that of one rank."""
        reduction, place = self._op(opts, op), self._root(opts, root)
        buffer = buffer_of(only(tensors), numbers=True, factor=reduction.factor)

        def run(c: Communicator, end_ns: int) -> None:
            c.reduce(buffer.array, place, op=reduction.name, deadline_ns=end_ns)

        called = Called("reduce", [buffer], f", dst={place}{reduction.said}")
        home = [buffer] if place == self.rank() else []
        cut = Cut(buffer.array.size, 1, as_placed=True)
        return self._queue(called, run, tensors, opts, timeout, reads=[buffer], home=home, cut=cut)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Collect the tensors of all ranks, one after the other, in one."""
        return self.all_gather_single_coalesced([output], [input], opts, timeout)

    @raising
    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        """As `all_gather_single`, of several tensors."""
        pairs, targets = _pairs(inputs, outputs)
        for source, target in pairs:
            require_elements([target], source.array.size * self.size())

        def run(c: Communicator, end_ns: int) -> None:
            for source, target in pairs:
                c.all_gather(source.array, target.array.reshape(c.size, -1), deadline_ns=end_ns)

        sources = [source for source, _ in pairs]
        called = Called("all_gather_into_tensor", sources, together=True)
        call = cut = None
        if len(pairs) == 1:
            [(source, target)] = pairs
            call = _ALL_GATHER, source.array, target.array.reshape(self.size(), -1), "sum", NO_ROOT
            cut = Cut(source.array.size, 1 + self.size(), as_placed=True)
        return self._queue(
            called, run, outputs, opts, timeout, reads=sources, home=targets, call=call, cut=cut
        )

    @raising
    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        """Collect the tensors of all ranks in a list."""
        outputs = list_of(output_tensors)
        return self._all_gather([outputs], [only(input_tensors)], outputs, opts, timeout)

    @raising
    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        """As `allgather`, of several tensors: `output_lists[rank][i]` is the i-th of a rank."""
        flat = [tensor for outputs in output_lists for tensor in outputs]
        return self._all_gather(zip(*output_lists, strict=True), input_list, flat, opts)

    def _all_gather(
        self, lists: Iterable[Any], inputs: Any, outputs: Any, opts: Any, timeout: Any = None
    ) -> Any:
        sources = _buffers(inputs)
        targets = [_buffers(each, load=False) for each in lists]
        for source, buffers in zip(sources, targets, strict=True):
            require_elements(buffers, source.array.size)

        def run(c: Communicator, end_ns: int) -> None:
            for source, buffers in zip(sources, targets, strict=True):
                _hand_out(c.all_gather(source.array, deadline_ns=end_ns), buffers)

        called, home = Called("all_gather", sources, together=True), [each for row in targets for each in row]
        cut = Cut(sources[0].array.size, 1 + self.size()) if len(sources) == 1 else None
        return self._queue(called, run, outputs, opts, timeout, reads=sources, home=home, cut=cut)

    @raising
    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        root: int | None = None,
        timeout: Any = None,
    ) -> Any:
        """Collect the tensors of all ranks in a list at one rank."""
        outputs = list_of(output_tensors)
        source, place = buffer_of(only(input_tensors)), self._root(opts, root)
        targets = _buffers(outputs, load=False)
        require_elements(targets, source.array.size)

        def run(c: Communicator, end_ns: int) -> None:
            rows = c.gather(source.array, place, deadline_ns=end_ns)
            if place == c.place:
                _hand_out(rows, targets)

        called = Called("gather", [source], f", dst={place}")
        cut = Cut(source.array.size, 1 + self.size())
        return self._queue(called, run, outputs, opts, timeout, reads=[source], home=targets, cut=cut)

    @raising
    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        root: int | None = None,
        timeout: Any = None,
    ) -> Any:
        """Give each rank one tensor of a list that one rank has."""
        tensor, sources = only(output_tensors), _buffers(list_of(input_tensors))
        place, target = self._root(opts, root), buffer_of(tensor, load=False)
        require_elements(sources, target.array.size)

        def run(c: Communicator, end_ns: int) -> None:
            rows = np.stack([source.array for source in sources]) if place == c.place else None
            c.scatter(rows, place, target.array, deadline_ns=end_ns)

        called = Called("scatter", [target], f", src={place}")
        cut = Cut(target.array.size, 1 + self.size())
        return self._queue(called, run, [tensor], opts, timeout, reads=sources, home=[target], cut=cut)

    def reduce_scatter_single(
        self, output: Any, input: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> Any:
        """Reduce a tensor over all ranks; each keeps its part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts, op, timeout)

    @raising
    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> Any:
        """As `reduce_scatter_single`, of several tensors."""
        reduction = self._op(opts, op)
        pairs, targets = _pairs(inputs, outputs, numbers=True, factor=reduction.factor)
        for source, target in pairs:
            require_elements([source], target.array.size * self.size())

        def run(c: Communicator, end_ns: int) -> None:
            for source, target in pairs:
                rows = source.array.reshape(c.size, -1)
                c.reduce_scatter(rows, target.array, op=reduction.name, deadline_ns=end_ns)

        sources = [source for source, _ in pairs]
        called = Called("reduce_scatter_tensor", sources, reduction.said, together=True)
        call = cut = None
        if len(pairs) == 1:
            [(source, target)] = pairs
            rows = source.array.reshape(self.size(), -1)
            call = _REDUCE_SCATTER, rows, target.array, reduction.name, NO_ROOT
            cut = Cut(target.array.size, 1 + self.size(), as_placed=True)
        return self._queue(
            called, run, outputs, opts, timeout, reads=sources, home=targets, call=call, cut=cut
        )

    @raising
    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> Any:
        """Reduce a list of tensors over all ranks; each keeps the one of its rank."""
        tensor, reduction = only(output_tensors), self._op(opts, op)
        target = buffer_of(tensor, numbers=True, load=False)
        sources = _buffers(list_of(input_tensors), numbers=True, factor=reduction.factor)

        def run(c: Communicator, end_ns: int) -> None:
            rows = [source.array.size for source in sources]
            whole = np.concatenate([source.array for source in sources])
            c.reduce_scatter_v(whole, rows, target.array, op=reduction.name, deadline_ns=end_ns)

        called = Called("reduce_scatter", sources, reduction.said)
        return self._queue(called, run, [tensor], opts, timeout, reads=sources, home=[target])

    @raising
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any,
        input_split_sizes: Any,
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Send each rank its rows of a tensor. Split sizes: in rows, none for even ones."""
        source, target = buffer_of(input), buffer_of(output, load=False)
        sends = row_elements(input, source, input_split_sizes, self.size())
        receives = row_elements(output, target, output_split_sizes, self.size())
        even = not len(input_split_sizes) and not len(output_split_sizes) and sends == receives

        def run(c: Communicator, end_ns: int) -> None:
            if even:
                blocks = source.array.reshape(c.size, -1), target.array.reshape(c.size, -1)
                c.all_to_all(*blocks, deadline_ns=end_ns)
            else:
                c.all_to_all_v(source.array, sends, receives, target.array, deadline_ns=end_ns)

        splits = "" if even else splits_text(output_split_sizes, input_split_sizes)
        called = Called("all_to_all_single", [source], own=splits)
        cut = Cut(sends[0], 2 * self.size(), as_placed=True) if even else None
        return self._queue(called, run, [output], opts, timeout, reads=[source], home=[target], cut=cut)

    @raising
    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Send each rank one tensor of a list."""
        sources, targets = _buffers(input_tensors), _buffers(output_tensors, load=False)
        sends = [source.array.size for source in sources]
        receives = [target.array.size for target in targets]

        def run(c: Communicator, end_ns: int) -> None:
            whole = np.concatenate([source.array for source in sources])
            came = c.all_to_all_v(whole, sends, receives, deadline_ns=end_ns)
            _hand_out(np.split(came.reshape(-1), np.cumsum(receives)[:-1]), targets)

        called = Called("all_to_all", sources)
        return self._queue(called, run, output_tensors, opts, timeout, reads=sources, home=targets)

    @raising
    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait for all ranks, and, where the group has had tensors on a device, for the current stream."""
        on = self.device_calls.ordered()
        return self._queue(Called("barrier", []), _barrier, [], opts, timeout, on=on)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; an error names those that do not come. See `barrier`."""
        monitored_barrier(self, seconds(timeout, self._timeout_s), wait_all_ranks)

    # Its end.

    def abort(self) -> None:
        """End what is in flight, here and on the others."""
        self._group.abort()
        if self.companions is not None:
            self.companions.lost(OperationAborted(f"{self.title} was aborted"))

    def shutdown(self) -> None:
        """Close the group."""
        if not self._closed:
            self._closed = True
            self._store = None
            if self.companions is not None:
                self.companions.close()
            if not isinstance(self._group, Unmade):
                world().close(self._group, "destroyed its process group")
            self._device_messages.close()
            self.device_calls.close()
            self._completers.shutdown(wait=False)
            if not self.ranks:
                CONTINUITY.leave()

    # Names of older versions.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


ProcessGroup: Any = type("ProcessGroupZbmd", (Operations, dist.ProcessGroup), {"__doc__": Operations.__doc__})
uncompiled(ProcessGroup, Work, MessageWork, DeviceWork)


def _all_reduce(buffers: Sequence[TensorBuffer], reduction: str, c: Communicator, end_ns: int) -> None:
    arrays = [buffer.array for buffer in buffers]
    if len(arrays) == 1:
        c.all_reduce(arrays[0], op=reduction, deadline_ns=end_ns)
    else:
        c.all_reduce_many(arrays, op=reduction, deadline_ns=end_ns)


def _barrier(c: Communicator, end_ns: int) -> None:
    c.barrier(deadline_ns=end_ns)


def _buffers(
    tensors: Iterable[Any], *, numbers: bool = False, load: bool = True, factor: Any = None
) -> list[TensorBuffer]:
    return [buffer_of(tensor, numbers=numbers, load=load, factor=factor) for tensor in tensors]


def _pairs(
    inputs: Any, outputs: Any, *, numbers: bool = False, factor: Any = None
) -> tuple[list[tuple[TensorBuffer, TensorBuffer]], list[TensorBuffer]]:
    """Return the buffers of each input and its output, and of all outputs."""
    sources = _buffers(inputs, numbers=numbers, factor=factor)
    targets = _buffers(outputs, numbers=numbers, load=False)
    return list(zip(sources, targets, strict=True)), targets


def _hand_out(rows: Sequence[Array] | Array, targets: Sequence[TensorBuffer]) -> None:
    for row, target in zip(rows, targets, strict=True):
        target.array[:] = row.reshape(-1)
