"""Names of processes beyond the view that they are members of.

Ranks of every job are called alike, and so are the processes that one of them has started. Within a job a
name is enough; beyond it a **scope** is put behind it: `rank0@1f` is rank 0 of job 1f. Nodes and sessions
have names that no other process of the cluster has, and no scope. A reference is turned into the words of
whoever decodes it, so it names the same actor wherever it is sent.
"""

from __future__ import annotations

import re
from typing import Final

MARK: Final = "@"
_GLOBAL: Final = re.compile(r"node[1-9]\d{0,18}|session-.+")


def scope_of_job(job: int) -> str:
    """The scope of a job's ranks; empty for processes of none."""
    return f"{job:x}" if job else ""


def is_global(process: str) -> bool:
    """Whether a name means the same process everywhere in a cluster."""
    return MARK in process or _GLOBAL.fullmatch(process) is not None


def is_session(process: str) -> bool:
    """Whether it is a script's: it dials others, and nobody dials it."""
    return process.startswith("session-")


def scope_of(process: str) -> str:
    """The scope that a name says, or nothing."""
    return process.partition(MARK)[2]


def abroad(process: str, scope: str) -> str:
    """What those outside of `scope` call a process of it."""
    return f"{process}{MARK}{scope}" if scope and not is_global(process) else process


def at_home(process: str, scope: str) -> str:
    """What those within `scope` call a process that others call so."""
    base, mark, where = process.partition(MARK)
    return base if mark and where == scope else process


def guest_name(process: str, scope: str) -> str:
    """How a process calls itself at the hello of a link that no view asks for: always with the mark."""
    return f"{process}{MARK}{scope}"


def of_guest(hello: str) -> str | None:
    """The name behind such a hello; None if it is of another kind."""
    base, mark, scope = hello.partition(MARK)
    if not mark or not base or MARK in scope or (not scope and not is_global(base)):
        return None
    return hello if scope else base
