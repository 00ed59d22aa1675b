"""The part of the commit log that steps of a PyTorch loop have beside what any step has.

A loop is the user's: its plan does not say which samples belong to a step. So each rank puts into its vote
what identifies the batch of its step: the indices that a sampler gave, or else the batch's number in the
pass.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from zbmd.transport.errors import RemoteProtocolError

STEP_IDS_MAX: Final = 65_536
"""Sample ids of a step over all ranks: a record of them has less than `ledger.RECORD_BYTES_MAX`."""


class Ids(Enum):
    """The kind of a rank's part of `CommitRecord.shards` in a loop."""

    SAMPLES = "samples"
    """The indices of its samples."""
    DIGEST = "digest"
    """(digest, number) of the indices, which are more than `ids_max`."""
    BATCH = "batch"
    """(pass, batch): the loader has no indices, or none that are integers."""
    NONE = "none"
    """Empty: the step has no batch of `run.batches()`."""


def ids_max(ranks: int) -> int:
    """Return how many sample ids of a step a rank puts into its vote: 65,536 over all ranks."""
    return STEP_IDS_MAX // ranks


class Deal(msgspec.Struct, frozen=True, kw_only=True):
    """The samples that the samplers of a loader deal in one pass.

    samples: different ones. below: their indices are of 0 to `below` - 1. together: each goes to one rank;
    else each rank gets all. again: samples that are dealt a second time, to fill up the last batches.
    left_out: samples that no batch has, since the last one would not be whole.
    """

    samples: int
    below: int
    together: bool
    again: int = 0
    left_out: int = 0


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """The batch of a rank's step. of_pass, batch: its place, from 0; -1: none.

    batches: of a pass of this rank; -1: unknown. deal: None: unknown.
    """

    kind: Ids = Ids.NONE
    of_pass: int = -1
    batch: int = -1
    ids: tuple[int, ...] = ()
    batches: int = -1
    deal: Deal | None = None

    def check(self, ranks: int) -> None:
        """Raise `RemoteProtocolError` for one that no rank of `ranks` sends."""
        count = {Ids.SAMPLES: len(self.ids), Ids.DIGEST: 2, Ids.BATCH: 2, Ids.NONE: 0}[self.kind]
        if len(self.ids) != count or count > max(2, ids_max(ranks)):
            raise RemoteProtocolError(f"{len(self.ids)} ids of kind {self.kind.value!r} came in a vote")


class LoopStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a loop. ids: what the parts of `CommitRecord.shards` are, by logical share of the batch.

    Each rank has one share, unless there are fewer ranks than shares. Others: of the first share.
    """

    ids: tuple[Ids, ...]
    of_pass: int
    batch: int
    batches: int
    deal: Deal | None


class LoopPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan of a loop, in the log's header.

    loop: the classes of its optimizers. model: digest of the names and shapes of its tensors.
    """

    loop: str
    ranks: int
    parameters: int
    model: str

    @classmethod
    def read(cls, text: str) -> LoopPlan | None:
        """Return the plan in a log; None if it is another kind of plan."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    def text(self) -> str:
        """Return the plan as the header has it."""
        return msgspec.json.encode(self, order="deterministic").decode()
