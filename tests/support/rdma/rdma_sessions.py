"""Runs the tests of RDMA in sessions of pytest that are forked from one process, which has imported for all.

    python tests/support/rdma/rdma_sessions.py PYTEST_ARGUMENT ...

For the RDMA machine, whose processor is emulated: to import what a session needs takes it half a minute. All
sessions run at the same time, for each waits for most of its own; who pulls cables has one of its own. Each
line that a session prints has its name ahead of it. The exit code is 0 if all sessions' are.
"""

from __future__ import annotations

import gc
import os
import selectors
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

from zbmd.tools.lab.rdma_vm import guest
from zbmd.transport.host.threads import default_to_one_thread

JOBS: Final = ("tests/rdma/test_rdma_ranks.py", "tests/rdma/test_rdma_heartbeats.py")
CABLES: Final = ("tests/rdma/test_rdma_beats.py", "tests/rdma/test_rdma_faults.py")
LINKS: Final = (
    "tests/rdma",
    *(f"--ignore={path}" for path in JOBS + CABLES),
    "tests/transport/link/test_link_conformance.py",
    "tests/transport/link/test_link_conformance_deaths.py",
    "tests/transport/memory/test_region_conformance.py",
    "tests/actors/remote",
)
SESSIONS: Final = {"jobs": (JOBS, 0), "links": (LINKS, 0), "cables": (CABLES, 1)}
"""Their tests, and which cable's devices they have. All run at the same time."""
SHARED: Final = (
    "hypothesis",
    "pytest",
    "pytest_asyncio.plugin",
    "uvloop",
    "zbmd.actors.cluster.node.node",
    "zbmd.actors.cluster.jobs.host",
    "zbmd.collectives.group.group",
    "zbmd.tools.chaos.small_job",
    "zbmd.transport.rdma.plane",
)
"""Modules that more than one session imports."""
READ_BYTES: Final = 1 << 16


def main(arguments: Sequence[str]) -> int:
    """Run all sessions, also where one fails."""
    default_to_one_thread()  # before numpy is imported: what has threads is not forked
    for module in SHARED:
        import_module(module)
    import_module("zbmd.transport.rdma.message_device").verbs()
    gc.collect()
    gc.freeze()  # no session looks through all that has been imported, nor copies its pages for that
    running = {
        name: _fork(lambda tests=tests, cable=cable: _session([*arguments, *tests], cable))
        for name, (tests, cable) in SESSIONS.items()
    }
    _relay({name: output for name, (_, output) in running.items()})
    failed = 0
    for pid, _ in running.values():
        failed |= os.waitpid(pid, 0)[1]
    return int(failed != 0)


def _session(arguments: list[str], cable: int) -> int:
    import pytest

    os.environ[guest.DEVICES_VARIABLE] = ",".join(guest.CABLES[cable])
    return pytest.main(arguments)


def _fork(session: Callable[[], int]) -> tuple[int, int]:
    """A session in a child: its process, and what it prints."""
    sys.stdout.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    os.close(read)
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)
    sys.exit(session())


def _relay(outputs: dict[str, int]) -> None:
    """Print what they print, line by line, until all have ended."""
    with selectors.DefaultSelector() as selector:
        for name, output in outputs.items():
            selector.register(output, selectors.EVENT_READ, (name, bytearray()))
        while selector.get_map():
            for key, _ in selector.select():
                name, begun = key.data
                data = os.read(key.fd, READ_BYTES)
                *lines, rest = bytes(begun + data).split(b"\n")
                begun[:] = rest
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    lines = [rest] if rest else []
                for line in lines:
                    print(f"{name}: {line.decode(errors='replace')}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
