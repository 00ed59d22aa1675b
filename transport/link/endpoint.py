"""This process as its links show it to others, whatever they travel through."""

from __future__ import annotations

from dataclasses import dataclass, field

from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.clock.deadlines import Deadlines, derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.link.memory_budget import NodeMemory
from zbmd.transport.memory.segment import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What all links of a process share. One endpoint may listen and dial on several transports."""

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
