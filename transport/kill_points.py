"""Kill points: places at which a process can be made to kill itself, to test how its peers react.

Code declares a point once, at import, and passes it with `hit`. `ZBMD_FAULT` names which process dies
where: entries `process[#incarnation]:point[:count]`, separated by commas, such as

    ZBMD_FAULT=rank2:vote.sent,rank1#2:recovery.pull:3

kills rank2's first incarnation when it has sent a vote, and rank1's second one at its third pull. The
process that `arm`s itself is killed by SIGKILL: nothing is flushed, closed or said. Not armed, a point
costs one comparison.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NewType, NoReturn

from zbmd.transport.errors import LocalProtocolError, UserError

Point = NewType("Point", str)

FAULT_VARIABLE = "ZBMD_FAULT"
MAX_ENTRIES = 64

_POINT = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")
_ENTRY = re.compile(
    r"(?P<process>[A-Za-z0-9_.-]+)(?:#(?P<incarnation>[1-9]\d{0,17}))?"
    r":(?P<point>[a-z][a-z0-9_.]*)(?::(?P<count>[1-9]\d{0,17}))?"
)
_declared: dict[Point, str] = {}
_armed: dict[Point, int] = {}
"""At which pass from now this process dies, for each point where it is to die."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of `ZBMD_FAULT`: `process`'s `incarnation` dies at its `count`-th pass of `point`."""

    process: str
    point: str
    incarnation: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.process}#{self.incarnation}:{self.point}:{self.count}"


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
    """The entries of a `ZBMD_FAULT` value. Raises `UserError` if one cannot be read."""
    entries = [entry.strip() for entry in spec.split(",") if entry.strip()]
    if len(entries) > MAX_ENTRIES:
        raise UserError(f"{FAULT_VARIABLE} has {len(entries)} entries; {MAX_ENTRIES} are the bound")
    faults: list[Fault] = []
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise UserError(
                f"{FAULT_VARIABLE} entry {entry!r} is not written like "
                "process[#incarnation]:point[:count], for example rank2:vote.sent:3"
            )
        faults.append(
            Fault(
                process=match["process"],
                point=match["point"],
                incarnation=int(match["incarnation"] or 1),
                count=int(match["count"] or 1),
            )
        )
    return tuple(faults)


def arm(process: str, incarnation: int, spec: str | None = None) -> None:
    """Take on the entries that name this process; call it once the process knows who it is.

    spec: default the environment's `ZBMD_FAULT`. Replaces what was armed before (a forked process is
    another one). Raises `UserError` if an entry cannot be read or names a point that nothing declares.
    """
    _armed.clear()
    faults = parse(os.environ.get(FAULT_VARIABLE, "") if spec is None else spec)
    for fault in faults:
        point = Point(fault.point)
        if point not in _declared:
            known = ", ".join(sorted(_declared)) or "none"
            raise UserError(f"{FAULT_VARIABLE} names the kill point {point!r}; declared are: {known}")
        if (fault.process, fault.incarnation) == (process, incarnation):
            _armed[point] = min(fault.count, _armed.get(point, fault.count))


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
    if _armed and reserve(point, 1) == 0:
        die()


def reserve(point: Point, passes: int) -> int:
    """Pass a point `passes` times at once, for native code that counts by itself.

    Returns at which of them (from 0) that code is to kill the process, or -1.
    Raises `LocalProtocolError` if the point was never declared.
    """
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
