"""The machine of one operator's devices (sans-I/O): where its next life computes.

It stays where it is until its device has a fault, or one message has failed there `RETRIES_MAX + 1` times.
It then goes to the next device of its list, round the list, whose check finds nothing wrong. Where there is
none it stays: others bound how often a message is tried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError

RETRIES_MAX: Final = 2
"""Failures of one message after the first on a device that has told of no fault."""
DEVICES_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A message failed. fault: the device has told of one."""

    fault: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """The message that had failed was handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeBegins:
    """The operator starts and wants a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the check of a device has found; problem: empty if it is healthy."""

    device: str
    problem: str


Event: TypeAlias = Failed | Worked | LifeBegins | Checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Find out whether the device is healthy; deliver `Checked`."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Compute there. moved_from: where it did before, if that was elsewhere; reason: why there."""

    device: str
    moved_from: str
    reason: str


Action: TypeAlias = Check | Use


class DeviceChoice:
    """Decides for an ordered list of devices, the first of which it begins with."""

    def __init__(self, devices: Sequence[str]) -> None:
        if not 1 <= len(devices) <= DEVICES_MAX or len(set(devices)) != len(devices):
            raise LocalProtocolError(
                f"give 1 to {DEVICES_MAX} devices of different names, not {list(devices)}"
            )
        self._devices = tuple(devices)
        self._failures = 0
        self._leave = ""
        """Why the device is to be left, or nothing."""
        self._candidates = deque[str](maxlen=DEVICES_MAX)
        self._problems: list[str] = []
        self.device = devices[0]
        self.moves = 0

    def handle(self, event: Event) -> list[Action]:
        """Take one event, return what to do. Raises `LocalProtocolError`."""
        match event:
            case Failed():
                self._failures += 1
                if event.fault or self._failures > RETRIES_MAX:
                    self._leave = event.reason
                return []
            case Worked():
                self._failures = 0
                return []
            case LifeBegins():
                return self._begin()
            case Checked():
                return self._checked(event)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a rule that holds between any two events does not."""
        assert self.device in self._devices
        assert self.device not in self._candidates
        assert self._leave or self._failures <= RETRIES_MAX
        assert not self._candidates or self._leave, "who has no reason to leave looks at no other"

    def _begin(self) -> list[Action]:
        self._candidates.clear()
        self._problems.clear()
        if not self._leave:
            return [Use(device=self.device, moved_from="", reason="it has not failed there")]
        here = self._devices.index(self.device)
        self._candidates.extend((*self._devices[here + 1 :], *self._devices[:here]))
        return self._next()

    def _next(self) -> list[Action]:
        if self._candidates:
            return [Check(device=self._candidates[0])]
        why = "; ".join(self._problems)[:500] or "there is no other"
        return self._settle(self.device, f"no other device is healthy: {why}")

    def _checked(self, event: Checked) -> list[Action]:
        if not self._candidates or self._candidates[0] != event.device:
            raise LocalProtocolError(f"nobody asked for a check of {event.device}")
        if event.problem:
            self._candidates.popleft()
            self._problems.append(f"{event.device}: {event.problem}")
            return self._next()
        return self._settle(event.device, f"{self.device} failed: {self._leave}")

    def _settle(self, device: str, reason: str) -> list[Action]:
        before, self.device = self.device, device
        self._failures, self._leave = 0, ""
        self._candidates.clear()
        moved = device != before
        self.moves += moved
        return [Use(device=device, moved_from=before if moved else "", reason=reason)]
