"""The memory of a simulated process: an account with a limit, no bytes."""

from __future__ import annotations

from types import TracebackType

from zbmd.transport.errors import LocalProtocolError, OutOfMemory

MEMORY_BYTES_DEFAULT = 16 << 30


class Allocation:
    """So many bytes of a `SimMemory`, until `free`; a context manager."""

    def __init__(self, memory: SimMemory, nbytes: int) -> None:
        self._memory = memory
        self.nbytes = nbytes

    def free(self) -> None:
        """Give the bytes back. Idempotent."""
        self._memory.used_bytes -= self.nbytes
        self.nbytes = 0

    def __enter__(self) -> Allocation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


class SimMemory:
    """What one incarnation holds. A limit that shrinks below it takes nothing away."""

    def __init__(self, limit_bytes: int = MEMORY_BYTES_DEFAULT) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def allocate(self, nbytes: int) -> Allocation:
        """Take `nbytes`. Raises `OutOfMemory` beyond the limit."""
        if nbytes < 0:
            raise LocalProtocolError(f"cannot allocate {nbytes} bytes")
        available_bytes = max(0, self.limit_bytes - self.used_bytes)
        if nbytes > available_bytes:
            raise OutOfMemory(
                f"{nbytes} bytes asked for, {available_bytes} of the simulated {self.limit_bytes} are left: "
                "ask for less, or free some",
                asked_bytes=nbytes,
                available_bytes=available_bytes,
            )
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return Allocation(self, nbytes)
