"""Places in a resilient loop at which a test kills a rank. Imported before ranks join: nothing of PyTorch."""

from __future__ import annotations

from typing import Final

from zbmd.transport import kill_points as faults

BEGIN: Final = faults.declare("loop.begin", "when a step of a resilient loop has begun")
PREPARED: Final = faults.declare("loop.prepared", "when its gradients are whole, before the vote")
DELIVERED: Final = faults.declare(
    "loop.delivered", "when the gradients of the ward are here, before the vote"
)
MIRRORING: Final = faults.declare(
    "loop.mirroring", "when ranks know how long the updated parts are that they mirror, before those are sent"
)
VOTED: Final = faults.declare("loop.voted", "when all votes have been seen, before the update")
LOGGED: Final = faults.declare("loop.logged", "when the writer has logged the step, before the update")
UPDATING: Final = faults.declare(
    "loop.updating", "when an optimizer whose updates are mirrored begins to update, before the vote"
)
UPDATED: Final = faults.declare(
    "loop.updated", "when the optimizer has updated, and the copy of the ward's shard"
)
DONE: Final = faults.declare("loop.done", "when a step has ended")
GROWS: Final = faults.declare(
    "loop.grows", "when all ranks have agreed to take in others, before one gives its groups up"
)
COMES: Final = faults.declare(
    "loop.comes",
    "when a newcomer's or replacement's script has come to its loop, before it meets the others",
)
MEET: Final = faults.declare("loop.meet", "when survivors have met again, before state moves")
GIVE: Final = faults.declare("loop.give", "when a survivor has sent half of its state to a replacement")
TAKE: Final = faults.declare("loop.take", "when a replacement has received its state")
DIVIDED: Final = faults.declare(
    "loop.divided", "when a rank has its part of a state that is divided again, before all agree"
)
AGREED: Final = faults.declare("loop.agreed", "when all have their parts, before this rank adopts its own")
HELD: Final = faults.declare(
    "loop.held", "when a committed step begins to be copied to memory that outlives its rank"
)
HELD_WHOLE: Final = faults.declare("loop.held_whole", "when that copy is whole")
RECALLED: Final = faults.declare(
    "loop.recalled", "when a rank has its state from that memory, before the others know"
)
