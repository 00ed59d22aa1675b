"""A process of `zbmd.tools.lab.bench.training.scaling`: does as many steps as it is asked for, and times
each.

Under `zbmd-node run` it is a rank of the job of `python -m zbmd.training`, held before a step until it is
asked; with `--plain RANK` a loop of the same steps, which talks to nobody.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from typing import BinaryIO

import uvloop

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.tools.bench.peers.control import COMMAND_BYTES_MAX, connect, encode_reply, parse_command, serve
from zbmd.training import __main__ as training
from zbmd.training.replicated.job import JobOptions, open_recipe, run_job
from zbmd.training.replicated.plain import PlainTrainer
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns


class _Turns:
    """Holds a rank's job before each turn until the benchmark asks for it."""

    def __init__(self, sock: socket.socket, commands: BinaryIO) -> None:
        self._sock = sock
        self._commands = commands
        self._left = 0
        self._began_ns = 0
        self._ns: list[float] = []

    def before_step(self, version: int) -> None:
        """A step is over, but before the first. Raises `UserError` once the benchmark has hung up."""
        if version > 1:
            ended_ns = now_ns()
            self._ns.append(float(ended_ns - self._began_ns))
            self._began_ns = ended_ns
            self._left -= 1
        if self._left == 0:
            self._next_turn(version)

    def _next_turn(self, version: int) -> None:
        if version > 1:
            self._sock.sendall(encode_reply(self._ns))
        line = self._commands.readline(COMMAND_BYTES_MAX)
        if not line:
            raise UserError("the benchmark is over.")
        _, _, self._left = parse_command(line)
        self._ns = []
        self._began_ns = now_ns()


def train(options: JobOptions, control: str) -> None:
    """Be a rank of the job, as far as the benchmark asks."""
    launched = RankEnvironment.read(os.environ)
    rank = 0 if launched is None else launched.rank
    with connect(control, rank) as sock, sock.makefile("rb") as commands:
        uvloop.run(run_job(options, before_step=_Turns(sock, commands).before_step))


def train_plainly(options: JobOptions, control: str, rank: int) -> None:
    """Do the job's steps in a loop, and nothing else."""
    trainer = PlainTrainer(open_recipe(options))

    def measure(_what: str, _nbytes: int, steps: int) -> list[float]:
        times: list[float] = []
        for _ in range(steps):
            began_ns = now_ns()
            trainer.run_step()
            times.append(float(now_ns() - began_ns))
        return times

    serve(control, rank, measure)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the benchmark; the rest of the command line is that of `python -m zbmd.training`."""
    parser = argparse.ArgumentParser(prog="python -m zbmd.tools.lab.bench.training.scaling_rank")
    parser.add_argument("--control", required=True)
    parser.add_argument("--plain", type=int, metavar="RANK")
    own, rest = parser.parse_known_args(argv)
    options = training.options_of(training.parser().parse_args(rest))
    if own.plain is None:
        train(options, own.control)
    else:
        train_plainly(options, own.control, own.plain)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
