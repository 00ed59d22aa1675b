"""Kinds of faults: how each is injected into a real launch, and what a diagnosis of it has to say."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zbmd.tools.lab.faults.launch import Launched, launched, memory_limit
from zbmd.tools.lab.faults.slow import write_slow_run
from zbmd.tools.telemetry.diagnosis.findings import Cause

PROGRAMS: Final = Path(__file__).parent / "programs"
GROUP: Final = PROGRAMS / "group_faults.py"
TASK: Final = PROGRAMS / "task_faults.py"
SCRIPTS: Final = ("train.py", "finetune.py", "main.py", "pretrain_lm.py")
"""Names under which the programs are run, as if they were a user's."""
WORDS: Final = ("shard-3", "north", "train_b", "wiki", "blue", "réseau")
END_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """One case, as its seed draws it. who: the rank with the fault; size: of arrays; word: in messages."""

    kind: str
    seed: int
    ranks: int
    who: int
    step: int
    size: int
    word: str
    script: str
    directory: Path = field(default=Path())

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of the group's program."""
        return (self.kind, str(self.step), str(self.who), str(self.size), self.word)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault. cause: the right one, None: there is none; names: whether a rank is to blame.

    line: the marker of the line that is to be named, if there is one; target: what is diagnosed, in the
    directory of the case.
    """

    name: str
    cause: Cause | None
    inject: Callable[[Drawn], None]
    names: bool = True
    line: str = ""
    ranks: tuple[int, int] = (2, 3)
    target: str = "logs"
    program: Path = GROUP


def drawn(kind: Kind, seed: int, directory: Path) -> Drawn:
    """Draw a case."""
    draw = random.Random(f"{kind.name} {seed}")
    ranks = draw.randint(*kind.ranks)
    return Drawn(
        kind=kind.name,
        seed=seed,
        ranks=ranks,
        who=draw.randrange(ranks),
        step=draw.randint(3, 12),
        size=draw.choice((1, 16, 500, 5000, 70000)),
        word=draw.choice(WORDS),
        script=draw.choice(SCRIPTS),
        directory=directory,
    )


def _script(drawn: Drawn, program: Path) -> str:
    """Copy a program to where a user has his; return its name there."""
    shutil.copyfile(program, drawn.directory / drawn.script)
    return drawn.script


def _options(drawn: Drawn) -> tuple[str, ...]:
    return ("run", "-n", str(drawn.ranks), "--log-dir", "logs", "--on-loss", "stop", "--stop-grace", "1s")


def _group(drawn: Drawn) -> None:
    with launched(drawn.directory, (*_options(drawn), _script(drawn, GROUP), *drawn.arguments)) as job:
        job.end(END_S)


def _hang(drawn: Drawn) -> None:
    """As `_group`, until the hang is reported; then end the job as its user would."""
    options = (*_options(drawn), "--progress-deadline", "1s")
    told = {"deadlock": "a deadlock", "stopped": "is stopped"}.get(drawn.kind, "in (break_off|wait_for_pipe)")
    with launched(drawn.directory, (*options, _script(drawn, GROUP), *drawn.arguments)) as job:
        job.until(rf"no progress: .*{told}", END_S)
        os.kill(job.pid, signal.SIGTERM)
        job.end(END_S)


def _oom(drawn: Drawn) -> None:
    argv = (*_options(drawn), _script(drawn, GROUP), *drawn.arguments)
    with (
        memory_limit(drawn.directory.name) as enter,
        launched(drawn.directory, argv, enter=enter) as job,
    ):
        job.end(END_S)


def _launcher(drawn: Drawn) -> None:
    arguments = ("launcher", *drawn.arguments[1:])
    options = ("run", "-n", str(drawn.ranks), "--log-dir", "logs")
    with launched(drawn.directory, (*options, _script(drawn, GROUP), *arguments)) as job:
        job.until("at the step", END_S)
        os.kill(job.pid, signal.SIGKILL)
        job.end(END_S)


def _node(drawn: Drawn) -> None:
    """Two nodes on this host; one is killed, and the job cannot go on without it."""
    arguments = ("launcher", *drawn.arguments[1:])
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{door.getsockname()[1]}"
    common = (
        "run",
        "--nnodes",
        "2",
        "-n",
        "1",
        "--rdzv-endpoint",
        address,
        "--log-dir",
        "logs",
        "--on-loss",
        "stop",
    )
    with ExitStack() as stack:
        jobs = list[Launched]()
        for number in range(2):
            more = ("--node-rank", str(number), "--join-timeout", "60s", "--on-loss", "stop")
            line = (*common, *more, _script(drawn, GROUP), *arguments)
            jobs.append(stack.enter_context(launched(drawn.directory, line, printed=f"printed-{number}.log")))
        jobs[0].until("at the step", END_S)
        os.kill(jobs[drawn.seed % 2].pid, signal.SIGKILL)
        for job in jobs:
            job.end(END_S)


def _port(drawn: Drawn) -> None:
    with socket.create_server(("", 0)) as taken:
        port = ("--master-port", str(taken.getsockname()[1]))
        with launched(
            drawn.directory, (*_options(drawn), *port, _script(drawn, GROUP), *drawn.arguments)
        ) as job:
            job.end(END_S)


def _task(drawn: Drawn) -> None:
    _run_task(drawn, drawn.kind)


def _run_task(drawn: Drawn, fault: str, *more: str) -> None:
    arguments = (fault, str(drawn.step), str(drawn.who), str(drawn.seed), "run", *more)
    # A snapshot process would write the checkpoints, and keep the state for the next run of this directory.
    options = ("run", "-n", str(drawn.ranks), "--on-loss", "stop", "--stop-grace", "1s", "--snapshots", "off")
    with launched(drawn.directory, (*options, _script(drawn, TASK), *arguments)) as job:
        job.end(END_S)


def _taken(drawn: Drawn) -> None:
    _run_task(drawn, "none")
    _run_task(drawn, "none")


def _damaged(drawn: Drawn) -> None:
    _run_task(drawn, "none")
    run = drawn.directory / "run"
    damaged = [path for path in run.iterdir() if "checkpoint" in path.name and path.suffix != ".tmp"]
    draw = random.Random(drawn.seed)
    for path in damaged:
        data = bytearray(path.read_bytes())
        for _ in range(8):
            data[draw.randrange(len(data))] ^= 0xFF
        path.write_bytes(bytes(data[: max(8, len(data) - draw.randrange(64))]))
    _run_task(drawn, "none", "run")


def _world_size(drawn: Drawn) -> None:
    mesh = f"dp={drawn.ranks + 1 + drawn.seed % 3}"
    shape = ("--width", "16", "--heads", "2", "--layers", "1", "--context", "8", "--steps", "4")
    line = (*_options(drawn), "-m", "zbmd", "train", "--mesh", mesh, *shape, "--out", "run")
    with launched(drawn.directory, line) as job:
        job.end(END_S)


def _slow(cause: str) -> Callable[[Drawn], None]:
    def write(drawn: Drawn) -> None:
        slower = 0.15 + 0.05 * (drawn.seed % 7)
        run = drawn.directory / "logs"
        write_slow_run(run, cause=cause, who=drawn.who, ranks=drawn.ranks, seed=drawn.seed, slower=slower)

    return write


def _quiet(drawn: Drawn) -> None:
    run = drawn.directory / "logs"
    write_slow_run(run, cause="none", who=drawn.who, ranks=drawn.ranks, seed=drawn.seed, slower=0.0)


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("killed", Cause.KILLED, _group),
        Kind("exception", Cause.EXCEPTION, _group, line="exception"),
        Kind("exception-all", Cause.EXCEPTION, _group, names=False, line="exception"),
        Kind("crashed", Cause.CRASHED, _group),
        Kind("aborted", Cause.CRASHED, _group),
        Kind("memory", Cause.MEMORY, _group, line="memory"),
        Kind("oom", Cause.MEMORY, _oom),
        Kind("exited", Cause.EXITED, _group),
        Kind("busy", Cause.BUSY, _hang, line="busy"),
        Kind("lock", Cause.LOCK, _hang, line="lock"),
        Kind("wait", Cause.WAIT, _hang, line="wait"),
        Kind("stopped", Cause.STOPPED, _hang),
        Kind("deadlock", Cause.DEADLOCK, _hang, names=False),
        Kind("skipped", Cause.LEFT, _group),
        Kind("shape", Cause.SHAPE, _group, line="shape", ranks=(3, 3)),
        Kind("dtype", Cause.DTYPE, _group, line="dtype", ranks=(3, 3)),
        Kind("order", Cause.ORDER, _group, line="order", ranks=(3, 3)),
        Kind("import", Cause.IMPORT, _group, line="import"),
        Kind("disk", Cause.DISK, _group, line="disk"),
        Kind("launcher", Cause.LAUNCHER, _launcher, names=False),
        Kind("node", Cause.NODE, _node, names=False),
        Kind("port", Cause.ADDRESS, _port, names=False),
        Kind("nan", Cause.NOT_FINITE, _task, names=False, target="run"),
        Kind("bits", Cause.BITS, _task, target="run"),
        Kind("checkpoint-disk", Cause.DISK, lambda d: _run_task(d, "disk"), names=False, target="run"),
        Kind("checkpoint-damaged", Cause.CHECKPOINT, _damaged, names=False, target="state/zbmd"),
        Kind("directory", Cause.DIRECTORY, _taken, names=False, target="state/zbmd"),
        Kind("world-size", Cause.WORLD_SIZE, _world_size, names=False),
        Kind("slow-data", Cause.SLOW_DATA, _slow("data")),
        Kind("slow-compute", Cause.SLOW_COMPUTE, _slow("compute")),
        Kind("slow-link", Cause.SLOW_LINK, _slow("link"), ranks=(3, 4)),
        Kind("none", None, _group, names=False),
        Kind("none-even", None, _quiet, names=False),
    )
}


def marked_lines(program: Path, marker: str) -> set[int]:
    """Return the numbers of the lines of a program that bear `# FAULT … marker`."""
    lines = program.read_text().splitlines()
    return {
        number
        for number, line in enumerate(lines, 1)
        if "# FAULT " in line and marker in line.partition("# FAULT ")[2].split()
    }
