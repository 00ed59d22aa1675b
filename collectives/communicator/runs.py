"""What every operation of a communicator passes through: its turn, the flight recorder, the end after an
error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import numpy as np

from zbmd.collectives.communicator.algorithm_choice import override_of_environment
from zbmd.collectives.communicator.cost_model import MANY_HOSTS, ONE_HOST, is_far
from zbmd.collectives.communicator.peer_reading import NOT_TRIED, Reading
from zbmd.collectives.communicator.pieces import Job, PieceRunner, Single
from zbmd.collectives.device.arrays_in import Array
from zbmd.collectives.errors import MembersLost, OperationAborted
from zbmd.collectives.execution.executor import a_core_each
from zbmd.collectives.execution.remote_executor import RemoteExecutor, make_executor
from zbmd.collectives.flight._flight import COMPLETE, FAILED
from zbmd.collectives.flight.recorder import FlightLog, FlightRecord
from zbmd.collectives.native._fast_path import FastPath, FastPathCalls, Turnstile
from zbmd.collectives.programs.program import IN, OUT, PUB
from zbmd.transport import kill_points as faults
from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.host.topology.kernel_files import clock_counts_ticks
from zbmd.transport.memory.segment import PeerMemory, Segment
from zbmd.transport.native._native import address_of, now_ns

NO_ROOT: Final = -1
"""What is said as the root of a call that has none."""
_FAST_PATH_BUFFERS = frozenset((OUT, PUB, IN))

OnFlight: TypeAlias = Callable[[FlightRecord, Sequence[Array]], None]
"""Takes an operation as it begins, without results, and again as it ends, with them."""


class Said(NamedTuple):
    """A call's arguments as its caller put them. `root`: a rank of the group, or -1."""

    x: Any
    out: Any
    op: str
    algorithm: str
    root: int


