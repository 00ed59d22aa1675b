"""The interface between a job and its redundancy, and what both drivers share.

There are three: a replica at a buddy rank (`buddy`), parities at others (`coded`), and a file of the rank's
own (`file`). All drive one machine (`machine`), or one that extends it.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntFlag
from typing import Any, Generic, Protocol, TypeVar, assert_never, runtime_checkable

import numpy as np

from zbmd.actors.rank.member import ComingView, Worker
from zbmd.actors.view import View
from zbmd.collectives.group.group import Group
from zbmd.training.autograd.array_module import Array
from zbmd.training.checkpoint.saving import Progress, Report
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy import resizing
from zbmd.training.redundancy.coded.machine import CODED_MIRROR, CodedMirror, coded_config
from zbmd.training.redundancy.cut_events import Divide, Forget, Lend, Lent, Reshard, Resharded, Resharding
from zbmd.training.redundancy.failures import FailureKind, StepFailed
from zbmd.training.redundancy.machine import MIRROR, mirror_config
from zbmd.training.redundancy.resizing import RESIZING_MIRROR, ResizingMirror, resizing_config
from zbmd.training.run.journal import captured_machine
from zbmd.training.step.step_hook import StepHook, Vote
from zbmd.transport import kill_points as faults
from zbmd.transport.capture.tap import ThreadTap
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.native._native import now_ns
from zbmd.transport.shm.death_notice import DeathNotice

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class JobEnd(Generic[ResultT]):
    """The job has ended on this rank."""

    result: ResultT | None


Following = asyncio.Task[ComingView]
"""The next view, which is done when it may be entered."""


async def through_epochs(
    worker: Worker,
    epoch: Callable[[View | None, Following | None], Awaitable[JobEnd[ResultT] | None]],
    fits: Callable[[Sequence[int]], bool] = lambda _: False,
) -> ResultT | None:
    """Call `epoch` with each view that can train, until it returns the end of the job; return its result.

    Those are the views of all ranks, and of ranks that `fits` the job. `epoch` is called with None for
    another view, in which the groups of the previous one must be left, and with the view that will follow:
    once that is there, all members may leave this one, between two steps.
    Raises `StepFailed` if ranks are lost and will not be replaced.
    """
    coming = await worker.coming_view(after=0)
    following: asyncio.Task[ComingView] | None = None
    try:
        while True:
            view = worker.enter(coming)
            if not worker.alone:
                following = asyncio.ensure_future(worker.coming_view(after=view.epoch))
            use = use_of(view, worker.world_size, fits)
            ended = await epoch(view if use is ViewUse.TRAIN else None, following)
            if use is ViewUse.END:
                return None
            if ended is not None:
                return ended.result
            coming = await (worker.coming_view(after=view.epoch) if following is None else following)
    finally:
        if following is not None:
            following.cancel()
            await asyncio.wait([following])


async def spare_until(
    worker: Worker,
    following: Following,
    active: Sequence[int],
    *,
    asked: asyncio.Event,
    stops: Callable[[], bool],
) -> bool:
    """Wait for the next view, in one that does not need this rank; return whether the run is over instead.

    That is so once it `stops` and the `active` ranks have ended: a launcher that stops its job forms no view.
    asked: set when this rank was asked for something.
    """
    gone = set[int]()

    def lost(rank: int, _incarnation: int, _notice: DeathNotice) -> None:
        gone.add(rank)
        asked.set()

    undo = worker.on_peer_lost(lost)
    try:
        while not following.done():
            mask = worker.segment.lost_mask()
            if stops() and all(rank in gone or mask >> rank & 1 for rank in active):
                return True
            asked.clear()
            waiting = asyncio.ensure_future(asked.wait())
            await asyncio.wait({waiting, following}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        return False
    finally:
        undo()


class ViewUse(Enum):
    """The job's action on a view."""

    TRAIN = "train"
    WAIT = "wait"
    """For more members."""
    END = "end"
    """A member has left, and nobody leaves before what the job makes is on disk."""


def use_of(view: View, world_size: int, fits: Callable[[Sequence[int]], bool]) -> ViewUse:
    """Return what a job of `world_size` ranks does with a view.

    Raises `StepFailed` if its members are too few, and the others will not come.
    """
    if view.finished:
        return ViewUse.END
    if len(view.members) == world_size or fits(view.ranks):
        return ViewUse.TRAIN
    if view.lost:
        lost = ", ".join(map(str, view.lost))
        raise StepFailed(
            FailureKind.STATE_LOST,
            f"rank {lost} is lost and will not be replaced, and the state is cut for {world_size}: "
            "run with --on-loss replace",
        )
    return ViewUse.WAIT


PREPARED_POINT = faults.declare("mirror.prepared", "when a replica has the next version, before it votes")
COMMIT_POINT = faults.declare("mirror.commit", "when all copies of a version are voted for")

Digests = tuple[int, ...]
"""Digests of all ranks' shards of one version, in rank order."""


