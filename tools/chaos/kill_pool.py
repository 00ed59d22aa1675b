"""A pool of ranks for the sweep of kills: processes that stay, of which each kill takes one.

Every rank is a fork of this process with a segment, words of life and mappings of its own, as a rank of a job
has; the dead one alone is replaced. The pool must be made while this process has one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, ROOTED, Operation, Request
from zbmd.collectives.algorithms.shard_tree import assign_shards, shard_tree_nodes
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.errors import MembersLost
from zbmd.collectives.execution.plan import Plan, chunks_for, plan_of
from zbmd.collectives.programs.program import hash_text
from zbmd.transport.errors import ZbmdError
from zbmd.transport.host.process import end_with_parent
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native._native import Watch, now_ns
from zbmd.transport.shm.death_notice import LifeThread

# ---- the programs whose every instruction a rank is killed at, and the kills that make up a sweep

RANKS: Final = (2, 3, 4, 5)
COUNT: Final = 60
"""Elements of a rank's row, int64: divisible by all of `RANKS`."""
EAGER_COUNT: Final = 12
"""The same where all rows of a rank travel with its descriptor, which has room for 1,408 bytes."""
FIRST: Final = 1
"""The run that dies is the first of its epoch: the call goes the general way."""
AGAIN: Final = 2
"""It is the second of two equal calls, which takes the native fast path where there is one for it."""
RUNS: Final = (FIRST, AGAIN)


