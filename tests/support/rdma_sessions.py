"""Runs the tests of RDMA in sessions of pytest that are forked from one process, which has imported for all.

    python tests/support/rdma_sessions.py PYTEST_ARGUMENT ...

For the RDMA machine, whose processor is emulated: to import what a session needs takes it half a minute. Jobs
run beside the tests of links and memory; who pulls cables, which all share, comes behind them. Each line
that a session prints has its name ahead of it. The exit code is 0 if all sessions' are.
"""

from __future__ import annotations

import os
import selectors
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

from zbmd.actors.one_thread import default_to_one_thread

JOBS: Final = ("tests/rdma/test_rdma_ranks.py", "tests/rdma/test_rdma_heartbeats.py")
CABLES: Final = ("tests/rdma/test_rdma_beats.py", "tests/rdma/test_rdma_faults.py")
LINKS: Final = (
    "tests/rdma",
    *(f"--ignore={path}" for path in JOBS + CABLES),
    "tests/transport/test_link_conformance.py",
    "tests/transport/test_link_conformance_deaths.py",
    "tests/transport/test_region_conformance.py",
    "tests/actors/remote",
)
TURNS: Final = ({"jobs": JOBS, "links": LINKS}, {"cables": CABLES})
"""The sessions of a turn run at the same time."""
SHARED: Final = (
    "hypothesis",
    "pytest_asyncio.plugin",
    "uvloop",
    "zbmd.actors.cluster.node",
    "zbmd.actors.host",
    "zbmd.collectives.group",
    "zbmd.tools.small_job",
    "zbmd.transport.rdma_plane",
)
"""Modules that more than one session imports, pytest beside them."""
READ_BYTES: Final = 1 << 16


def main(arguments: Sequence[str]) -> int:
    """Run all turns, also where one has failed."""
    default_to_one_thread()  # before numpy is imported: what has threads is not forked
    import pytest

    for module in SHARED:
        import_module(module)
    failed = 0
    for turn in TURNS:
        running = {name: _fork(pytest.main, [*arguments, *tests]) for name, tests in turn.items()}
        _relay({name: output for name, (_, output) in running.items()})
        for pid, _ in running.values():
            failed |= os.waitpid(pid, 0)[1]
    return int(failed != 0)


def _fork(session: Callable[[list[str]], int], arguments: list[str]) -> tuple[int, int]:
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
    sys.exit(session(arguments))


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
