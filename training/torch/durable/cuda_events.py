"""PyTorch's CUDA events, as a `Timer` of sampled steps uses them: on the stream that is current there."""

from __future__ import annotations

import importlib
from typing import Any

from zbmd.transport.cuda.api import CudaFault


class TorchEvents:
    """See `EventApi`. Whatever stream is asked for, an event is of the one that PyTorch computes on.

    module: `torch.cuda`, or what stands for it.
    """

    def __init__(self, module: Any = None) -> None:
        self._cuda: Any = importlib.import_module("torch").cuda if module is None else module
        self._events: list[Any] = []

    def event_create(self, *, interprocess: bool = False, timed: bool = False) -> int:
        """See `CudaApi`."""
        self._events.append(self._cuda.Event(enable_timing=timed, interprocess=interprocess))
        return len(self._events) - 1

    def event_record(self, event: int, stream: int) -> None:
        """Record it on the current stream, whatever `stream` is."""
        del stream
        self._events[event].record()

    def event_query(self, event: int) -> bool:
        """See `CudaApi`."""
        return bool(self._events[event].query())

    def event_synchronize(self, event: int) -> None:
        """See `CudaApi`."""
        self._events[event].synchronize()

    def event_elapsed_ns(self, begin: int, end: int) -> int:
        """See `CudaApi`; waits for both, which may be of streams that the step's end was not recorded on."""
        first, last = self._events[begin], self._events[end]
        try:
            first.synchronize()
            last.synchronize()
            return int(float(first.elapsed_time(last)) * 1e6 + 0.5)
        except RuntimeError as error:
            raise CudaFault(f"an event of PyTorch has no time: {error}") from None
