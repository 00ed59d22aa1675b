"""Operators as actors: a kernel on a seat, called by the units of a model, forwards and backwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from zbmd.actors.core.signals import Reason, ReasonKind
from zbmd.training.model.gpt import Operator
from zbmd.training.model_actors.device_choice import (
    Action,
    Check,
    Checked,
    DeviceChoice,
    Failed,
    LifeBegins,
    Use,
    Worked,
)
from zbmd.training.model_actors.operator_devices import DeviceFault, OperatorDevice
from zbmd.training.model_actors.slot import Seat, SeatedActor

log: Final = structlog.stdlib.get_logger("zbmd.training.actors")


class OperatorPlace:
    """What outlives an operator: the devices on which it may compute, and which of them it is at.

    neighbours: the operators of the model that live, each told when a device that they share has a fault.
    """

    def __init__(self, devices: Sequence[OperatorDevice], neighbours: set[OperatorActor]) -> None:
        self._devices = {device.name: device for device in devices}
        self.choice = DeviceChoice([device.name for device in devices])
        self.neighbours = neighbours

    async def settle(self, name: str) -> OperatorDevice:
        """The device of the operator's next life."""
        actions = self.choice.handle(LifeBegins())
        while True:
            match self._only(actions):
                case Check(device=device):
                    problem = await asyncio.to_thread(self._devices[device].check)
                    actions = self.choice.handle(Checked(device=device, problem=problem))
                case Use() as use:
                    if use.moved_from:
                        log.warning(
                            "operator moved",
                            seat=name,
                            moved_from=use.moved_from,
                            device=use.device,
                            reason=use.reason,
                            moves=self.choice.moves,
                        )
                    return self._devices[use.device]

    def _only(self, actions: list[Action]) -> Action:
        self.choice.check_invariants()
        (action,) = actions
        return action


class OperatorActor(SeatedActor):
    """Runs `op(tape, …)`, one of those of `zbmd.training.ops`, on one of the devices of its `where`.

    A device that raises `DeviceFault`, or fails one message too often, is left for the next healthy one.
    install: puts its kernel where units find it, for as long as this one lives.
    """

    def __init__(
        self, seat: Seat[Any], op: Operator, where: OperatorPlace, install: Callable[[Operator], None]
    ) -> None:
        super().__init__(seat)
        self.op = op
        self.where = where
        self._device = ""
        self._install = install

    async def ready(self) -> None:
        """Be called by units from now on."""
        device = await self.where.settle(self.seat.name)
        self._device = device.name
        self._install(device.kernel(self.op))
        self.where.neighbours.add(self)

    @property
    def place(self) -> str:
        """See `SeatedActor`."""
        return self.where.choice.device

    @property
    def moves(self) -> int:
        """See `SeatedActor`."""
        return self.where.choice.moves

    def failed(self, error: Exception) -> None:
        """See `SeatedActor`."""
        if self._device != self.where.choice.device:
            return  # the next life is elsewhere already
        fault = isinstance(error, DeviceFault)
        self.where.choice.handle(Failed(fault=fault, reason=f"{type(error).__name__}: {error}"))
        if fault:
            self.where.neighbours.discard(self)
            for other in [n for n in self.where.neighbours if n._device == self._device]:
                other.leave_device(str(error))

    def leave_device(self, reason: str) -> None:
        """The device on which it computes has a fault, which another operator has met."""
        self.where.neighbours.discard(self)
        self.where.choice.handle(Failed(fault=True, reason=reason))
        self._running_cell().request_stop(Reason(ReasonKind.FAILED, reason))

    def left(self, reason: Reason) -> None:
        """See `SeatedActor`."""
        self.where.neighbours.discard(self)

    def worked(self) -> None:
        """See `SeatedActor`."""
        self.where.choice.handle(Worked())
