"""This process as its links show it to others, whatever they travel through."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.clock.deadlines import Deadlines, derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.memory.segment import Segment

# The memory that all links of a process may hold together, for what waits to be sent or taken.
#
# Each link has bounds of its own; with a thousand of them these add up to more than a machine has. So links
# also count what they hold here. When the bound is reached, senders get `LinkFull` and sockets are no longer
# read, but for the frame under way of each, until enough has left. What is to be sent and what has come are
# counted apart: else two processes, each full of what the other should read, would wait for each other.
# Used from one thread, that of the loop.

NODE_BYTES_MAX: Final = 256 << 20
"""In each direction."""
_RESUME_NUMERATOR, _RESUME_DENOMINATOR = 3, 4


class NodeMemory:
    """bytes_max: whether it is reached is asked before each frame, so one frame at most exceeds it."""

    __slots__ = ("_waiting", "bytes_max", "used_bytes")

    def __init__(self, bytes_max: int = NODE_BYTES_MAX) -> None:
        if bytes_max < 1:
            raise LocalProtocolError(f"bytes_max={bytes_max} must be positive")
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._waiting: dict[Hashable, Callable[[], None]] = {}

    @property
    def full(self) -> bool:
        """Whether nothing more may be taken in."""
        return self.used_bytes >= self.bytes_max

    def change(self, delta_bytes: int) -> None:
        """A link holds so much more, or less. Calls who waits once three quarters are used at most."""
        self.used_bytes += delta_bytes
        assert self.used_bytes >= 0, self.used_bytes
        if self._waiting and delta_bytes < 0 and self._has_room():
            waiting, self._waiting = self._waiting, {}
            for resume in waiting.values():
                resume()

    def wait(self, who: Hashable, resume: Callable[[], None]) -> None:
        """Have `resume` called once there is room; one a link. Room must be lacking now."""
        self._waiting[who] = resume

    def forget(self, who: Hashable) -> None:
        """It waits no more. Idempotent."""
        self._waiting.pop(who, None)

    def _has_room(self) -> bool:
        return self.used_bytes * _RESUME_DENOMINATOR <= self.bytes_max * _RESUME_NUMERATOR


class MemoryShare:
    """What one link holds of a `NodeMemory`."""

    __slots__ = ("_held_bytes", "memory")

    def __init__(self, memory: NodeMemory) -> None:
        self.memory = memory
        self._held_bytes = 0

    def hold(self, nbytes: int) -> None:
        """It holds so much now, in all."""
        delta, self._held_bytes = nbytes - self._held_bytes, nbytes
        if delta:
            self.memory.change(delta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Hold what all links of a process share. One endpoint may listen and dial on several transports."""

    identity: Identity
    cookie: bytes = field(repr=False)
    segment: Segment | None = None
    """Handed to every peer of this host at hello; its life thread must have started by then."""
    clock: HybridClock = field(default_factory=HybridClock)
    limits: LinkLimits = field(default_factory=LinkLimits)
    deadlines: Deadlines = field(default_factory=derive)
    send_memory: NodeMemory = field(default_factory=NodeMemory)
    """Bounds what all its TCP links together hold to be sent."""
    receive_memory: NodeMemory = field(default_factory=NodeMemory)
    """The same of what has come and was not taken yet."""
    recorder: Recorder | None = None
    """Takes down every hello, and every frame of every link; its hybrid clock is `clock`."""
