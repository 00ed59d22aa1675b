"""State in a file that outlives its rank: the driver of the redundancy machine without replicas.

There is no buddy: the replacement of a killed rank, on the same host, opens its predecessor's file. All ranks
may therefore be killed at once, and one copy of the state is enough; but the files of a lost host are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group, hosts_of
from zbmd.training.autograd.array_module import Array
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.interface import Digests, ProtectedState, RedundancyDriver
from zbmd.training.redundancy.stamped import NO_VERSION, Note
from zbmd.training.redundancy.state_file import StateFile
from zbmd.training.step.step_hook import Vote
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

STAMP_POINT = faults.declare("file.stamp", "when the next version is written, before it is stamped whole")
STAMPED_POINT = faults.declare("file.stamped", "when it is")


class SegmentedState(ProtectedState, Protocol):
    """A state that is visited in parts, always in one order."""

    def parts_in(self, slot: int) -> Iterable[Sequence[Array]]:
        """Yield views that together are all of a slot."""
        ...


class FileRedundancy(RedundancyDriver):
    """`Redundancy` of what `own` holds, at `place` of `ranks`, by `file`, where its slots lie.

    `known`: the highest version known to be committed. `note`: returns what the file records of a completed
    step, for the case that all ranks are killed at once.
    """

    def __init__(
        self,
        worker: Worker,
        own: SegmentedState,
        file: StateFile,
        *,
        place: int,
        ranks: int,
        known: int,
        on_update: Callable[[Any], None],
        on_commit: Callable[[int, Digests], None],
        note: Callable[[Any], Note],
    ) -> None:
        self._file, self._parted, self._note = file, own, note
        for slot in range(zm.SLOTS):
            file.drop_damaged(slot, own.parts_in(slot))
        held = (file.version_in(0), file.version_in(1))
        machine = zm.Mirror(place=place, ranks=ranks, known=known, first=own.first, own=held, outlives=True)
        super().__init__(worker, own, machine, outlives=True, on_update=on_update, on_commit=on_commit)

    def meet(
        self, group: Group, keys: Sequence[int] = (), known: int = 0, *, everyone: Group | None = None
    ) -> int:
        """See `Redundancy`. Nobody reads another's file: to this rank all shards differ."""
        self._group = group
        held = self._machine.report(known)
        mine = [NO_VERSION if version is None else version for version in held.own]
        every = group.blocking.all_gather(np.array([*mine, held.known, held.first], np.int64))
        entered = zm.Entered(
            held=tuple(_held(row) for row in every.tolist()),
            hosts=hosts_of(group.view, group.members),
            place=group.rank,
        )
        self._perform(self._handle(entered))
        return self._machine.version

    def epoch_over(self) -> None:
        """See `Redundancy`."""
        if self._machine.state is not zm.State.FAILED:
            self._handle(zm.EpochOver())

    def vote(self) -> Vote:
        """See `StepHook`."""
        digest = self._file.digest_in(self._own.slot)
        return self.asked.vote(digest, digest)

    def voted(self, votes: Sequence[Vote]) -> None:
        """See `StepHook`. An update follows, so the slot that it overwrites is no longer complete."""
        super().voted(votes)
        self._file.begin((self._machine.version + 1) % zm.SLOTS)

    def updated(self, done: Any) -> None:
        """See `StepHook`."""
        version = self._machine.version + 1
        faults.hit(STAMP_POINT)
        self._file.written(version % zm.SLOTS, version, self._note(done))
        faults.hit(STAMPED_POINT)
        super().updated(done)

    def _start_anew(self) -> None:
        first = self._parted.first
        slot = first % zm.SLOTS
        self._file.begin(slot)
        super()._start_anew()
        for part in self._parted.parts_in(slot):
            self._file.wrote(part)
        self._file.written(slot, first)

    def _keep(self, version: int) -> None:
        self._perform(self._handle(zm.AllHold(version=version)))

    def _restore(self, version: int, source: zm.Source) -> zm.Restored:
        raise LocalProtocolError("state in files has no copies")

    def _start_copy(self, work: zm.CopyWard) -> None:
        raise LocalProtocolError("state in files has no copies")


def _held(row: Sequence[int]) -> zm.Held:
    """Return what a member reports. Raises `RemoteProtocolError`."""
    own = [None if version == NO_VERSION else int(version) for version in row[: zm.SLOTS]]
    known, first = row[zm.SLOTS :]
    if (
        any(v is not None and (v < 0 or v % zm.SLOTS != slot) for slot, v in enumerate(own))
        or not 0 <= first <= known
    ):
        raise RemoteProtocolError(f"a rank reports that it holds {row}, which are not versions by slot")
    return zm.Held(own=(own[0], own[1]), known=known, copies=(None, None), first=first)
