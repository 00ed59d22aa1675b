"""Causes, findings and the diagnosis, and their text and JSON."""

from __future__ import annotations

import datetime
from enum import Enum
from typing import Any, Final

import msgspec


class Cause(Enum):
    """The kinds of causes."""

    KILLED = "killed"
    CRASHED = "crashed"
    EXCEPTION = "exception"
    IMPORT = "import-error"
    MEMORY = "out-of-memory"
    EXITED = "exited"
    BUSY = "hang-busy"
    LOCK = "hang-lock"
    WAIT = "hang-wait"
    STOPPED = "stopped-process"
    DEADLOCK = "deadlock"
    LEFT = "collective-skipped"
    ORDER = "collective-order"
    SHAPE = "collective-shape"
    DTYPE = "collective-dtype"
    ROOT = "collective-root"
    NOT_FINITE = "not-finite"
    BITS = "state-differs"
    DISK = "disk-full"
    CHECKPOINT = "checkpoint-damaged"
    DIRECTORY = "directory-in-use"
    ADDRESS = "address-in-use"
    WORLD_SIZE = "wrong-world-size"
    USAGE = "usage"
    LAUNCHER = "launcher-killed"
    TEMPLATE = "template-lost"
    HOST = "host-restarted"
    NODE = "node-lost"
    SLOW_DATA = "slow-data"
    SLOW_COMPUTE = "slow-compute"
    SLOW_LINK = "slow-link"
    SLOW_RUNTIME = "slow-runtime"
    SLOW_CHECKPOINT = "slow-checkpoint"
    ASKED = "stopped-by-request"
    UNKNOWN = "unknown"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause. ranks: to blame; hosts: of each; place: file, line and function, where known.

    confidence: 0 to 1; evidence: what it follows from; do: what to do; proof: what would prove it, or the
    contrary.
    """

    cause: Cause
    summary: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    place: str = ""
    step: int | None = None
    at_ns: int = 0
    confidence: float
    evidence: tuple[str, ...] = ()
    do: str
    proof: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. job: its name in a cluster; root: None if all is well.

    state: done, failed, stopped, refused, running, killed, unknown; followed: what the root led to, in order;
    others: what was found besides, and did not end the run.
    """

    state: str
    command: str = ""
    job: str = ""
    root: Finding | None = None
    followed: tuple[str, ...] = ()
    others: tuple[Finding, ...] = ()
    sources: tuple[str, ...] = ()


LINES_MAX: Final = 12
"""Of each list that is shown."""


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return it as plain data."""
    found: dict[str, Any] = msgspec.to_builtins(diagnosis)
    return found


def as_text(diagnosis: Diagnosis) -> list[str]:
    """Return the lines for people."""
    lines = [f"run: {diagnosis.command or '(unknown command)'}", f"state: {diagnosis.state}"]
    if diagnosis.job:
        lines.insert(0, f"job: {diagnosis.job}")
    root = diagnosis.root
    if root is None:
        lines.append("no fault found: nothing died, hung or was slow, by these records")
    else:
        lines += ["", *_finding(root, "root cause")]
        lines += _listed("what followed", diagnosis.followed)
    for other in diagnosis.others[:LINES_MAX]:
        lines += ["", *_finding(other, "besides")]
    lines += ["", f"read: {', '.join(diagnosis.sources[:LINES_MAX]) or 'nothing'}"]
    return lines


def _finding(found: Finding, title: str) -> list[str]:
    when = ""
    if found.at_ns:
        time = datetime.datetime.fromtimestamp(found.at_ns / 1e9).strftime("%H:%M:%S")
        when = f", at {time}"
    step = "" if found.step is None else f", step {found.step}"
    lines = [f"{title}: {found.cause.value} ({found.confidence:.0%} sure{step}{when})", f"  {found.summary}"]
    if found.place:
        lines.append(f"  at {found.place}")
    if any(found.hosts):
        lines.append(f"  on {', '.join(dict.fromkeys(host for host in found.hosts if host))}")
    lines += _listed("evidence", found.evidence)
    lines.append(f"  do: {found.do}")
    if found.proof:
        lines.append(f"  proof: {found.proof}")
    return lines


def _listed(title: str, lines: tuple[str, ...]) -> list[str]:
    if not lines:
        return []
    more = [f"    … and {len(lines) - LINES_MAX} more"] if len(lines) > LINES_MAX else []
    return [f"  {title}:", *(f"    - {line}" for line in lines[:LINES_MAX]), *more]
