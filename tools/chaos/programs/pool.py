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
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NoReturn

from zbmd.tools.chaos.programs.families import AGAIN, Kill
from zbmd.tools.chaos.programs.rank import AUTO, MESSAGE_BYTES_MAX, OPERATION_S_MAX, RIGHT, Rank
from zbmd.transport.errors import ZbmdError
from zbmd.transport.host.process import end_with_parent
from zbmd.transport.memory.segment import Segment

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
        """How the operation ended on each member; a victim that died is missing, and gone."""
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
        socket.send_fds(self._ranks[to].line, [message], [self._ranks[rank].segment.fd])
        answer = self._answer(to)
        if answer is None:
            raise PoolBroken(f"rank {to} ended as rank {rank} came")
        return answer["fds"], answer["threads"]

    def _check_leaks(self, rank: int, held: tuple[int, int]) -> None:
        """Who stays has no more of anything than when the pool was first whole in its life."""
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
        except BaseException:  # noqa: BLE001 -- it is told, and the pool sees the end
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
