"""Kill points: places at which a process can be made to kill itself, to test how its peers react.

Code declares a point once, at import, and passes it with `hit`. `ZBMD_FAULT` names which process dies
where: entries `process[#incarnation]:point[:count]`, separated by commas, such as

    ZBMD_FAULT=rank2:vote.sent,rank1#2:recovery.pull:3

kills rank2's first incarnation when it has sent a vote, and rank1's second one at its third pull. The
process that `arm`s itself is killed by SIGKILL: nothing is flushed, closed or said. Not armed, a point
costs one comparison.

Two entries are two deaths: a rank that comes to its point first may be dead and replaced before the other
one is there. `+` joins the kills of one entry, which are one event:

    ZBMD_FAULT=rank0:job.begin:3+rank1:job.begin:3,rank2:loop.divided+~rank3:loop.divided

Each of its processes waits at its point until all are at theirs, and then they are killed. A process with `~`
is waited for in the same way, but neither waits nor dies. The processes of an entry are on one host.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Final, NewType, NoReturn

from zbmd.transport.errors import LocalProtocolError, UserError

Point = NewType("Point", str)

FAULT_VARIABLE = "ZBMD_FAULT"
MAX_ENTRIES = 64
"""Kills, in all entries."""
TOGETHER_S_MAX: Final = 120.0
"""The time that a process waits for the others of its entry, until it is killed alone."""
_POLL_S: Final = 0.005

_POINT = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")
_KILL = re.compile(
    r"(?P<lives>~)?(?P<process>[A-Za-z0-9_.-]+)(?:#(?P<incarnation>[1-9]\d{0,17}))?"
    r":(?P<point>[a-z][a-z0-9_.]*)(?::(?P<count>[1-9]\d{0,17}))?"
)
_declared: dict[Point, str] = {}
_armed: dict[Point, int] = {}
"""At which pass from now this process dies, for each point where it is to die."""
_meetings: dict[Point, _Meeting] = {}
"""Of the points in `_armed`, those where this process meets others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kill of `ZBMD_FAULT`: `process`'s `incarnation` dies at its `count`-th pass of `point`.

    entry: the number of the entry, from 1, if that joins several; 0 for one alone. lives: it is only waited
    for.
    """

    process: str
    point: str
    incarnation: int = 1
    count: int = 1
    entry: int = 0
    lives: bool = False

    def __str__(self) -> str:
        return f"{'~' * self.lives}{self.process}#{self.incarnation}:{self.point}:{self.count}"


@dataclass(slots=True)
class _Meeting:
    """The kills of one entry of a job. A process that comes listens at an address."""

    job: int
    kills: Sequence[Fault]
    own: Fault
    listener: socket.socket | None = None

    def come(self) -> None:
        """Be seen by the others."""
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self._address(self.own))
        self.listener.listen(MAX_ENTRIES)
        if not self.own.lives:
            self._end(time.monotonic() + TOGETHER_S_MAX)

    def _end(self, latest_s: float) -> NoReturn:
        """Kill all processes that are to die, this one last, once all have come."""
        others, found = [one for one in self.kills if one is not self.own], dict[Fault, int]()
        while missing := [one for one in others if one not in found]:
            if time.monotonic() > latest_s:
                print(
                    f"{self.own} waited in vain for {', '.join(map(str, missing))}",
                    file=sys.stderr,
                    flush=True,
                )
                die()
            for one in missing:
                with suppress(ConnectionRefusedError, ProcessLookupError):
                    found[one] = self._process_of(one)
            time.sleep(_POLL_S)
        for one in others:
            if not one.lives:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(found[one], signal.SIGKILL)
        die()

    def _address(self, kill: Fault) -> str:
        return f"\0zbmd-fault-{os.getuid()}-{self.job:x}-{kill.entry}-{self.kills.index(kill)}"

    def _process_of(self, kill: Fault) -> int:
        """Return a descriptor of the process that has come to a kill. Raises `OSError` if none has."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address(kill))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return os.pidfd_open(struct.unpack("3i", credentials)[0])


def declare(point: str, description: str) -> Point:
    """Declare a point at import: `module.place`, lower case, and in words where the process then stands.

    Raises `LocalProtocolError` if the name is malformed or declared already.
    """
    if not _POINT.fullmatch(point):
        raise LocalProtocolError(f"kill point {point!r} is not written like 'module.place'")
    name = Point(point)
    if name in _declared:
        raise LocalProtocolError(f"kill point {point} is declared twice")
    _declared[name] = description
    return name


