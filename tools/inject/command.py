"""`zbmd inject`: slow one rank of a running job, and leave everything as it was at the end.

A **guardian**, a process of its own, undoes everything when the command ends, also by `kill -9`; if the
guardian is killed, the command does it. Busy processes and delays of data end with the command by the
kernel's doing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any, Final

from zbmd.actors.cluster.local_deaths import boot_id, started
from zbmd.tools.cli.options import add_command
from zbmd.tools.inject.effects import (
    PERIOD_S,
    DataDelayed,
    DutyCycle,
    Effect,
    LinkDelay,
    Load,
    Quota,
    Target,
    undo_all,
)
from zbmd.training.job.stragglers.delays import DELAY_MS_MAX
from zbmd.training.profiler.lines import read_profiles
from zbmd.transport.clock.deadlines import format_duration, parse_duration
from zbmd.transport.errors import UserError

LOADS_MAX: Final = 64
SLOW_PERCENT_MAX: Final = 1_000.0


def add_inject(commands: Any) -> None:
    """Add `inject` to the commands of `zbmd`."""
    made = add_command(
        commands,
        "inject",
        "slow a rank of a running job on purpose",
        description=__doc__,
        examples=(
            "zbmd inject zbmd-runs/train --rank 1 --slow 20% --for 60s",
            "zbmd inject zbmd-runs/train --rank 1 --data-delay 30ms --for 60s",
            "zbmd inject zbmd-runs/train --rank 1 --load 2 --nice 5 --for 60s",
            "zbmd inject zbmd-runs/train --rank 1 --cpus 0.5 --for 60s",
            "zbmd inject zbmd-runs/train --rank 1 --link-delay 5ms --interface eth0 --for 60s",
        ),
    )
    made.add_argument("run", type=Path, metavar="RUN", help="the directory of the run, on the rank's host")
    made.add_argument("--rank", type=int, required=True, metavar="R", help="the rank to slow")
    made.add_argument("--for", dest="seconds", required=True, metavar="TIME", help="such as 60s")
    made.add_argument("--slow", metavar="PERCENT", help="longer it takes: stopped again and again (SIGSTOP)")
    made.add_argument("--load", type=int, default=0, metavar="N", help="busy processes on its processors")
    made.add_argument("--nice", type=int, default=0, metavar="K", help="priority of --load, 0 to 19")
    made.add_argument("--cpus", type=float, metavar="X", help="processors that a cgroup lets it use")
    made.add_argument("--data-delay", metavar="TIME", help="that the batch of each step is later")
    made.add_argument("--link-delay", metavar="TIME", help="that packets leave --interface later")
    made.add_argument("--interface", metavar="NAME", help="of --link-delay")
    made.set_defaults(run_command=_inject)


def _inject(arguments: argparse.Namespace) -> int:
    seconds = _seconds("--for", arguments.seconds)
    with closing(target_in(arguments.run, arguments.rank)) as target:
        return _slowed(target, effects_of(arguments, target), arguments.seconds, seconds)


def _slowed(target: Target, effects: Sequence[Effect], text: str, seconds: float) -> int:
    print(
        f"rank {target.rank} (pid {target.pid}) is slowed for {text}",
        file=sys.stderr,
        flush=True,
    )
    ended = _Ended()
    with _Guarded(effects):
        for effect in effects:
            effect.begin()
        if not _during(effects, time.monotonic() + seconds, ended):
            print(f"rank {target.rank} has ended", file=sys.stderr, flush=True)
    print(f"rank {target.rank} is as before", file=sys.stderr, flush=True)
    return 128 + ended.number if ended.number else 0


def _during(effects: Sequence[Effect], until_s: float, ended: _Ended) -> bool:
    """Keep them up; return False if the rank has ended."""
    ticking = [effect for effect in effects if isinstance(effect, DutyCycle)]
    while time.monotonic() < until_s and not ended.number:
        if not all(effect.tick() for effect in ticking):
            return False
        if not ticking:
            time.sleep(PERIOD_S)
    return True


class _Ended:
    """Whether this process was asked to end, by SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number


class _Guarded:
    """A context at whose end everything is undone: by the guardian or, if that is gone, by this process."""

    def __init__(self, effects: Sequence[Effect]) -> None:
        self._effects = effects

    def __enter__(self) -> None:
        read, self._write = os.pipe2(os.O_CLOEXEC)
        self._guardian = os.fork()
        if not self._guardian:
            os.close(self._write)
            _guard(read, self._effects)
        os.close(read)

    def __exit__(self, *_: object) -> None:
        for effect in self._effects:
            if isinstance(effect, Load | DataDelayed):
                effect.undo()
        os.close(self._write)
        if os.waitpid(self._guardian, 0)[1]:
            undo_all(self._effects)


def _guard(read: int, effects: Sequence[Effect]) -> None:
    """Wait until the command ends, and undo everything; never returns."""
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.read(read, 1)
        undo_all([effect for effect in effects if not isinstance(effect, Load | DataDelayed)])
        status = 0
    finally:
        os._exit(status)


def target_in(directory: Path, rank: int) -> Target:
    """Return the process of `rank` of the run in `directory`. Raises `UserError` if it is not on this
    host."""
    runs = [life.run for life in read_profiles(directory) if life.run.rank == rank]
    if not runs:
        raise UserError(f"--rank {rank}: the run in {directory} has had no such rank")
    run = max(runs, key=lambda one: one.unix_ns)
    if run.boot_id != boot_id():
        raise UserError(f"--rank {rank} runs on {run.host}: run this there")
    began_ns = started(run.pid) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    if began_ns != run.process_ns:
        raise UserError(f"--rank {rank} (pid {run.pid}) has ended: the run in {directory} is over")
    return Target(directory, rank, run.pid)


def effects_of(arguments: argparse.Namespace, target: Target) -> list[Effect]:
    """Return what the command line asks for. Raises `UserError`."""
    found: list[Effect] = []
    if not 0 <= arguments.load <= LOADS_MAX or not 0 <= arguments.nice <= 19:
        raise UserError(f"--load: expected 0 to {LOADS_MAX}, and --nice 0 to 19")
    if arguments.load:
        found.append(Load(target, arguments.load, arguments.nice))
    if arguments.data_delay is not None:
        found.append(DataDelayed(target, _milliseconds("--data-delay", arguments.data_delay)))
    if arguments.cpus is not None:
        if not 0.01 <= arguments.cpus <= 1024:
            raise UserError(f"--cpus: expected 0.01 or more, got {arguments.cpus}")
        found.append(Quota(target, arguments.cpus))
    if arguments.link_delay is not None:
        if arguments.interface is None:
            raise UserError("--link-delay: name the --interface that the rank's packets leave by")
        found.append(LinkDelay(arguments.interface, _milliseconds("--link-delay", arguments.link_delay)))
    if arguments.slow is not None:
        found.append(DutyCycle(target, 1 + _percent(arguments.slow) / 100))
    if not found:
        raise UserError("nothing to do: give --slow, --load, --cpus, --data-delay or --link-delay")
    return found


def _percent(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not 0 < percent <= SLOW_PERCENT_MAX:
        raise UserError(f"--slow: expected 1% to {SLOW_PERCENT_MAX:.0f}%, got {text!r}")
    return percent


def _seconds(option: str, text: str) -> float:
    try:
        return parse_duration(text)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None


def _milliseconds(option: str, text: str) -> float:
    found = _seconds(option, text) * 1e3
    if not 0 < found <= DELAY_MS_MAX:
        raise UserError(f"{option}: expected up to {format_duration(DELAY_MS_MAX * 1_000_000)}, got {text!r}")
    return found
