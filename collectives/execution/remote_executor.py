"""The executor of a group with members on other hosts.

It runs the same verified programs with the same stepper, descriptors and checks as `MappedExecutor`. What
that one does in shared memory goes through `RemoteMemory` for a member on another host: its descriptor is
read in the mirror that it puts it into, at the cost of one message with the first notification; its memory is
read by gets; puts and notifications go through the data plane. Members of this host are mapped as ever.

A member lends what an operation exposes for the time of that operation, and nothing else. One that gives up
takes it back before its caller may change it, so what a peer has got is always of the operation.

An eager operation waits for those alone whose input it reads: the root of a broadcast for nobody. Nobody
enters the next operation before all have entered this one, and it is then that those who were not waited for
are found to have called the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from zbmd.collectives.execution.executor import (
    SPINS_REMOTE,
    Executor,
    MappedExecutor,
    Membership,
)
from zbmd.collectives.execution.plan import Plan, Run
from zbmd.collectives.execution.remote_fetch import Driver, Ended, Fetcher, Landings, Staging
from zbmd.collectives.execution.remote_sending import Outgoing, Slots
from zbmd.collectives.execution.remote_walk import Walk, reach
from zbmd.collectives.native._remote_stepper import RemoteGroup
from zbmd.collectives.native._stepper import (
    COUNTER_MAX,
    DESCRIPTOR_HEADER_BYTES,
    STATUS_ABORTED,
    STATUS_DONE,
    STATUS_LOST,
)
from zbmd.collectives.programs.program import INBOX, SCRATCH
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.segment import PeerSegment
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.rdma.remote_memory import RemoteMemory


def make_executor(membership: Membership) -> Executor:
    """Make the executor of a group: a mapped one if all members share memory.

    Raises `LocalProtocolError` if the channel has been used in this epoch.
    """
    if all(isinstance(memory, PeerSegment) for memory in membership.others.values()):
        return MappedExecutor(membership)
    return RemoteExecutor(membership)


SentT = TypeVar("SentT")
_WORD_BYTES = 8
_WITHDRAWN_OFFSET = 8


class RemoteExecutor(Executor):
    """See `Executor`."""

    def __init__(self, membership: Membership) -> None:
        others, segment = membership.others, membership.segment
        near = {i: memory for i, memory in others.items() if isinstance(memory, PeerSegment)}
        self._remote = {i: memory for i, memory in others.items() if isinstance(memory, RemoteMemory)}
        group = membership.native(
            RemoteGroup,
            {i: near[i].base if i in near else 0 for i in others},
            spins=SPINS_REMOTE,
            mirrors={place: memory.descriptors for place, memory in self._remote.items()},
        )
        super().__init__(group, membership)
        self._group = group
        self._channel = channel = membership.channel
        planes = {id(memory.plane): memory.plane for memory in self._remote.values()}
        self._driver = Driver(next(iter(planes.values()), None))
        self._all_by_plane = len(self._remote) == len(others) and len(planes) == 1
        """Nothing comes but by the plane that is driven."""
        self._landings = Landings(
            segment, group, self._driver, channel=channel, epoch=self.epoch, spins=SPINS_REMOTE
        )
        self._staging = Staging()
        self._outgoing = Outgoing()
        self._slots = Slots(segment, group, members=len(self.members), place=self.place, remote=self._remote)
        self._gone: set[int] = set()
        """Places of members that could not be reached any more."""

    @property
    def eager_bytes_max(self) -> int:
        """See `Executor.eager_bytes_max`."""
        return self._slots.payload_max

    @property
    def far(self) -> bool:
        """See `Executor.far`."""
        return True

    def abort(self) -> None:
        """See `Executor.abort`."""
        super().abort()
        self._driver.wake()

    def give_up(self) -> None:
        """See `Executor.give_up`."""
        super().give_up()
        for place, memory in self._remote.items():
            self._try(place, partial(memory.notify, self._channel, self.epoch << 32 | COUNTER_MAX))

    def release(self) -> None:
        """See `Executor.release`."""
        super().release()
        self._staging = Staging()
        self._outgoing = Outgoing()
        self._slots.release()

    def lost_places(self) -> list[int]:
        gone = {place for place in self._gone if not self._group.has_closed(place)}
        return sorted({*super().lost_places(), *gone})

    def _execute(self, run: Run, *, deadline_ns: int, kill_point: int) -> int:
        group, plan = self._group, run.plan
        self._addresses[SCRATCH] = self._slots.told

        def begin() -> None:
            group.begin(plan.native, run, self._addresses, self._scratch)

        if plan.eager:
            walk = partial(self._walk_eagerly, plan, deadline_ns)
            return self._carry_out(plan, begin, walk, deadline_ns, kill_point)
        fetcher = Fetcher(plan, group, self._remote, self._landings, self._staging, deadline_ns)
        lent: list[RegionHandle] = []

        def begin_and_lend() -> None:
            begin()
            self._lend(plan, lent)

        whole = partial(self._walk, run, fetcher, deadline_ns)
        return self._carry_out(plan, begin_and_lend, whole, deadline_ns, kill_point, fetcher.asked, lent)

    def resume(self, plan: Plan, deadline_ns: int, kill_point: int) -> int:
        """Run an eager plan whose arguments the fast path has filled in; returns a STATUS. Raises nothing."""
        group = self._group
        try:
            return self._carry_out(
                plan,
                lambda: group.resume(plan.native),
                partial(self._walk_eagerly, plan, deadline_ns),
                deadline_ns,
                kill_point,
            )
        except Exception as error:  # noqa: BLE001 -- `Communicator.fast_path_failed` raises it
            self.raised = error
            return STATUS_ABORTED

    def _carry_out(
        self,
        plan: Plan,
        begin: Callable[[], None],
        walk: Callable[[int], int],
        deadline_ns: int,
        kill_point: int,
        asked: Mapping[int, Iterable[Transfer]] = MappingProxyType({}),
        lent: Iterable[RegionHandle] = (),
    ) -> int:
        """Begin, enter, meet those that are needed, and `walk`. asked: gets of ours, by place.

        lent: what others may reach of our memory meanwhile, as `begin` has lent it.
        """
        group = self._group
        if kill_point == 0:
            group.die()
        status = STATUS_ABORTED
        try:
            with self._driver.driving():
                status = self._catch_up(deadline_ns)
                if status == STATUS_DONE:
                    status = STATUS_ABORTED
                    begin()
                    self._enter(plan, kill_point)
                    self._driver.until(group.all_are_here, far=self._all_by_plane)
                    status = group.meet(plan.native, deadline_ns)
                if status == STATUS_DONE:
                    status = STATUS_ABORTED
                    self._slots.learn()
                    group.may_lag = True
                    status = walk(kill_point)
        except Ended as ended:
            status = ended.status
            if ended.gone is not None:
                self._gone.add(ended.gone)
            if status == STATUS_LOST and not self.lost_places():
                status = STATUS_ABORTED  # who could not be reached had closed the group
        finally:
            for handle in lent:  # before copies are made of what is served: what is asked for now is refused
                self._segment.regions.take_back(handle)
            if status != STATUS_DONE:
                self._driver.leave()
                self._withdraw(asked)
        if status == STATUS_DONE and kill_point == plan.kill_points - 1:
            group.die()
        return status

    def _catch_up(self, deadline_ns: int) -> int:
        """Wait for those that the last operation did not need: what it told them is overwritten next."""
        group = self._group
        if not group.lags:
            return STATUS_DONE
        self._driver.until(group.has_caught_up, far=self._all_by_plane)
        return group.catch_up(deadline_ns)

    def _walk_eagerly(self, plan: Plan, deadline_ns: int, kill_point: int) -> int:
        """All that it reads came with the descriptors."""
        return self._group.walk(plan.native, kill_point, deadline_ns)

    def _walk(self, run: Run, fetcher: Fetcher, deadline_ns: int, kill_point: int) -> int:
        group = self._group
        Walk(
            run.plan,
            group,
            fetcher,
            self._outgoing,
            driver=self._driver,
            remote=self._remote,
            channel=self._channel,
            dtype=run.dtype,
            deadline_ns=deadline_ns,
            kill_index=kill_point - len(self.members) if kill_point >= len(self.members) else -1,
        ).run()
        return group.finish(run.plan.native)

    def _lend(self, plan: Plan, lent: list[RegionHandle]) -> None:
        """Let the members on other hosts reach what this operation exposes."""
        regions, mapping = self._segment.regions, self._segment.mapping
        for buffer in plan.exposed:
            offset, nbytes = self._group.own_extent(plan.native, buffer)
            if offset and nbytes:
                array = np.asarray(mapping.view(offset, nbytes))
                lent.append(regions.lend(array, offset, writable=False))
        if plan.program.inbox_slots:
            offset, nbytes = self._group.own_extent(plan.native, INBOX)
            if nbytes:
                lent.append(regions.lend(self._inbox[:nbytes], offset, writable=True))

    def _enter(self, plan: Plan, kill_point: int) -> None:
        """Tell every member of our descriptor."""
        group = self._group
        told = group.descriptor(plan.native)
        for k in range(1, len(self.members)):
            if kill_point == k:
                group.die()
            place = (self.place + k) % len(self.members)
            value = group.tell(place)
            memory = self._remote.get(place)
            if memory is not None:
                self._try(place, partial(self._tell, plan, place, memory, told, value))
        if self._gone and self.lost_places():
            raise Ended(STATUS_LOST)

    def _withdraw(self, asked: Mapping[int, Iterable[Transfer]]) -> None:
        """The operation has failed here: let go of all memory, and say so to those who count on it."""
        group = self._group
        group.withdraw()
        word = group.word.to_bytes(_WORD_BYTES, "little")
        at = group.descriptor_offset + _WITHDRAWN_OFFSET
        told: list[tuple[RemoteMemory, Transfer]] = []
        for place, memory in self._remote.items():
            memory.let_go(asked.get(place, ()))
            # A notification that is not awaited: the cell holds what it holds.
            put = self._try(place, partial(self._tell_withdrawn, place, memory, at, word))
            if put is not None and memory.one_sided:
                told.append((memory, put))
        # A member that reads our memory without us cannot be refused. It looks for this word after it has
        # read all: once it has the word, or is cut off, nobody takes what the caller changes for a result.
        for memory, put in told:
            memory.let_go((put,))

    def _tell(self, plan: Plan, place: int, memory: RemoteMemory, told: bytes, value: int) -> Transfer:
        """Put our descriptor where the member at `place` reads it, with what that reads of our input."""
        group, at, nbytes = self._group, 0, 0
        if plan.eager:
            chunks = plan.sent[place]
            at, nbytes = group.published_extent(plan.native, chunks.start, chunks.stop)
        if group.wide:
            return self._slots.send(place, at, nbytes, channel=self._channel, value=value)
        # What is so short travels with what lies before it.
        data = told[: DESCRIPTOR_HEADER_BYTES + (at + nbytes if nbytes else 0)]
        if not memory.one_sided:
            return memory.describe(group.descriptor_offset, data, channel=self._channel, value=value)
        kept = self._outgoing.take(len(data))  # which the device knows
        copy = kept.array[: len(data)]
        copy[:] = np.frombuffer(data, np.uint8)
        kept.transfer = memory.describe(group.descriptor_offset, copy, channel=self._channel, value=value)
        return kept.transfer

    def _tell_withdrawn(self, place: int, memory: RemoteMemory, at: int, word: bytes) -> Transfer:
        """Have the member at `place` find there that we have given the operation up."""
        if self._group.wide:
            return self._slots.put(place, at, len(word), channel=self._channel, value=0)
        return memory.describe(at, word, channel=self._channel, value=0)

    def _try(self, place: int, send: Callable[[], SentT]) -> SentT | None:
        """Send something to a member on another host, whose end ends none of what we do for the others."""
        try:
            return reach(place, send)
        except Ended:
            self._gone.add(place)
            return None
