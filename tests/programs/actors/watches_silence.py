"""Observes a peer that never beats, and says whether it is woken: watches_silence.py PERIOD LEASE LIMIT."""

from __future__ import annotations

import select
import sys

from zbmd.actors.cluster.heartbeats._heartbeat import NativeHeartbeats

period_ns, lease_ns, limit_ns = map(int, sys.argv[1:])
native = NativeHeartbeats(period_ns=period_ns, lease_ns=lease_ns)
native.observe(native.place(), limit_ns)
print("watches", flush=True)
print(select.select([native.fd], [], [], 20)[0] == [native.fd], flush=True)
