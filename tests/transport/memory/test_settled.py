"""A fence behind all that was put: what a process that leaves waits for."""

from __future__ import annotations

import numpy as np
import pytest
from support.bulk.bulk_host import BulkHost, deadline, join

from zbmd.transport.errors import PeerLost
from zbmd.transport.native import _native


def test_all_that_was_put_has_arrived_by_then() -> None:
    with BulkHost(0, nbytes=4 << 20) as a, BulkHost(1, nbytes=4 << 20) as b:
        to_b, _ = join(a, b)
        inbox = b.segment.inbox.empty(2 << 20, np.uint8)
        region = to_b.open_region(b.regions.register(inbox))
        for value in range(1, 30):
            region.put(np.full(inbox.size, value, np.uint8), channel=3, value=value)
            region.notify(4, value)
            to_b.settled().wait(deadline())
            assert _native.load_cell(b.segment.base, 0, 3) == value
            assert _native.load_cell(b.segment.base, 0, 4) == value and (inbox == value).all()
        assert _native.load_cell(b.segment.base, 0, 0) == 0, "it says nothing itself"


def test_an_end_ends_it() -> None:
    with BulkHost(0) as a, BulkHost(1) as b:
        to_b, _ = join(a, b)
        to_b.settled().wait(deadline())
        b.plane.close()
        with pytest.raises(PeerLost):
            while True:
                to_b.settled().wait(deadline())
