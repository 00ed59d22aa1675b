"""Checkpoints of a run, written beside the steps that follow them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zbmd.collectives.group.group import Group
from zbmd.training.checkpoint.index import remove_unnamed
from zbmd.training.checkpoint.sharded import WRITTEN_POINT, Piece, name_written, stem_of, write_shard_of
from zbmd.training.checkpoint.storage import Directory
from zbmd.transport import kill_points as faults


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A checkpoint whose shards are being written. wrote: the digest of this rank's, once that is durable."""

    version: int
    stem: str
    is_first: bool
    loss_scale: tuple[float, ...]
    wrote: Future[str]


class Checkpoints:
    """Writes the checkpoints of a run into `directory`, which all ranks share. For the training thread.

    A thread writes this rank's shard from the memory of the state: the slot of a version is as it was until
    the second step after it begins to overwrite it. Until a checkpoint has ended, the previous one counts.
    """

    def __init__(self, directory: Path, plan: str) -> None:
        self._storage, self._plan = Directory(directory), plan
        self._pending: _Pending | None = None
        self._pool = ThreadPoolExecutor(1, "zbmd-checkpoint")

    @property
    def pending(self) -> int | None:
        """Return the version whose checkpoint was begun and has not ended."""
        return None if self._pending is None else self._pending.version

    def begin(
        self, world: Group, pieces: Sequence[Piece], *, version: int, loss_scale: tuple[float, ...]
    ) -> None:
        """Begin to write this rank's `pieces`, possibly none; all members together. Raises as the group."""
        assert self._pending is None, "one at a time"
        token = np.array([secrets.randbits(64) if world.rank == 0 else 0], np.uint64)
        stem = stem_of(version, int(world.blocking.broadcast(token, 0)[0]))
        wrote = self._pool.submit(write_shard_of, self._storage, stem, world.rank, pieces)
        self._pending = _Pending(
            version=version, stem=stem, is_first=world.rank == 0, loss_scale=loss_scale, wrote=wrote
        )

    def end(self, world: Group) -> None:
        """Wait until all shards are written, and name them; all members together.

        Raises `UserError` for a full disk and a directory that is not shared, and as the group does.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            wrote = pending.wrote.result()
            faults.hit(WRITTEN_POINT)
            mine = np.array([bool(wrote), int(wrote or "0", 16)], np.uint64)
            every = world.blocking.all_gather(mine).tolist()
            if pending.is_first:
                name_written(
                    self._storage,
                    pending.stem,
                    {place: f"{digest:016x}" for place, (has, digest) in enumerate(every) if has},
                    version=pending.version,
                    plan=self._plan,
                    loss_scale=pending.loss_scale,
                )
        except BaseException:
            self.abandon()
            raise
        self._pending = None

    def abandon(self) -> None:
        """Drop a checkpoint that has not ended, once nothing reads the state any more."""
        pending, self._pending = self._pending, None
        if pending is not None:
            wait([pending.wrote])
            if pending.is_first:
                remove_unnamed(self._storage, pending.stem)

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown()