class ProtectedState(Protocol):
    """The state of one rank, in two slots: version v lies in slot v % SLOTS. Peers can read them."""

    slots: list[Array]
    """1-D, of one length and dtype."""
    slot: int
    """The one in use."""
    first: int
    """The version that it can begin with: 0, or that of a checkpoint."""

    def begin_anew(self) -> None:
        """Take the state of version `first`, in its slot."""
        ...


@runtime_checkable
class DeviceState(ProtectedState, Protocol):
    """A state that a device holds, and whose slots are copies of it, which are written beside the step.

    Any thread may call its methods.
    """

    def settle(self) -> None:
        """Return once the slot in use holds what the device does. Raises `CudaFault`."""
        ...

    def digest_of(self, flat: Array) -> int:
        """Return the digest of a slot, or of a copy of one, as the device computes it."""
        ...

    def digest_in_use(self) -> int:
        """Return the digest of what the device holds, computed there; settles."""
        ...


class SegmentedState(ProtectedState, Protocol):
    """A state that is visited in parts, always in one order."""

    def parts_in(self, slot: int) -> Iterable[Sequence[Array]]:
        """Yield views that together are all of a slot."""
        ...


@runtime_checkable
class ResizableState(SegmentedState, Protocol):
    """A part of a state that is recut for each number of ranks."""

    def reshard(self, parts: int) -> Resharding:
        """Return what of the slots of another cut, into `parts`, makes up a slot of this one."""
        ...


class Wish(IntFlag):
    """Work that a rank asks all ranks for, after the step that is under way."""

    NOTHING = 0
    SAVE = 1
    STOP = 2
    CHECKPOINT = 4
    """Begin a checkpoint; nothing waits for it."""
    UNHELD = 8
    """No wish: no snapshot process can write the next checkpoint in the place of this rank."""


@dataclass(slots=True)
class Agenda:
    """The contents of a vote beside digests. epoch: of a view that could be entered, 0 for none.

    saved: each rank's part in the checkpoint under way. Before a vote: this rank's own alone; after it: the
    least epoch, all wishes and all parts, on all ranks alike.
    """

    epoch: int = 0
    wishes: Wish = Wish.NOTHING
    saved: tuple[Report, ...] = (Report(),)

    def vote(self, own: int, copied: int) -> Vote:
        """Return a vote for two digests, with what this rank asks for."""
        (saved,) = self.saved
        numbers = [own, copied, self.epoch, self.wishes, saved.progress, saved.header]
        return np.array(numbers, np.uint64)

    @classmethod
    def agreed(cls, votes: Sequence[Vote]) -> Agenda:
        """Return what all ranks do, given all their votes."""
        wishes = Wish.NOTHING
        for vote in votes:
            wishes |= Wish(int(vote[3]) & (Wish.SAVE | Wish.STOP | Wish.CHECKPOINT | Wish.UNHELD))
        saved = tuple(Report(Progress(int(vote[4])), int(vote[5])) for vote in votes)
        return cls(min(int(vote[2]) for vote in votes), wishes, saved)


def digests_in(votes: Sequence[Vote]) -> zm.Voted:
    """Return the machine's event for all ranks' votes."""
    return zm.Voted(votes=tuple((int(vote[0]), int(vote[1])) for vote in votes))


class Redundancy(StepHook, Protocol):
    """Keeps what one rank alone holds, so that it survives the end of that rank. For the training thread."""

    asked: Agenda
    """Requests for the next vote of this rank; written by any thread."""
    agreed: Agenda
    """The result of the last vote."""
    on_overwrite: Callable[[int], None]
    """Called with a slot before an update writes it; returns once nothing copies it for a checkpoint."""

    def meet(
        self, group: Group, keys: Sequence[int] = (), known: int = 0, *, everyone: Group | None = None
    ) -> int:
        """Agree with all members of a new epoch on the version to continue from, and hold it.

        keys: of all members' shards, in the order of ranks; empty: all differ. known: the highest version
        that is logged, or that any member saw committed, as far as the caller knows. everyone: the group
        with those beside that wait, if these attend (`attend`).

        Raises `StepFailed` if the state is lost, `PeerLost` and `OperationAborted` as the group does.
        """
        ...

    def attend(self, everyone: Group, active: Sequence[int], known: int = 0) -> int:
        """Report what this rank holds while the ranks `active` of `everyone` meet; return their version.

        Only of a state that is recut. Raises as `meet`.
        """
        ...

    def epoch_over(self) -> None:
        """Return once nothing of this epoch is running."""
        ...

    def settle(self) -> None:
        """Protect the last version, after which no step follows; called by all ranks together. Raises as a
        step does.
        """
        ...

    def close(self) -> None:
        """Stop the threads."""
        ...


