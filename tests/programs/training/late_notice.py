"""`zbmd` with these arguments. Rank 0 hears of the end of rank 1 again, once it has been replaced."""

from __future__ import annotations

import os
import sys

from zbmd.actors.view import View
from zbmd.tools.entry import zbmd
from zbmd.training.job.job import Job
from zbmd.training.job.mesh import MeshGroups
from zbmd.transport.shm.death_notice import DeathNotice

make = Job._make_groups


async def make_late(self: Job[object], view: View) -> MeshGroups | None:
    other = view.member(1)
    if os.environ["RANK"] == "0" and other is not None and other.incarnation == 2:
        print("rank 0 hears of it late", flush=True)
        for callback in list(self._worker._callbacks.peer_lost):
            callback(1, 1, DeathNotice(at_ns=0, clean=False))
    return await make(self, view)


Job._make_groups = make_late  # type: ignore[method-assign]
sys.exit(zbmd.main())