def declared() -> Mapping[Point, str]:
    """Every point of the modules imported so far, with its description."""
    return MappingProxyType(_declared)


def parse(spec: str) -> tuple[Fault, ...]:
    """Return the kills of a `ZBMD_FAULT` value. Raises `UserError` if one cannot be read."""
    entries = [entry.split("+") for entry in spec.split(",") if entry.strip()]
    if (count := sum(map(len, entries))) > MAX_ENTRIES:
        raise UserError(f"{FAULT_VARIABLE} has {count} entries; {MAX_ENTRIES} are the bound")
    return tuple(
        _parse_kill(kill.strip(), number if len(kills) > 1 else 0)
        for number, kills in enumerate(entries, 1)
        for kill in kills
    )


def _parse_kill(text: str, entry: int) -> Fault:
    match = _KILL.fullmatch(text)
    if match is None:
        raise UserError(
            f"{FAULT_VARIABLE} entry {text!r} is not written like "
            "process[#incarnation]:point[:count], for example rank2:vote.sent:3"
        )
    if match["lives"] and not entry:
        raise UserError(
            f"{FAULT_VARIABLE} entry {text!r} kills nobody: join it with + to a kill that waits for it"
        )
    return Fault(
        process=match["process"],
        point=match["point"],
        incarnation=int(match["incarnation"] or 1),
        count=int(match["count"] or 1),
        entry=entry,
        lives=bool(match["lives"]),
    )


def spelled(faults: Iterable[Fault]) -> str:
    """Return the value of `ZBMD_FAULT` that `parse` reads so, of kills in the order of their entries."""
    entries = groupby(enumerate(faults), lambda each: each[1].entry or -each[0])
    return ",".join("+".join(str(kill) for _, kill in entry) for _, entry in entries)


def arm(process: str, incarnation: int, spec: str | None = None, *, job: int = 0) -> None:
    """Take on the kills that name this process; call it once the process knows who it is.

    spec: default the environment's `ZBMD_FAULT`. job: a number that only the processes of this run have.
    Replaces what was armed before (a forked process is another one). Raises `UserError` if an entry cannot be
    read or names a point that nothing declares.
    """
    _armed.clear()
    _meetings.clear()
    faults = parse(os.environ.get(FAULT_VARIABLE, "") if spec is None else spec)
    for fault in faults:
        point = Point(fault.point)
        if point not in _declared:
            known = ", ".join(sorted(_declared)) or "none"
            raise UserError(f"{FAULT_VARIABLE} names the kill point {point!r}; declared are: {known}")
        if (fault.process, fault.incarnation) != (process, incarnation):
            continue
        if fault.count < _armed.get(point, fault.count + 1):
            _armed[point] = fault.count
            _meetings.pop(point, None)
            if fault.entry:
                _meetings[point] = _Meeting(job, [one for one in faults if one.entry == fault.entry], fault)


def left() -> Mapping[Point, int]:
    """At which pass from now this process dies, for each point where it is to die.

    A point that is armed for a pass that never comes so tells, at the end, how often it was passed.
    """
    return MappingProxyType(_armed)


def armed() -> bool:
    """Whether this process is to die at any point: spares the hot path what `reserve` costs."""
    return bool(_armed)


def hit(point: Point) -> None:
    """Pass a point: dies here if this process is armed for this pass."""
    if _armed and _passed(point, 1) == 0:
        if (meeting := _meetings.get(point)) is None:
            die()
        meeting.come()


def reserve(point: Point, passes: int) -> int:
    """Pass a point `passes` times at once, for native code that counts by itself.

    Returns at which of them (from 0) that code is to kill the process, or -1.
    Raises `LocalProtocolError` if the point was never declared, and `UserError` if this process is to die
    together with others there.
    """
    if point in _meetings:
        raise UserError(
            f"{FAULT_VARIABLE}: native code passes {point}, and waits there for nobody: use no + for it"
        )
    return _passed(point, passes)


def _passed(point: Point, passes: int) -> int:
    if point not in _declared:
        raise LocalProtocolError(f"kill point {point!r} was never declared")
    if point not in _armed:
        return -1
    if _armed[point] <= passes:
        return _armed.pop(point) - 1
    _armed[point] -= passes
    return -1


def die() -> NoReturn:
    """Kill this process with SIGKILL, as the kernel or an operator would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived its SIGKILL")
