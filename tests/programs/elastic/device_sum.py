"""All-reduce arrays that lie on a modelled device, or on the host, in turns."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.devices.device_rank import device, look, made_late
from support.devices.device_worlds import on_device
from support.jobs.elastic_rank import MODE, run_operations

import zbmd
from zbmd.collectives.elastic.operations import Result


async def operate(group: zbmd.ElasticGroup, rank: int, k: int) -> tuple[Result, Any]:
    values = np.full(9000, 10.0**rank * k)
    out: Any = None
    if MODE.get("inputs") != "recompute" and k % 2:
        out = np.zeros(9000) if (rank + k) % 3 == 0 else on_device(device(), np.zeros(9000))
    x, stream = (values.copy(), None) if (rank + k) % 4 == 0 else made_late(values)  # behind what makes out
    try:
        done = await group.all_reduce(x, out=out, timeout=60, stream=stream, **MODE)
    except (zbmd.InputsOverwritten, zbmd.PeerLost):
        assert isinstance(x, np.ndarray) or np.array_equal(look(x), values), "the caller's own was written"
        raise
    except zbmd.ZbmdError as error:
        raise AssertionError("an operation ended as none should") from error
    given = x if MODE.get("inputs") == "recompute" else out
    own = isinstance(done.value, type(x)) and done.value is not x
    right = own if given is None else done.value is given
    right &= given is x or np.array_equal(look(x), values)
    total = look(done.value)
    return done, [float(total.min()), float(total.max()), right, len(device().registered)]


if __name__ == "__main__":
    run_operations(operate)
