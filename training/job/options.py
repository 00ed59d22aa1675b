"""The options of a job, beside those of the training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.index import KEEP, Retention
from zbmd.training.checkpoint.pace import Every
from zbmd.training.checkpoint.storage import Storage, storage_of
from zbmd.training.job.stragglers.policy import OnStraggler
from zbmd.training.redundancy.coded.machine import Code


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Work of a job beside training, in the directory `out`. `*_every`: in steps, 0: only at the end.

    resume: a checkpoint to go on from. checkpoints: whether the state can be written to one. checkpoint_to: a
    directory or URL for them; empty: `out`. retention, codec: which are kept, and how they are written.
    hosts: of the job.
    replicas: whether ranks along `dp` stand for each other, so that no buddies have copies. files: whether
    states are in files. code: of parities in the place of copies. on_straggler: what is done about a slow
    rank.
    """

    out: Path
    resume: Path | None = None
    evaluate_every: int = 0
    checkpoint_every: Every = 0
    checkpoints: bool = True
    checkpoint_to: str = ""
    retention: Retention = KEEP
    codec: Codec = Codec.NONE
    hosts: int = 1
    tensorboard: bool = False
    replicas: bool = False
    files: bool = False
    code: Code | None = None
    on_straggler: OnStraggler = OnStraggler.WARN

    @property
    def storage(self) -> Storage:
        """Return where checkpoints are written: in `out`, unless `checkpoint_to` names a place."""
        return storage_of(self.checkpoint_to or self.out)
