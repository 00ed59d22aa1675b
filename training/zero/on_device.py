"""A rank's shard under ZeRO with weights, gradients, masters and moments on a device.

The slots of the shard stay in host memory, where redundancy, checkpoints and replacements read them. A device
has its own copy of the slot in use: an update changes that in place, and it is then copied to the other slot
beside the step that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.op_watch import watched
from zbmd.training.model_actors.actors import HeldTensor
from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.transfers import StateCopy, sum_of
from zbmd.training.optim import OptimizerConfig
from zbmd.training.optim.elementwise import AdamWState, update_blocks
from zbmd.training.optim.on_device import DeviceOptimizer
from zbmd.training.zero.rank import ZeroRank


class StateOnDevice:
    """Makes a state with slots in host memory, that of the next base class, a `DeviceState`."""

    _copy: StateCopy
    """Fills the slot in use beside the step that follows an update."""

    @property
    def state(self) -> AdamWState:
        """The slot in use, once it is in host memory."""
        self._copy.settle()
        found: AdamWState = cast(Any, super()).state
        return found

    def settle(self) -> None:
        """See `DeviceState`."""
        self._copy.settle()

    def tensors(self, version: int) -> Iterator[HeldTensor]:
        """See `StateSource`."""
        self._copy.settle()
        found: Iterator[HeldTensor] = cast(Any, super()).tensors(version)
        return found

    def digest_of(self, flat: Array) -> int:
        """See `DeviceState`."""
        return sum_of(flat)

    def digest_in_use(self) -> int:
        """See `DeviceState`."""
        return self._copy.settle()


class DeviceZeroRank(StateOnDevice, ZeroRank):
    """A `ZeroRank` that computes with `executor`; `memory` makes arrays of it, and slots of the host."""

    def __init__(self, *arguments: Any, executor: Executor, optimizer: OptimizerConfig, **given: Any) -> None:
        self._executor, self._copy = executor, StateCopy(executor)
        super().__init__(*arguments, optimizer=optimizer, **given)
        size, blocks = self.shards.shard_size, update_blocks(self.shards.layout)
        self._arrays = [executor.empty(size, np.float32) for _ in self.arrays]
        """Masters and moments of the version in use."""
        self._optimizers = [
            DeviceOptimizer(optimizer, self._blocks(unit, blocks), executor) for unit in self.shards.units
        ]

    def round_weights(self) -> None:
        """Copy the slot in use to the device, and round its weights."""
        run = self._executor
        for name, array in zip(self.arrays, self._arrays, strict=True):
            run.upload(getattr(self.state, name), array)
        for number, unit in enumerate(self.shards.units):
            run.copy(_device(self._parts[number]), self._arrays[0][unit.in_shard])
        self._copy.note(self._arrays)

    def _write(self, target: int, *, step: int, learning_rate: float, grad_scale: float) -> None:
        self._copy.settle()  # the vote did, unless there is none
        arrays = [cast(Array, array) for array in self._arrays]
        with watched("update", *arrays, *self._parts.values(), *self._grad_parts.values()):
            for number, unit in enumerate(self.shards.units):
                self._optimizers[number].update(
                    [array[unit.in_shard] for array in self._arrays],
                    _device(self._parts[number]),
                    _device(self._grad_parts[number]),
                    step=step,
                    learning_rate=learning_rate,
                    grad_scale=grad_scale,
                )
        into = self._state_in(target)
        self._copy.begin(
            [(array, getattr(into, name)) for name, array in zip(self.arrays, self._arrays, strict=True)]
        )


def _device(array: Array) -> DeviceArray:
    return cast(DeviceArray, array)
