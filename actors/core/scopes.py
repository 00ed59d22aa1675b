"""Names of processes outside of their own view.

Ranks of all jobs have the same names. Within a job a name is enough; outside of it a **scope** is appended:
`rank0@1f` is rank 0 of job 1f. The name of a node is unique in the cluster and has no scope. A process that
joined the cluster by way of another, its **owner**, has that in its name: `session-7@node2` is a script that
joined by node 2, which knows its address. A reference is translated for the process that decodes it, so it
names the same actor wherever it is sent.
"""

from __future__ import annotations

import re
from typing import Final

MARK: Final = "@"
_NODE: Final = re.compile(r"node[1-9]\d{0,18}", re.ASCII)


def scope_of_job(job: int) -> str:
    """Return the scope of a job's ranks; empty for processes of none."""
    return f"{job:x}" if job else ""


def is_global(process: str) -> bool:
    """Return whether a name means the same process everywhere in a cluster."""
    return MARK in process or _NODE.fullmatch(process) is not None


def owned_name(process: str, owner: str) -> str:
    """Return the global name of a process that joined the cluster by way of `owner`."""
    return f"{process}{MARK}{owner}"


def owner_of(process: str) -> str:
    """Return the process by way of which a process joined; empty for nodes and ranks."""
    where = process.partition(MARK)[2]
    return where if where and is_global(where) else ""


def scope_of(process: str) -> str:
    """Return the scope in a name, or an empty string."""
    return "" if owner_of(process) else process.partition(MARK)[2]


def abroad(process: str, scope: str) -> str:
    """Return the name that processes outside of `scope` use for one of its processes."""
    return f"{process}{MARK}{scope}" if scope and not is_global(process) else process


def at_home(process: str, scope: str) -> str:
    """Return the name that processes within `scope` use for a process with this global name."""
    base, mark, where = process.partition(MARK)
    return base if mark and where == scope else process


def external_name(process: str, scope: str) -> str:
    """Return the name in the hello of a link outside of views: always with the mark."""
    return f"{process}{MARK}{scope}"


def name_of_external(hello: str) -> str | None:
    """Return the name in such a hello; None if it is of another kind."""
    base, mark, scope = hello.rpartition(MARK)
    if not mark or not all(base.split(MARK)) or (not scope and not is_global(base)):
        return None
    return hello if scope else base
