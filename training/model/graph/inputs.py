"""Inputs of graphs at fixed addresses, which captured launches read: batches of one shape and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from zbmd.training.model.gpt import Batch
from zbmd.training.model.graph.ir import ACTIVATIONS_IN, OWN_TARGETS, OWN_TOKENS, SLOPE_IN, Graph
from zbmd.training.model.graph.memory import ALIGNMENT
from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.operators import (
    NOISE_HEAD,
    noise_numbers,
    own_targets,
    own_tokens,
    rows_by_token,
)
from zbmd.training.ops.cuda.transfers import UploadAhead


def embedded_in(graph: Graph) -> dict[int, int]:
    """Return the values that tables are read at, each with the rows of its table."""
    return {
        node.inputs[1]: int(node.attributes["rows"]) for node in graph.nodes if node.op == "embedding_grad"
    }


class BatchInputs:
    """Inputs of graphs in one block of device memory, whose next contents are uploaded while these are read.

    They are those that `graphs`, of batches of one shape, read: tokens, targets, the rows of each token, the
    numbers of dropout, and the weight of the loss.
    """

    def __init__(self, executor: Executor, graphs: Sequence[Graph]) -> None:
        sizes = dict[str, tuple[int, npt.DTypeLike]]()
        for graph in graphs:
            sizes |= _sizes_of(graph)
        self._sizes, self._starts, end = sizes, dict[str, int](), 0
        self._own = _own_parts(graphs)
        for name, (count, dtype) in sizes.items():
            self._starts[name] = end
            end += -(-count * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self._ahead: UploadAhead | None = None
        self.device: Final[dict[str, DeviceArray]] = {}
        if not sizes:
            return
        block = executor.empty(end, np.uint8)
        self._ahead = UploadAhead(executor, block)
        for name, (count, dtype) in sizes.items():
            address = block.address + self._starts[name]
            self.device[name] = DeviceArray(executor, address, (count,), np.dtype(dtype), block.base)

    def upload(self, batch: Batch) -> None:
        """Begin to upload a batch and the numbers of its step, beside what the device computes."""
        if self._ahead is not None:
            self._ahead.upload(batch, partial(self._write, batch))

    def load(self, batch: Batch) -> None:
        """Have what is launched next read a batch, which is uploaded now unless it was before."""
        self.upload(batch)
        if self._ahead is not None:
            self._ahead.take(batch)

    def close(self) -> None:
        """Give page-locked memory back. The device is done with it."""
        if self._ahead is not None:
            self._ahead.close()

    def _write(self, batch: Batch, room: npt.NDArray[np.uint8]) -> None:
        into = {
            name: room[self._starts[name] :][: count * np.dtype(dtype).itemsize].view(dtype)
            for name, (count, dtype) in self._sizes.items()
        }
        tokens = np.ascontiguousarray(batch.inputs, np.int64).reshape(-1)
        assert batch.targets is not None, "a step has targets"
        given: dict[str, Callable[[], Any]] = {
            "tokens": lambda: tokens,
            "targets": lambda: batch.targets,
            "scale": lambda: batch.weight,
        }
        for name, part in self._own.items():
            find, read = (own_tokens, tokens) if name == OWN_TOKENS else (own_targets, batch.targets)
            given[name] = partial(find, read, part)
        if batch.noise is not None:
            given["noise"] = partial(noise_numbers, batch.noise)
        for name in given.keys() & into.keys():
            into[name][:] = given[name]()
        if "order" in into:
            rows = into.get(OWN_TOKENS, tokens)  # the ones of others are behind all of the table
            into["order"][:], into["starts"][:] = rows_by_token(rows, len(into["starts"]) - 1)


def _own_parts(graphs: Iterable[Graph]) -> dict[str, tuple[int, int]]:
    """Return the part of the vocabulary that this rank has, by the inputs that depend on it."""
    every = (node for graph in graphs for node in graph.nodes)
    names = {"embedding_of_vocabulary": OWN_TOKENS, "part_sums": OWN_TARGETS}
    return {
        names[node.op]: (int(node.attributes["first"]), int(node.attributes["stop"]))
        for node in every
        if node.op in names
    }


def _sizes_of(graph: Graph) -> Mapping[str, tuple[int, npt.DTypeLike]]:
    values = {one.name: one for one in graph.values.values() if one.source == "input"}
    samples, rows = values["tokens"].shape[0], values["targets"].shape[0]
    read, ops = set(graph.uses()), {node.op for node in graph.nodes}
    inputs = values.keys() - {ACTIVATIONS_IN, SLOPE_IN}
    sizes: dict[str, tuple[int, npt.DTypeLike]] = {
        name: (rows, np.int64) for name in sorted(inputs) if values[name].number in read
    }
    if "dropout" in ops:
        sizes["noise"] = len(NOISE_HEAD) + samples, np.int64
    if "cross_entropy_both" in ops:
        sizes["scale"] = 1, np.float32
    for number, entries in embedded_in(graph).items():
        if graph.values[number].source == "input":
            sizes |= {"order": (rows, np.int32), "starts": (entries + 1, np.int32)}
    return sizes
