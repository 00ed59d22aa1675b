"""Operators as actors: one kernel per slot, called by the units of a model, forwards and backwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from zbmd.actors.core.ref import Reason, ReasonKind
from zbmd.training.model.gpt import Operator
from zbmd.training.model_actors.device_choice import (
    CheckDevice,
    DeviceAction,
    DeviceChecked,
    DeviceChoice,
    IncarnationStarted,
    MessageFailed,
    MessageHandled,
    UseDevice,
)
from zbmd.training.model_actors.operator_devices import DeviceFault, OperatorDevice
from zbmd.training.model_actors.slot import ActorSlot, SlotActor

log: Final = structlog.stdlib.get_logger("zbmd.training.actors")


class OperatorPlacement:
    """The devices on which an operator may compute, and the current one; outlives the operator.

    `neighbours`: the live operators of the model; each is told when a shared device has a fault.
    """

    def __init__(self, devices: Sequence[OperatorDevice], neighbours: set[OperatorActor]) -> None:
        self._devices = {device.name: device for device in devices}
        self.choice = DeviceChoice([device.name for device in devices])
        self.neighbours = neighbours

    async def settle(self, name: str) -> OperatorDevice:
        """Return the device of the operator's next incarnation."""
        actions = self.choice.handle(IncarnationStarted())
        while True:
            match self._only(actions):
                case CheckDevice(device=device):
                    problem = await asyncio.to_thread(self._devices[device].check)
                    actions = self.choice.handle(DeviceChecked(device=device, problem=problem))
                case UseDevice() as use:
                    if use.moved_from:
                        log.warning(
                            "operator moved",
                            slot=name,
                            moved_from=use.moved_from,
                            device=use.device,
                            reason=use.reason,
                            moves=self.choice.moves,
                        )
                    return self._devices[use.device]

    def _only(self, actions: list[DeviceAction]) -> DeviceAction:
        self.choice.check_invariants()
        (action,) = actions
        return action


class OperatorActor(SlotActor):
    """Runs `op(tape, …)`, one of `zbmd.training.ops`, on one of the devices of its `where`.

    A device that raises `DeviceFault`, or fails one message too often, is abandoned for the next healthy one.
    `install`: puts its kernel where units find it.
    """

    def __init__(
        self,
        slot: ActorSlot[Any],
        op: Operator,
        where: OperatorPlacement,
        install: Callable[[Operator], None],
    ) -> None:
        super().__init__(slot)
        self.op = op
        self.where = where
        self._device = ""
        self._install = install

    async def ready(self) -> None:
        """Choose a device and install the kernel."""
        device = await self.where.settle(self.slot.name)
        self._device = device.name
        self._install(device.kernel(self.op))
        self.where.neighbours.add(self)

    @property
    def place(self) -> str:
        """See `SlotActor`."""
        return self.where.choice.device

    @property
    def moves(self) -> int:
        """See `SlotActor`."""
        return self.where.choice.moves

    def failed(self, error: Exception) -> None:
        """See `SlotActor`."""
        if self._device != self.where.choice.device:
            return  # the next actor is elsewhere already
        fault = isinstance(error, DeviceFault)
        self.where.choice.handle(MessageFailed(fault=fault, reason=f"{type(error).__name__}: {error}"))
        if fault:
            self.where.neighbours.discard(self)
            for other in [n for n in self.where.neighbours if n._device == self._device]:
                other.leave_device(str(error))

    def leave_device(self, reason: str) -> None:
        """Leave the device because another operator has met a fault of it."""
        self.where.neighbours.discard(self)
        self.where.choice.handle(MessageFailed(fault=True, reason=reason))
        self._running_cell().request_stop(Reason(ReasonKind.FAILED, reason))

    def ended(self, reason: Reason) -> None:
        """See `SlotActor`."""
        self.where.neighbours.discard(self)

    def worked(self) -> None:
        """See `SlotActor`."""
        self.where.choice.handle(MessageHandled())
