"""One run of a resilient PyTorch loop that takes in the ranks of a node that joins, for `chaos.loops`.

Each node is `zbmd-node run`, forked from this process, which has imported all that it needs. The second one
is started when a rank says that it waits.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from zbmd.tools.chaos import loop_case, small_job
from zbmd.tools.chaos.loop_case import LINES_MAX, LoopCase, environment_of, outcome_of
from zbmd.tools.chaos.small_job import RUN_S_MAX, JobOutcome
from zbmd.tools.node import cli
from zbmd.transport.errors import UserError
from zbmd.transport.host.process import end_with_parent
from zbmd.transport.tcp.sockets import free_port

STATE_VARIABLE: Final = "ZBMD_STATE_DIR"
WAITS: Final = "waits in a group"
DEATH: Final = re.compile(r"rank \d+ \(pid \d+, incarnation \d+\) failed: killed \(SIGKILL\)")


class _Node:
    """A `zbmd-node run` in a process of its own."""

    def __init__(self, argv: Sequence[str], variables: dict[str, str]) -> None:
        self.out, into = os.pipe()
        self.code: int | None = None
        self._starter = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            end_with_parent(self._starter)
            for fd in (1, 2):
                os.dup2(into, fd)
            os.setsid()
            os.environ.update(variables)
            sys.argv = ["zbmd-node", *argv]
            raise SystemExit(cli.main(argv))  # or the fork of a template, which the worker's entry point runs
        os.close(into)

    def close(self) -> None:
        """End it, if it still runs; its ranks end with it. In the node itself, on its way out: nothing."""
        if os.getpid() == self._starter:
            os.close(self.out)
            if self.code is None:
                os.kill(self.pid, signal.SIGKILL)
                self.wait()

    def wait(self) -> int:
        """Return its exit code, once it has ended."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code


def run_growing(case: LoopCase) -> JobOutcome:
    """Run it once; see `run_loop`. Raises `UserError` as that does."""
    assert case.out is not None
    case.out.mkdir(parents=True)
    lines, nodes = list[str](), list[_Node]()
    address, variables = f"127.0.0.1:{free_port()}", environment_of(case)
    first = case.ranks - case.newcomers
    with selectors.DefaultSelector() as reading:

        def start() -> None:
            argv = _argv(case, address, number=len(nodes))
            more = {
                "FIRST": str(first),
                "EXACT": str(case.ranks),
                STATE_VARIABLE: f"{case.out}/node{len(nodes)}",
            }
            nodes.append(_Node(argv, {**variables, **more}))
            reading.register(nodes[-1].out, selectors.EVENT_READ, bytearray())

        try:
            start()
            _read(reading, lines, start)
            codes = [node.wait() for node in nodes]
        finally:
            for node in nodes:
                node.close()
    told = "\n".join(lines)
    if any(codes):
        raise UserError(f"with {case.fault!r} the loop did not finish: its nodes ended with {codes}\n{told}")
    deaths = tuple(found[0] for line in lines if (found := DEATH.search(line)))
    return outcome_of(case, lines, deaths)


def _argv(case: LoopCase, address: str, *, number: int) -> list[str]:
    assert case.out is not None
    where = ["--nnodes", "1:2", "--rdzv-endpoint", address, "--node-rank", str(number)]
    how = ["-n", str(case.newcomers), "--on-loss", "shrink", "--arena", "32MiB", "--snapshots", "off"]
    preload = ["--preload", ",".join(loop_case.PRELOAD)]
    target = [str(case.program), case.mode, str(case.out)]
    if case.counts is not None:
        target = ["-m", small_job.__name__, str(case.counts), *target]
    return ["run", *where, *how, *preload, *target]


def _read(reading: selectors.BaseSelector, lines: list[str], start_second: Callable[[], None]) -> None:
    """Read what nodes say until all have ended. Raises `UserError` if that takes too long."""
    until_s, has_started = time.monotonic() + RUN_S_MAX, False
    while reading.get_map():
        left_s = until_s - time.monotonic()
        if left_s <= 0 or len(lines) > LINES_MAX:
            told = "\n".join(lines)
            raise UserError(f"the run hung: it was not over after {RUN_S_MAX} s\n{told}")
        for key, _ in reading.select(left_s):
            data = os.read(key.fd, 1 << 16)
            if not data:
                reading.unregister(key.fd)
                continue
            key.data.extend(data)
            *whole, rest = bytes(key.data).split(b"\n")
            key.data[:] = rest
            lines += [line.decode(errors="replace") for line in whole]
            if not has_started and any(WAITS.encode() in line for line in whole):
                has_started = True
                start_second()