class Runs(FastPathCalls):
    """One member's end of a group in one epoch; see `Communicator`, which adds the operations."""

    def __init__(
        self,
        *,
        segment: Segment,
        peers: Mapping[int, PeerMemory],
        members: tuple[int, ...],
        rank: int,
        epoch: int,
        channel: int,
        hosts: tuple[int, ...] = (),
    ) -> None:
        if hosts and len(hosts) != len(members):
            raise LocalProtocolError(f"hosts are given for {len(hosts)} of the members {members}")
        self._executor = make_executor(
            segment=segment, peers=peers, members=members, rank=rank, epoch=epoch, channel=channel
        )
        self.members = members
        self.rank = rank
        self.epoch = epoch
        self.channel = channel
        self.title = self._executor.title
        self.hosts = hosts
        self.model = MANY_HOSTS if is_far(hosts) else ONE_HOST
        self._override = override_of_environment()
        self.size = len(members)
        self.place = members.index(rank)
        self.flight = FlightLog()
        self._on_flight: OnFlight | None = None
        self.on_fault: Callable[[str], object] | None = None
        """Hears of an operation that failed, but not by the end of a member or an abort."""
        self._segment = segment
        self._runner = PieceRunner(segment, self._executor, self.place)
        self._turnstile = Turnstile()
        self._taught_inbox = self._executor.inbox
        self.reading = NOT_TRIED
        self.fast_path = FastPath(
            self._executor.native,
            self._turnstile,
            self.flight.ring,
            arena_begin=segment.base + segment.nbytes - segment.arena.capacity_bytes,
            arena_end=segment.base + segment.nbytes,
            held=a_core_each(len(members)),
            counts=clock_counts_ticks(),
        )
        if isinstance(self._executor, RemoteExecutor):
            self.fast_path.far = self._executor.resume
        self.fast_path.open = not faults.armed()
        self._ended = ""
        self._closed = False

    @property
    def on_flight(self) -> OnFlight | None:
        """The observer of operations as they begin and end. Setting one closes the fast path."""
        return self._on_flight

    @on_flight.setter
    def on_flight(self, hears: OnFlight) -> None:
        self.fast_path.open = False
        self._on_flight = hears

    def __repr__(self) -> str:
        place = f"epoch {self.epoch} channel {self.channel}"
        return f"<{type(self).__name__} {place}: rank {self.rank} of {self.members}>"

    @property
    def sequence(self) -> int:
        """Runs begun in this epoch; an operation counts once for each of its pieces."""
        return self._executor.sequence

    def has_moved(self, since: int) -> bool:
        """Whether an operation begun when `sequence` was `since` may have written to its arrays."""
        begun = self.sequence - since
        return begun > 1 or (begun == 1 and self._executor.may_have_moved)

    def abort(self) -> None:
        """End the running operation with `OperationAborted`, and every later one; from any thread."""
        self._ended = self._ended or "it was aborted"
        self.fast_path.open = False
        self._executor.abort()

    def give_up(self) -> None:
        """Abort, wait for the running operation to drain, and let the peers know; the memory is kept.

        A peer that waits for this rank, now or later, ends its operation with `OperationAborted`.
        """
        self.abort()
        with self._turnstile:
            self._executor.give_up()

    def close(self) -> None:
        """Abort, wait for the running operation to drain, give back inbox and scratch. Idempotent.

        A peer that waits for this rank, now or later, ends its operation with `OperationAborted`.

        After a loss call it only once the dead are confirmed dead: their last store may still be under way.
        """
        self.abort()
        with self._turnstile:
            if not self._closed:
                self._closed = True
                self._executor.give_up()
                self._executor.release()
                self._close_devices()
                self.fast_path.forget()
                self._taught_inbox = self._executor.inbox

    def _close_devices(self) -> None:
        """A device that has failed has nothing to give back but to the end of the process."""
        with contextlib.suppress(CudaFault):
            self._runner.devices.close()

    def read_peers(self, found: Reading) -> None:
        """From now on members, who were all in a trial, read each other's ordinary arrays, if all there can.

        Where they do already, nothing changes.
        """
        if self.reading.pids:
            return
        self.reading = found
        if found.pids and self.size > 1 and not self._executor.far:
            with self._turnstile:
                self._executor.read_peers([found.pids[member] for member in self.members])

    def kill_at(self, sequence: int, point: int) -> None:
        """Fault injection: this process dies by SIGKILL at `point` of the run numbered `sequence`.

        Points are those of `Plan.kill_points`; `sequence + 1` is the next run.
        """
        self._executor.kill_at(sequence, point)
        self.fast_path.kill_at(sequence, point)

    def always_go(self, way: int) -> None:
        """For tests and benchmarks: as the first rank, have runs go this way (`_program.CACHED` and so on),
        whatever has been timed.
        """
        self._executor.native.always(way)

    def _perform(self, job: Job, deadline_ns: int, said: Said | None = None) -> None:
        """Run a job in turn. `said`: the call behind it, if the fast path may take others like it."""
        with self._turnstile:
            self._perform_in_turn(job, deadline_ns)
            if said is not None and self.fast_path.open and self._runner.single is not None:
                self._teach(said, job, self._runner.single)

    def _perform_in_turn(self, job: Job, deadline_ns: int) -> None:
        if self._ended:
            raise OperationAborted(f"{self!r} has ended: {self._ended}. Use the next view's communicator")
        request, ring, native = job.shape.plan.request, self.flight.ring, self._executor.native
        name = request.operation.name.lower()
        native.meet_anew()
        ring.begin(ring.number(name, request.algorithm), self.sequence + 1, job.nbytes, now_ns())
        if self._on_flight is not None:
            self._on_flight(self.flight[-1], ())
        try:
            self._runner.run(job, deadline_ns)
        except BaseException as error:
            self._give_up(name, error)
            raise
        else:
            if native.reads and job.shape.plan.in_arena is not None:
                ring.renumber(ring.number(name, job.shape.plan.in_arena.request.algorithm))
            ring.end(COMPLETE, native.met_ns, now_ns())
        finally:
            if self._on_flight is not None:
                results = [side.store for side in job.sides if isinstance(side.store, np.ndarray)]
                self._on_flight(self.flight[-1], results)

    def _give_up(self, name: str, error: BaseException) -> None:
        """The operation that has the turn has failed, and with it the communicator."""
        said = str(error) or type(error).__name__
        self.flight.ring.end(FAILED, self._executor.native.met_ns, now_ns(), said)
        self._ended = self._ended or f"{name} failed: {error}"
        self.fast_path.open = False
        if isinstance(error, MembersLost):
            self._executor.abort()  # the peers have their own notice, and it names the lost
        else:
            self._executor.give_up()  # whatever it was, they may wait for a part that will not come
        if self.on_fault is not None and not isinstance(error, MembersLost | OperationAborted):
            self.on_fault(f"{name}: {said}")

    def fast_path_failed(self) -> NoReturn:
        """Raise what became of the fast path's call, which still has the turn."""
        shape = self.fast_path.failed
        if shape is None:
            raise LocalProtocolError("no call of the fast path has failed")
        try:
            error = self._executor.error_of(self.fast_path.status, shape.plan)
            self._give_up(shape.plan.request.operation.name.lower(), error)
            raise error
        finally:
            self._turnstile.__exit__(None, None, None)

    def _teach(self, said: Said, job: Job, single: Single) -> None:
        """Have the fast path take calls like this one from now on, if its arrays were used where they lie."""
        plan, call = single.plan, single.call
        if self._executor.far and not plan.eager:
            return
        if self._executor.inbox is not self._taught_inbox:
            self.fast_path.forget()  # what it learnt keeps the inbox that has been outgrown
            self._taught_inbox = self._executor.inbox
        given = [array for array in (said.x, said.out) if array is not None]
        if not all(_as_given(array) for array in given):
            return
        # What ran within one memory is another plan, or other buffers, than the same call on two.
        if said.x is not None and said.out is not None and np.may_share_memory(said.x, said.out):
            return
        places: dict[int, bool] = {}
        for buffer, address in single.addresses.items():
            if said.out is not None and address == address_of(said.out):
                places[buffer] = True
            elif said.x is not None and address == address_of(said.x):
                places[buffer] = False
            else:
                return
        if not _FAST_PATH_BUFFERS.issuperset(places):
            return
        name, numbers = plan.request.operation.name.lower(), self.flight.ring.number
        in_arena = plan if plan.in_arena is None else plan.in_arena
        self.fast_path.learn(
            plan,
            plan.native,
            said.x,
            said.out,
            op=said.op,
            algorithm=said.algorithm,
            called_root=said.root,
            places=places,
            memory=(self._executor.scratch, self._executor.inbox),
            addresses=self._executor.addresses,
            nbytes=job.nbytes,
            flight=numbers(name, plan.request.algorithm),
            flight_read=numbers(name, in_arena.request.algorithm),
            **self._executor.arguments(plan, call),
        )


def _as_given(array: Any) -> bool:
    """Whether the fast path can look at such an array: a plain one, its elements one after the other."""
    return type(array) is np.ndarray and array.flags.c_contiguous and array.size > 0
