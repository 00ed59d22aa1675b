"""Hybrid logical clock: causality in 64 bits that read as wall-clock time.

Source: Kulkarni, Demirbas, Madappa, Avva, Leone: "Logical Physical Clocks and Consistent Snapshots in
Globally Distributed Databases" (OPODIS 2014). As in its section on 64-bit timestamps, a stamp is the wall
clock in ns since 1970 with the low 16 bits replaced by the logical counter. So stamps compare as plain
integers, and a stamp is within 65.536 us of the time it tells. A counter that is full carries into the
physical part, which runs ahead by one tick.
"""

from __future__ import annotations

from zbmd.transport.clock._hlc import LOGICAL_BITS as LOGICAL_BITS
from zbmd.transport.clock._hlc import MAX_DRIFT_NS as MAX_DRIFT_NS
from zbmd.transport.clock._hlc import STAMP_MAX as STAMP_MAX
from zbmd.transport.clock._hlc import HybridClock as HybridClock
