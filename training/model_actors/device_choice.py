"""Sans-I/O machine that chooses the device of an operator's next incarnation.

The operator stays on its device until the device has a fault, or one message has failed there `RETRIES_MAX +
1` times. It then moves to the next device of its list, cyclically, whose check passes. If there is none it
stays: the number of attempts at a message is bounded elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError

RETRIES_MAX: Final = 2
"""Failures of one message after the first on a device that has reported no fault."""
DEVICES_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFailed:
    """A message failed. `fault`: the device reported one."""

    fault: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHandled:
    """The message that had failed was handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationStarted:
    """The operator starts and needs a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChecked:
    """The result of a device check. `problem`: empty if it is healthy."""

    device: str
    problem: str


DeviceEvent: TypeAlias = MessageFailed | MessageHandled | IncarnationStarted | DeviceChecked


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDevice:
    """Check whether the device is healthy; deliver `DeviceChecked`."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UseDevice:
    """Compute on `device`. `moved_from`: the previous device if it was another; `reason`: why this one."""

    device: str
    moved_from: str
    reason: str


DeviceAction: TypeAlias = CheckDevice | UseDevice


class DeviceChoice:
    """Chooses from an ordered list of devices, starting with the first."""

    def __init__(self, devices: Sequence[str]) -> None:
        if not 1 <= len(devices) <= DEVICES_MAX or len(set(devices)) != len(devices):
            raise LocalProtocolError(
                f"expected 1 to {DEVICES_MAX} distinct device names, got {list(devices)}"
            )
        self._devices = tuple(devices)
        self._failures = 0
        self._leave = ""
        """Why the device is to be abandoned, or ""."""
        self._candidates = deque[str](maxlen=DEVICES_MAX)
        self._problems: list[str] = []
        self.device = devices[0]
        self.moves = 0

    def handle(self, event: DeviceEvent) -> list[DeviceAction]:
        """Take one event, return what to do. Raises `LocalProtocolError`."""
        match event:
            case MessageFailed():
                self._failures += 1
                if event.fault or self._failures > RETRIES_MAX:
                    self._leave = event.reason
                return []
            case MessageHandled():
                self._failures = 0
                return []
            case IncarnationStarted():
                return self._begin()
            case DeviceChecked():
                return self._checked(event)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a rule that holds between any two events does not."""
        assert self.device in self._devices
        assert self.device not in self._candidates
        assert self._leave or self._failures <= RETRIES_MAX
        assert not self._candidates or self._leave, "candidates without a reason to leave the device"

    def _begin(self) -> list[DeviceAction]:
        self._candidates.clear()
        self._problems.clear()
        if not self._leave:
            return [UseDevice(device=self.device, moved_from="", reason="no failure on this device")]
        here = self._devices.index(self.device)
        self._candidates.extend((*self._devices[here + 1 :], *self._devices[:here]))
        return self._next()

    def _next(self) -> list[DeviceAction]:
        if self._candidates:
            return [CheckDevice(device=self._candidates[0])]
        why = "; ".join(self._problems)[:500] or "there is no other"
        return self._settle(self.device, f"no other device is healthy: {why}")

    def _checked(self, event: DeviceChecked) -> list[DeviceAction]:
        if not self._candidates or self._candidates[0] != event.device:
            raise LocalProtocolError(f"result of a check of {event.device}, which was not requested")
        if event.problem:
            self._candidates.popleft()
            self._problems.append(f"{event.device}: {event.problem}")
            return self._next()
        return self._settle(event.device, f"{self.device} failed: {self._leave}")

    def _settle(self, device: str, reason: str) -> list[DeviceAction]:
        before, self.device = self.device, device
        self._failures, self._leave = 0, ""
        self._candidates.clear()
        moved = device != before
        self.moves += moved
        return [UseDevice(device=device, moved_from=before if moved else "", reason=reason)]
