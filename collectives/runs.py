"""What every operation of a communicator passes through: its turn, the flight recorder, the end after an
error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from zbmd.collectives.arrays import Array
from zbmd.collectives.choice import wish_of_environment
from zbmd.collectives.cost_model import MANY_HOSTS, ONE_HOST
from zbmd.collectives.errors import MembersLost, OperationAborted
from zbmd.collectives.executors import make_executor
from zbmd.collectives.flight import FLIGHT_RECORDS_MAX, FlightRecord, FlightState
from zbmd.collectives.pieces import Job, PieceRunner
from zbmd.collectives.turnstile import Turnstile
from zbmd.transport._native import now_ns
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.peer_memory import PeerMemory
from zbmd.transport.segment import Segment

OnFlight: TypeAlias = Callable[[FlightRecord, Sequence[Array]], None]
"""Takes an operation as it begins, without results, and again as it ends, with them."""


class Runs:
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
        self.hosts = hosts
        self.model = MANY_HOSTS if len(set(hosts)) > 1 else ONE_HOST
        self._wish = wish_of_environment()
        self.size = len(members)
        self.place = members.index(rank)
        self.flight: deque[FlightRecord] = deque(maxlen=FLIGHT_RECORDS_MAX)
        self.on_flight: OnFlight | None = None
        self._segment = segment
        self._runner = PieceRunner(segment, self._executor, self.place)
        self._turnstile = Turnstile()
        self._ended = ""
        self._closed = False

    def __repr__(self) -> str:
        place = f"epoch {self.epoch} channel {self.channel}"
        return f"<{type(self).__name__} {place}: rank {self.rank} of {self.members}>"

    @property
    def sequence(self) -> int:
        """Runs begun in this epoch; an operation counts once for each of its pieces."""
        return self._executor.sequence

    def abort(self) -> None:
        """End the running operation with `OperationAborted`, and every later one; from any thread."""
        self._ended = self._ended or "it was aborted"
        self._executor.abort()

    def close(self) -> None:
        """Abort, wait for the running operation to drain, give back inbox and scratch. Idempotent.

        A peer that waits for this rank, now or later, ends its operation with `OperationAborted`.

        After a loss call it only once the dead are confirmed dead: their last store may still be under way.
        """
        self.abort()
        with self._turnstile.turn():
            if not self._closed:
                self._closed = True
                self._executor.give_up()
                self._executor.release()

    def kill_at(self, sequence: int, point: int) -> None:
        """Fault injection: this process dies by SIGKILL at `point` of the run numbered `sequence`.

        Points are those of `Plan.kill_points`; `sequence + 1` is the next run.
        """
        self._executor.kill_at(sequence, point)

    def _perform(self, job: Job, deadline_ns: int) -> None:
        with self._turnstile.turn():
            self._perform_in_turn(job, deadline_ns)

    def _perform_in_turn(self, job: Job, deadline_ns: int) -> None:
        if self._ended:
            raise OperationAborted(f"{self!r} has ended: {self._ended}. Use the next view's communicator")
        request = job.shape.plan.request
        record = FlightRecord(
            operation=request.operation.name.lower(),
            algorithm=request.algorithm,
            sequence=self.sequence + 1,
            nbytes=job.nbytes,
            start_ns=now_ns(),
        )
        self.flight.append(record)
        if self.on_flight is not None:
            self.on_flight(record, ())
        try:
            self._runner.run(job, deadline_ns)
        except BaseException as error:
            record.state, record.error = FlightState.FAILED, str(error)
            self._ended = self._ended or f"{request.operation.name.lower()} failed: {error}"
            if isinstance(error, MembersLost):
                self._executor.abort()  # the peers have their own notice, and it names the lost
            else:
                self._executor.give_up()  # whatever it was, they may wait for a part that will not come
            raise
        else:
            record.state = FlightState.COMPLETE
        finally:
            record.end_ns = now_ns()
            if self.on_flight is not None:
                self.on_flight(record, [side.store for side in job.sides if side.store is not None])
