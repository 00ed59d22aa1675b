"""The training job, in which a vote of rank 2 is lost; argv: the job's."""

from __future__ import annotations

import runpy

from zbmd.collectives.commit import events as cm
from zbmd.collectives.commit.driver import CommitDriver, SendAction

send = CommitDriver._send


async def lossy(self: CommitDriver, action: SendAction) -> None:
    if isinstance(action, cm.SendVote) and (self._worker.rank, action.to, action.version) == (2, 0, 3):
        return
    await send(self, action)


CommitDriver._send = lossy
runpy.run_module("zbmd.training", run_name="__main__", alter_sys=True)