class RedundancyDriver(Redundancy):
    """The common part of the machine's drivers: its votes, its commits, and its failures.

    `on_update`: called with each step whose update is done here; `on_commit`: with each version that is safe,
    and its digests. `outlives`: as of `Mirror`.
    """

    def __init__(
        self,
        worker: Worker,
        own: ProtectedState,
        machine: zm.Mirror | ResizingMirror,
        *,
        outlives: bool,
        on_update: Callable[[Any], None],
        on_commit: Callable[[int, Digests], None],
    ) -> None:
        if len(own.slots) != zm.SLOTS:
            raise LocalProtocolError(f"expected {zm.SLOTS} slots of state")
        self._own, self._resizing = own, machine if isinstance(machine, ResizingMirror) else None
        self._tap: ThreadTap[Any, Any]
        if isinstance(machine, ResizingMirror):
            self._machine, config = machine.mirror, resizing_config(machine)
            self._tap = captured_machine(worker, RESIZING_MIRROR, "mirror", machine, config)
        else:
            self._machine, config = machine, mirror_config(machine, outlives=outlives)
            if isinstance(machine, CodedMirror):
                self._tap = captured_machine(worker, CODED_MIRROR, "mirror", machine, coded_config(machine))
            else:
                self._tap = captured_machine(worker, MIRROR, "mirror", machine, config)
        self._on_update, self._on_commit = on_update, on_commit
        self.on_overwrite = lambda _: None
        self.applies_first, self.is_copied = self._machine.applies_first, self._machine.copied
        self.asked, self.agreed = Agenda(), Agenda()
        self._group: Group | None = None

    def settle(self) -> None:
        """See `Redundancy`."""
        if self.applies_first:
            return  # it was voted for when it was made
        assert self._group is not None, "a version is kept in an epoch"
        self._settle()
        blocking = self._group.blocking
        blocking.barrier()
        self._keep(self._machine.version)
        self.voted(list(blocking.all_gather(self.vote())))

    def _settle(self) -> None:
        """Return once the slots hold the versions that peers know: a device's are copied beside steps."""
        if isinstance(self._own, DeviceState):
            self._own.settle()

    def attend(self, everyone: Group, active: Sequence[int], known: int = 0) -> int:
        """See `Redundancy`."""
        raise LocalProtocolError("this state is cut for good: those meet who train")

    def all_hold(self, version: int) -> None:
        """See `StepHook`."""
        self._tap.mark(version + 1)
        self._keep(version)

    def overwrites(self) -> None:
        """See `StepHook`. Until here both versions are whole."""
        slot = (self._machine.version + 1) % zm.SLOTS
        self.on_overwrite(slot)
        self._begin_slot(slot)

    def prepared(self) -> None:
        """See `StepHook`."""
        self._tap.mark(self._machine.version + 1)
        self._perform(self._handle(zm.Updated()))
        faults.hit(PREPARED_POINT)

    def voted(self, votes: Sequence[Vote]) -> None:
        """See `StepHook`. Raises `StepFailed` if a replica differs from its original."""
        self.agreed = Agenda.agreed(votes)
        self._perform(self._handle(digests_in(votes)))

    def updated(self, done: Any) -> None:
        """See `StepHook`."""
        if not self.applies_first:
            self._perform(self._handle(zm.Updated()))
        self._on_update(done)

    def close(self) -> None:
        """See `Redundancy`."""
        self._tap.close("closed")

    # ---- the machine

    def _handle(self, event: zm.Event | resizing.Event) -> list[resizing.Action]:
        return self._tap.handle(event, now_ns=now_ns())

    def _perform(self, actions: list[resizing.Action]) -> None:
        for action in actions:
            match action:
                case zm.Restore(version=version, source=source):
                    self._perform(self._handle(self._restore(version, source)))
                case zm.StartAnew():
                    self._start_anew()
                case zm.Resume(version=version):
                    self._own.slot = version % zm.SLOTS
                case zm.CopyWard():
                    self._start_copy(action)
                case Divide():
                    self._divide(action)
                case Reshard():
                    self._perform(self._handle(self._reshard(action)))
                case Lend():
                    self._perform(self._handle(self._lend(action)))
                case Forget():
                    self._forget()
                case zm.Commit(version=version, digests=digests):
                    faults.hit(COMMIT_POINT)
                    self._on_commit(version, digests)
                case zm.Fail(lost=lost, reason=reason):
                    raise StepFailed(FailureKind.STATE_LOST if lost else FailureKind.DIVERGED, reason)
                case _:
                    assert_never(action)

    def _start_anew(self) -> None:
        self._own.begin_anew()

    @abstractmethod
    def _begin_slot(self, slot: int) -> None:
        """Mark a slot as incomplete, where it outlives this rank."""

    @abstractmethod
    def _keep(self, version: int) -> None:
        """Protect `version`, which all ranks hold."""

    @abstractmethod
    def _restore(self, version: int, source: zm.Source) -> zm.Restored:
        """Pull this rank's shard from its replica."""

    @abstractmethod
    def _start_copy(self, work: zm.CopyWard) -> None:
        """Start to copy the ward's shard."""

    def _divide(self, work: Divide) -> None:
        """Make memory for another part of the state."""
        raise LocalProtocolError(f"{work}: this state is cut for good")

    def _reshard(self, work: Reshard) -> Resharded:
        """Read the own part out of those of another cut."""
        raise LocalProtocolError(f"{work}: this state is cut for good")

    def _lend(self, work: Lend) -> Lent:
        """Compute the digests of what others read here."""
        raise LocalProtocolError(f"{work}: this state is cut for good")

    def _forget(self) -> None:
        """Give the memory of the cut before back."""
