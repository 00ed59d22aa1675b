"""Planted type errors: each checker must report every line marked so, or it does not see zbmd's types.

If zbmd were invisible to a checker, its names would be `Any` and these lines would pass.
"""

from __future__ import annotations

from zbmd.transport.errors import PeerLost
from zbmd.transport.native._native import now_ns

peer: bytes = PeerLost(3, "planted").peer  # planted: a plain module behind a link in src/zbmd
moment: str = now_ns()  # planted: a compiled module, seen through its stub