@dataclass(frozen=True, slots=True)
class Family:
    """One algorithm of an operation, with so many ranks: a program a rank."""

    operation: Operation
    algorithm: str
    n: int

    def __str__(self) -> str:
        return f"{self.operation.name.lower()}/{self.algorithm} n={self.n}"

    @property
    def root(self) -> int:
        """The place of the root, if the operation has one."""
        return self.n - 1

    @property
    def count(self) -> int:
        """Elements of a rank's row."""
        return EAGER_COUNT if self.algorithm == "eager" else COUNT

    @property
    def hosts(self) -> tuple[int, ...]:
        """Of each rank, the number of its host, as far as the algorithm asks: two of them."""
        if not ALGORITHMS[self.operation, self.algorithm].over_hosts:
            return ()
        return tuple(place * 2 // self.n for place in range(self.n))

    def plan(self, rank: int) -> Plan:
        """Return the plan of a rank."""
        request = Request(operation=self.operation, algorithm=self.algorithm, n=self.n, hosts=self.hosts)
        if self.operation is Operation.ALL_REDUCE_SHARDS:
            shards = tuple((place, place + 1) for place in range(self.n))
            request = replace(request, shards=self.n, assignment=shards)
        if self.operation in ROOTED:
            request = replace(request, root=self.root)
        request = replace(request, chunks=request.blocks)
        return plan_of(replace(request, chunks=chunks_for(request, self.count * 8)), rank)

    def points(self) -> list[int]:
        """Return the number of points of each rank's program."""
        return [self.plan(rank).kill_points for rank in range(self.n)]


@dataclass(frozen=True, slots=True)
class Kill:
    """Rank `victim` is to die at `point` of its program, in `run` (one of `RUNS`).

    The point behind the last one kills nobody: that nobody dies there shows that there are no more.
    """

    family: Family
    victim: int
    point: int
    run: int
    beyond: bool = False

    @property
    def key(self) -> str:
        """Its name in the ledger, with a hash of the victim's program: another program is another kill."""
        encoding = self.family.plan(self.victim).encoding.tobytes().hex()
        return f"{self.family} {hash_text(encoding):016x} {self.victim}:{self.point}:{self.run}"


def families(ranks: Sequence[int], only: str) -> Iterator[Family]:
    """All whose name contains `only`."""
    for n in ranks:
        for operation, algorithm in sorted(ALGORITHMS, key=str):
            family = Family(operation, algorithm, n)
            if only in str(family):
                yield family


def kills_of(family: Family, stride: int, runs: Sequence[int]) -> list[Kill]:
    """Every rank at every `stride`-th point of its own program, and behind its last one."""
    return [
        Kill(family, victim, point, run, beyond=point == points)
        for run in runs
        for victim, points in enumerate(family.points())
        for point in (*range(0, points, stride), points)
    ]


# ---- a rank: what a rank of a job has; its parent process sends it the members and the round, over a socket

MESSAGE_BYTES_MAX: Final = 4096
OPERATION_S_MAX: Final = 30.0
"""An operation takes less than a millisecond, and a notice not much more: only a hang reaches this."""
RIGHT: Final = "right"
AUTO: Final = "auto"

Numbers = NDArray[np.int64]


def given_to(c: Communicator, count: int, k: int) -> list[Numbers]:
    """Every member's input in round `k`: other numbers in each, so nothing old passes for new."""
    return [np.arange(count * c.size, dtype=np.int64) * 10**place + k for place in range(c.size)]


def operate(c: Communicator, arena: Any, said: dict[str, Any], k: int) -> tuple[Any, Any]:
    """Run the operation; return what it gave here, and what it must give."""
    count, algorithm, root = said["count"], said["algorithm"], c.members[-1]
    given, me, end_ns = given_to(c, count, k), c.place, now_ns() + int(OPERATION_S_MAX * 1e9)
    mine, total = arena.from_array(given[me]), sum(given)
    at_root, last = c.rank == root, given[-1].reshape(c.size, count)
    match said["operation"]:
        case "ALL_REDUCE":
            return c.all_reduce(mine, algorithm=algorithm, deadline_ns=end_ns), total
        case "REDUCE":
            got = c.reduce(mine, root, algorithm=algorithm, deadline_ns=end_ns)
            return got, total if at_root else None
        case "BROADCAST":
            return c.broadcast(mine, root, algorithm=algorithm, deadline_ns=end_ns), given[-1]
        case "ALL_GATHER":
            out = arena.empty((c.size, count), np.int64)
            got = c.all_gather(mine[:count], out, algorithm=algorithm, deadline_ns=end_ns)
            return got, np.stack([x[:count] for x in given])
        case "GATHER":
            out = arena.empty((c.size, count), np.int64) if at_root else None
            got = c.gather(mine[:count], root, out, algorithm=algorithm, deadline_ns=end_ns)
            return got, np.stack([x[:count] for x in given]) if at_root else None
        case "SCATTER":
            out = arena.empty(count, np.int64)
            rows = mine.reshape(c.size, count) if at_root else None
            return c.scatter(rows, root, out, algorithm=algorithm, deadline_ns=end_ns), last[me]
        case "REDUCE_SCATTER":
            out, rows = arena.empty(count, np.int64), mine.reshape(c.size, count)
            got = c.reduce_scatter(rows, out, algorithm=algorithm, deadline_ns=end_ns)
            return got, np.asarray(total).reshape(c.size, count)[me]
        case "ALL_TO_ALL":
            out, rows = arena.empty((c.size, count), np.int64), mine.reshape(c.size, count)
            got = c.all_to_all(rows, out, algorithm=algorithm, deadline_ns=end_ns)
            return got, np.stack([x.reshape(c.size, count)[me] for x in given])
        case "ALL_REDUCE_SHARDS":
            assignment = assign_shards(c.size, c.size)
            (node,) = shard_tree_nodes(c.size, *assignment[me])
            out = arena.empty(mine.shape, mine.dtype)
            c.all_reduce_shards({node: mine}, out, shards=c.size, assignment=assignment, deadline_ns=end_ns)
            return out, total
        case "BARRIER":
            c.barrier(deadline_ns=end_ns)
            return None, None
        case other:
            raise ValueError(f"there is no operation {other}")


def attempt(c: Communicator, arena: Any, said: dict[str, Any], k: int) -> str:
    """Run the operation; return `RIGHT`, or a description of its end."""
    try:
        got, wanted = operate(c, arena, said, k)
    except MembersLost as lost:
        return f"MembersLost {sorted(lost.ranks)}"
    except ZbmdError as error:
        return type(error).__name__
    ran = c.flight[-1].algorithm
    if said["algorithm"] not in (AUTO, ran):
        return f"ran {ran}"
    if wanted is None:
        return RIGHT if got is None else "WRONG"
    return RIGHT if np.array_equal(got, wanted) else "WRONG"


class Rank:
    """One process of the pool."""

    def __init__(self, segment: Segment, line: socket.socket) -> None:
        self._segment = segment
        self._line = line
        self._life = LifeThread(segment)
        self._notices = os.eventfd(0)
        self._peers: dict[int, PeerSegment] = {}
        self._watches: dict[int, Watch] = {}
        self._group: Communicator | None = None

    def serve(self) -> None:
        """Do what is asked until the line ends."""
        self._say({"ready": True})
        while True:
            data, fds, _flags, _address = socket.recv_fds(self._line, MESSAGE_BYTES_MAX, 1)
            if not data:
                break
            said: dict[str, Any] = json.loads(data)
            if said["do"] == "attach":
                self._attach(said["rank"], fds[0])
            else:
                self._say(self._round(said))
        self._close_group()
        for watch in self._watches.values():
            watch.stop()
        self._life.goodbye()

    def _say(self, answer: dict[str, Any]) -> None:
        self._line.sendall(json.dumps(answer).encode())

    def _attach(self, rank: int, fd: int) -> None:
        """Map a member that has come; the one before it in its place is dead."""
        self._close_group()
        old = self._peers.pop(rank, None)
        if old is not None:
            self._await_notice(rank)
            self._watches.pop(rank).stop()
            self._segment.end_proven(rank)
            old.close()
        self._segment.clear_lost(rank)
        peer = PeerSegment.attach([fd], slot=rank)
        os.close(fd)
        self._peers[rank] = peer
        own = self._segment
        self._watches[rank] = Watch(own.mapping, own.slot, peer.mapping, rank, self._notices)
        self._say({"attached": rank, "fds": len(os.listdir("/proc/self/fd")), "threads": self._threads()})

    @staticmethod
    def _threads() -> int:
        return len(os.listdir("/proc/self/task"))

    def _await_notice(self, rank: int) -> None:
        while not self._segment.lost_mask() >> rank & 1:
            os.eventfd_read(self._notices)

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _round(self, said: dict[str, Any]) -> dict[str, Any]:
        self._close_group()
        members: Sequence[int] = said["members"]
        for rank in self._peers:
            if rank not in members:
                self._await_notice(rank)
        self._group = c = Communicator(
            segment=self._segment,
            peers={rank: self._peers[rank] for rank in members if rank != self._segment.slot},
            members=tuple(members),
            rank=self._segment.slot,
            epoch=said["epoch"],
            channel=0,
            hosts=tuple(said["hosts"]),
        )
        arena, k = self._segment.arena, said["epoch"]
        for calm in range(1, said["run"]):
            end = attempt(c, arena, said, k * 10 + calm)
            if end != RIGHT:
                return {"end": f"before: {end}"}
        if self._segment.slot == said["victim"]:
            c.kill_at(c.sequence + 1, said["point"])
        return {"end": attempt(c, arena, said, k * 10)}


ARENA_BYTES: Final = 1 << 20
INBOX_BYTES: Final = 1 << 20
ANSWER_S_MAX: Final = 2 * OPERATION_S_MAX
NOBODY: Final = -1


class PoolBroken(ZbmdError):
    """The pool cannot be used on: a rank is silent, or ended by itself."""


@dataclass(slots=True)
class _Process:
    pid: int
    line: socket.socket
    segment: Segment


@dataclass(frozen=True, slots=True)
class KillOutcome:
    """What became of a kill. `ends`: how the operation ended on those who lived; `again`: how the same
    operation ended that they then ran among themselves.
    """

    died: bool
    ends: dict[int, str]
    again: dict[int, str]


class KillPool:
    """`n` ranks, ready for rounds. Close it, or use it as a context."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._epoch = 0
        self._incarnation = 0
        self._held: dict[int, tuple[int, tuple[int, int]]] = {}
        self._ranks: dict[int, _Process] = {}
        try:
            for rank in range(n):
                self._bring(rank)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> KillPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def pid(self, rank: int) -> int:
        """The process of a rank that lives."""
        return self._ranks[rank].pid

    def kill(self, kill: Kill) -> KillOutcome:
        """One round: the operation, the kill, the operation again among those who live, the replacement.

        Raises `PoolBroken`.
        """
        family, everyone = kill.family, tuple(range(self.n))
        asked = {
            "operation": family.operation.name,
            "algorithm": family.algorithm,
            "count": family.count,
            "victim": kill.victim,
            "point": kill.point,
            "run": kill.run,
            "hosts": family.hosts,
        }
        ends = self._round(asked, everyone, kill.victim)
        if kill.victim in ends:
            return KillOutcome(died=False, ends=ends, again={})
        living = tuple(rank for rank in everyone if rank != kill.victim)
        retried = {**asked, "algorithm": AUTO, "victim": NOBODY, "run": 1, "hosts": ()}
        again = self._round(retried, living, NOBODY)
        self._bring(kill.victim)
        return KillOutcome(died=True, ends=ends, again=again)

    def close(self) -> None:
        """End all ranks: those who do not leave by themselves are killed. Idempotent."""
        for process in self._ranks.values():
            process.line.close()
        for rank in list(self._ranks):
            process = self._ranks.pop(rank)
            self._await_end(process.pid)
            process.segment.close()

    @staticmethod
    def _await_end(pid: int) -> int:
        """Its exit code, or minus its signal; a rank that stays is killed."""
        pidfd = os.pidfd_open(pid)
        try:
            if not select.select([pidfd], [], [], OPERATION_S_MAX)[0]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            os.close(pidfd)

    def _round(self, asked: dict[str, Any], members: Sequence[int], victim: int) -> dict[int, str]:
        """Return how the operation ended on each member; a victim that died is missing, and gone."""
        self._epoch += 1
        message = json.dumps({**asked, "do": "round", "epoch": self._epoch, "members": members}).encode()
        for rank in members:
            with contextlib.suppress(BrokenPipeError):  # it is seen to have ended below
                self._ranks[rank].line.sendall(message)
        ends: dict[int, str] = {}
        for rank in members:
            answer = self._answer(rank)
            if answer is not None:
                ends[rank] = answer["end"]
                continue
            dead = self._ranks.pop(rank)
            dead.line.close()
            code = self._await_end(dead.pid)
            dead.segment.close()
            if rank != victim or code != -signal.SIGKILL:
                raise PoolBroken(f"rank {rank} ended by itself ({code}) in {message.decode()}")
        return ends

    def _answer(self, rank: int) -> dict[str, Any] | None:
        """Return the reply of a rank; None if it has ended. Raises `PoolBroken` if there is no reply."""
        line = self._ranks[rank].line
        until_s = time.monotonic() + ANSWER_S_MAX
        while not select.select([line], [], [], max(0.0, until_s - time.monotonic()))[0]:
            if time.monotonic() > until_s:
                raise PoolBroken(f"rank {rank} says nothing for {ANSWER_S_MAX:g} s")
        data = b""
        with contextlib.suppress(ConnectionResetError):  # it ended with what we had said unread
            data = line.recv(MESSAGE_BYTES_MAX)
        said: dict[str, Any] | None = json.loads(data) if data else None
        return said

    def _bring(self, rank: int) -> None:
        """Fork a rank, and have it and all others map each other."""
        self._incarnation += 1
        segment = Segment.create(
            slot=rank, incarnation=self._incarnation, arena_bytes=ARENA_BYTES, inbox_bytes=INBOX_BYTES
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._be_rank(segment, theirs, parent)
        theirs.close()
        self._ranks[rank] = _Process(pid, ours, segment)
        if self._answer(rank) is None:
            raise PoolBroken(f"rank {rank} ended before it was ready")
        held: dict[int, tuple[int, int]] = {}
        for other in self._ranks:
            if other != rank:
                held[other] = self._introduce(rank, other)
                held[rank] = self._introduce(other, rank)
        if len(self._ranks) == self.n:
            for member, now in held.items():
                self._check_leaks(member, now)

    def _introduce(self, rank: int, to: int) -> tuple[int, int]:
        """Have `to` map `rank`; return how many descriptors and threads it then has."""
        message = json.dumps({"do": "attach", "rank": rank}).encode()
        socket.send_fds(self._ranks[to].line, [message], self._ranks[rank].segment.fds)
        answer = self._answer(to)
        if answer is None:
            raise PoolBroken(f"rank {to} ended as rank {rank} came")
        return answer["fds"], answer["threads"]

    def _check_leaks(self, rank: int, held: tuple[int, int]) -> None:
        """Check that a rank that stays has no more of anything than when the pool was first whole."""
        pid = self._ranks[rank].pid
        first_pid, first = self._held.setdefault(rank, (pid, held))
        if first_pid != pid:
            self._held[rank] = pid, held
        elif held[0] > first[0] or held[1] > first[1]:
            raise PoolBroken(f"rank {rank} leaks: (descriptors, threads) were {first}, and are {held}")

    def _be_rank(self, segment: Segment, line: socket.socket, parent: int) -> NoReturn:
        code = 1
        try:
            end_with_parent(parent)
            for process in self._ranks.values():
                process.line.close()
                process.segment.close()
            Rank(segment, line).serve()
            code = 0
        except BaseException:  # noqa: BLE001 -- it is printed, and the pool sees the end
            traceback.print_exc()
        finally:
            os._exit(code)


def judge(kill: Kill, outcome: KillOutcome) -> list[str]:
    """Return the faults of an outcome: a wrong or missing result, a wrong error, a missing death."""
    faults: list[str] = []
    if outcome.died is kill.beyond:
        faults.append("it died behind its last point" if kill.beyond else "it did not die")
    allowed = {RIGHT}
    if outcome.died:
        losses = {f"MembersLost [{kill.victim}]", "OperationAborted"}
        allowed |= losses
        if kill.run == AGAIN:  # the victim had its result of the operation before, and a slower rank had not
            allowed |= {f"before: {loss}" for loss in losses}
    faults += [f"rank {rank} ended with {end}" for rank, end in outcome.ends.items() if end not in allowed]
    faults += [f"rank {rank} then ended with {end}" for rank, end in outcome.again.items() if end != RIGHT]
    return faults
