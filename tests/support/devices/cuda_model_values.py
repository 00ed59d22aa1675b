"""Waits of a modelled process, and numbers in the host's memory that its streams wait for."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.cuda.api import CudaFault

_LOOK_S: Final = 1e-4
_PATIENCE_S: Final = 60.0
Bytes = NDArray[np.uint8]


class DeviceRace(CudaFault):
    """Two accesses of the same bytes, one of them a write, that nothing orders."""


class Undefined(CudaFault):
    """Something of which CUDA says nothing."""


class ValueWaits:
    """Methods of a `ModelProcess`."""

    host: Any
    clock: dict[int, int]
    _ask: Any
    _stream: Any
    _source: Any
    _target: Any
    require_no_capture: Any
    _tick = threading.Event()

    def waits_for_values(self) -> bool:
        """See `CudaApi`."""
        return True

    def stream_wait_value(self, stream: int, address: int, value: int) -> None:
        """See `CudaApi`. A thread of this process sets the number, and the stream learns its clock."""
        number = ctypes.c_uint32.from_address(address)

        def passed() -> bool:
            return (number.value - value) & 0xFFFFFFFF < 1 << 31

        def learn(clock: dict[int, int]) -> None:
            self._held.remove(passed)
            clock.update({key: max(clock.get(key, 0), count) for key, count in self.clock.items()})

        with self.host.lock:
            self.require_no_capture(stream)
            self._held.append(passed)
            self._ask(stream, learn, passed)

    @property
    def _held(self) -> list[Callable[[], bool]]:
        found: list[Callable[[], bool]] = self.__dict__.setdefault("_waits_for_values", [])
        return found

    def require_free(self) -> None:
        """Raise `Undefined` if a call that waits for all of the device would wait for a number."""
        with self.host.lock:  # what two threads took from one stream would run in any order
            self.host.run_until(lambda: False)
        if self._held:
            raise Undefined("a call that waits for the whole device, while a stream waits for a number")

    def until(self, done: Callable[[], bool]) -> bool:
        """Run operations until it is done, and let other threads set numbers; False if nothing is left to."""
        end_s = time.monotonic() + _PATIENCE_S
        while True:
            with self.host.lock:
                if self.host.run_until(done):
                    return True
                if not self._held:
                    return False
            if time.monotonic() > end_s:
                raise CudaFault("a stream waits for a number that nobody sets")
            self._tick.wait(_LOOK_S)  # as the device does: nobody says that a number has changed

    def kernel(
        self,
        stream: int,
        reads: Sequence[tuple[int, int]],
        writes: Sequence[tuple[int, int]],
        run: Callable[[list[Bytes], list[Bytes]], None],
    ) -> None:
        """Ask a stream for a function of device memory, as (address, bytes)."""
        with self.host.lock:

            def operation(clock: dict[int, int]) -> None:
                inputs = [self._source(*each, clock) for each in reads if each[1]]
                run(inputs, [self._target(*each, clock) for each in writes if each[1]])

            self._ask(stream, operation)
