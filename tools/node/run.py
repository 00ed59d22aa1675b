"""`zbmd-node run`: check the request, run the job, and report its end."""

from __future__ import annotations

import asyncio
import glob
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import platform
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import zbmd
from zbmd.actors.cluster.jobs.code_digest import code_of
from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.hosted_job import keeps_memory
from zbmd.actors.cluster.jobs.rank_processes import PRELOAD
from zbmd.actors.cluster.jobs.reports import RunResult
from zbmd.actors.process.debugger import TERMINAL_VARIABLE, terminal_of_run
from zbmd.actors.process.early_template import EarlyTemplate
from zbmd.actors.rank.environment import (
    ARENA_BYTES_MIN,
    FLIGHTS_DIRECTORY,
    FLIGHTS_VARIABLE,
    HOST_MEMORY_VARIABLE,
    SPARE_RANKS_VARIABLE,
)
from zbmd.actors.replay.process_capture import CAPTURE_BULK_VARIABLE, CAPTURE_VARIABLE, LOG_DIR_VARIABLE
from zbmd.actors.snapshots.client import tag_of
from zbmd.actors.snapshots.keeper import SnapshotKeeper
from zbmd.actors.snapshots.messages import JobIdentity
from zbmd.actors.view import Outcome
from zbmd.tools.cli.console import Console
from zbmd.tools.cli.launch_settings import Settings, spares_of
from zbmd.tools.node.guard.guards import GuardEvent, GuardLost, Guards, GuardSignalled, StopRequests, hearing
from zbmd.tools.node.narration import RunNarrator
from zbmd.tools.node.recorder import LaunchRecorder
from zbmd.tools.node.signals import STOP_SIGNALS, forwarded, handling
from zbmd.transport.clock.deadlines import SECOND_NS, format_duration
from zbmd.transport.errors import UserError
from zbmd.transport.memory.memfd import available_memory, in_words

TRAIN_VARIABLES = ("ZBMD_TRAIN_", "ZBMD_DATA")
"""Beginnings of variables that are settings of what a job trains."""
RUN_CHARACTERS_MAX = 4096
"""Of a command line, in what holds its state."""
RANK_BYTES = 96 << 20
"""Approximate memory of a rank beside its arena: interpreter, inbox, rings."""
SNAPSHOTS_PROGRAM = "zbmd.training.run.snapshots"
"""Of a process that holds states, and writes checkpoints of them."""
OWN_PACKAGE = "zbmd."
OWN_JOBS = {
    "zbmd.training.sharded": "zbmd.training.sharded.__main__",
    "zbmd": "zbmd.tools.train.command",
}
"""Targets of `-m` whose options are checked before any rank is started, and the module with `check`."""
MORE_PRELOADS = ("zbmd.collectives.group.group",)  # what `import zbmd` finds only when it is used
LOOP_PRELOADS = ("torch", "torch._dynamo", "zbmd.training.torch.resilient")
"""Modules of a resilient loop, the second one for its first optimizer: 2 s for each process without them."""


class OwnJob(Protocol):
    """A job of zbmd's own, as a module."""

    def check(self, argv: Sequence[str], *, ranks: int, data: str | None) -> None:
        """Raise `UserError` for what it cannot do on `ranks` ranks of this host, before one is started.

        data: what ranks will have as ZBMD_DATA.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCommand:
    """The script or module of a run. `target`: a path, or with `is_module` a module's name."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """Return them as they are given to the launcher."""
        return (*(("-m", self.target) if self.is_module else (self.target,)), *self.arguments)


def check(job: JobCommand, settings: Settings) -> None:
    """Raise `UserError` for what cannot work, before anything is started."""
    for name in settings["preload"]:
        _check_module(name)
    if job.is_module:
        _check_module(job.target)
    else:
        script = Path(job.target)
        if script.is_dir() and not (script / "__main__.py").exists():
            raise UserError(f"{script} is a directory without a __main__.py. Give a script's path.")
        if not script.exists():
            raise UserError(
                f"there is no script {script} (looked in {Path.cwd()}). Give the path of a Python file, "
                "or -m and a module's name."
            )
    ranks, arena_bytes = settings["nproc_per_node"], settings["arena"]
    available = available_memory()
    spares = spares_of(settings)
    needed_bytes = ranks * arena_bytes + (ranks + spares) * RANK_BYTES
    if needed_bytes > available.nbytes:
        raise UserError(
            f"{ranks} ranks with an arena of {in_words(arena_bytes)} each need about "
            f"{in_words(needed_bytes)}, but {available.limited_by} has {in_words(available.nbytes)} "
            f"available. {_less_memory(ranks, arena_bytes, available.nbytes)}"
        )
    nodes, stdin = settings["nnodes"], settings["stdin"]
    size = ranks * (1 if nodes is None else nodes.most)
    if stdin is not None and stdin >= size:
        raise UserError(f"--stdin: there is no rank {stdin}: a run of {size} has 0 to {size - 1}")
    data = settings["data"]
    if data is not None and not glob.glob(data, recursive=True):
        raise UserError(f"--data {data} matches no file. Give a file, a directory or a glob that does.")


def check_own(job: JobCommand, settings: Settings) -> None:
    """Have a job of zbmd's own say what it cannot do on these ranks, all of this host: raises `UserError`.

    Its ranks need what it imports for that, too: they are forked from here.
    """
    if job.is_module and job.target in OWN_JOBS:
        name = OWN_JOBS[job.target]
        own = cast(OwnJob, importlib.import_module(name))
        del sys.modules[name]  # ranks run it as their program, and would warn of a second copy
        own.check(job.arguments, ranks=settings["nproc_per_node"], data=settings["data"])


def _less_memory(ranks: int, arena_bytes: int, available_bytes: int) -> str:
    """Return what to ask for instead."""
    arena_bytes_max = available_bytes // ranks - RANK_BYTES
    ranks_max = available_bytes // (arena_bytes + RANK_BYTES)
    choices: list[str] = []
    if arena_bytes_max >= ARENA_BYTES_MIN:
        choices.append(f"--arena {arena_bytes_max >> 20}MiB or less")
    if ranks_max > 0:
        choices.append(f"-n {ranks_max} or less")
    return f"Give {' or '.join(choices)}." if choices else "Free some memory, or raise the limit."


def _check_module(name: str) -> None:
    sys.path.insert(0, str(Path.cwd()))
    try:
        # Of a dotted name only the first part: to find more, the package would have to run here.
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    finally:
        del sys.path[0]
    if found is None:
        raise UserError(
            f"there is no module {name} (looked in {Path.cwd()} and the installed packages). Give a module's "
            "dotted name, or a script's path without -m."
        )


def host_variables(settings: Settings) -> dict[str, str]:
    """Variables for the ranks of this host alone."""
    environment = {HOST_MEMORY_VARIABLE: str(available_memory().nbytes)}
    if (terminal := terminal_of_run()) is not None:
        environment[TERMINAL_VARIABLE] = terminal.path
    if settings["log_dir"] is not None:
        log_dir = Path(settings["log_dir"]).absolute()
        environment[LOG_DIR_VARIABLE] = str(log_dir)
        if FLIGHTS_VARIABLE not in os.environ:
            environment[FLIGHTS_VARIABLE] = str(log_dir / FLIGHTS_DIRECTORY)
    if settings["capture"] is not None:
        environment[CAPTURE_VARIABLE] = str(Path(settings["capture"]).absolute())
        environment[CAPTURE_BULK_VARIABLE] = settings["capture_bulk"].value
    return environment


def host_config(job: JobCommand, settings: Settings, variables: Mapping[str, str]) -> HostConfig:
    """Return the configuration of a job on this host alone. variables: more of them for the ranks."""
    return job_config(job, settings, {**variables, **host_variables(settings)})


def job_config(job: JobCommand, settings: Settings, variables: Mapping[str, str]) -> HostConfig:
    """Return the configuration of a job's part on one host. variables: for the ranks."""
    environment = dict(variables)
    if settings["data"] is not None:
        environment["ZBMD_DATA"] = settings["data"]
    environment[SPARE_RANKS_VARIABLE] = str(settings["spare_ranks"])
    return HostConfig(
        target=job.target,
        is_module=job.is_module,
        arguments=job.arguments,
        world_size=settings["nproc_per_node"],
        on_loss=settings["on_loss"],
        max_restarts=settings["max_restarts"],
        restart_window_s=settings["restart_window"],
        arena_bytes=settings["arena"],
        recovery_budget_ns=round(settings["recovery_budget"] * 1e9),
        progress_deadline_ns=round(settings["progress_deadline"] * 1e9),
        on_hang=settings["on_hang"],
        stop_grace_ns=round(settings["stop_grace"] * 1e9),
        start_timeout_ns=round(settings["start_timeout"] * 1e9),
        environment=environment,
        preload=preload_of(job, settings),
    )


def snapshot_keeper(
    config: HostConfig,
    idle_s: float,
    say: Callable[[str], None],
    *,
    nodes: int = 1,
    number: int | None = None,
) -> SnapshotKeeper | None:
    """Return what keeps the state of a job's ranks on this host beyond this process; None if that is off.

    idle_s: for how long, 0: not at all; say: takes lines for the user; nodes: of the job, at
    most; number: of this one, if its ranks follow from that.
    """
    variables = {**os.environ, **config.environment}
    if not idle_s or not keeps_memory(variables):
        return None
    target = config.target if config.is_module else str(Path(config.target).absolute())
    words = ("-m", target) if config.is_module else (target,)
    node = () if number is None else (f"(node {number})",)
    run = "\0".join((str(Path.cwd()), *words, *config.arguments, *node))
    read = sorted(f"{name}={value}" for name, value in variables.items() if name.startswith(TRAIN_VARIABLES))

    def identity() -> JobIdentity:
        code = repr(code_of(config.target, is_module=config.is_module))
        text = " ".join((str(Path.cwd()), *words, *config.arguments, *node))
        if len(text) > RUN_CHARACTERS_MAX:
            text = f"{text[:RUN_CHARACTERS_MAX]}… {tag_of(run)}"
        return JobIdentity(
            run=text,
            release=zbmd.__version__,
            python=platform.python_version(),
            code=hashlib.blake2b(code.encode(), digest_size=16).hexdigest(),
            ranks=config.world_size * nodes,
            arena_bytes=config.arena_bytes,
            settings=hashlib.blake2b("\0".join(read).encode(), digest_size=16).hexdigest(),
        )

    return SnapshotKeeper(run, identity, round(idle_s * SECOND_NS), say, program=SNAPSHOTS_PROGRAM)


def preload_of(job: JobCommand, settings: Settings) -> tuple[str, ...]:
    """Return the modules that the template imports before it forks ranks.

    `torch` and `zbmd.torch` bring those of loops with them: a replacement would import them while all wait.
    """
    given = settings["preload"]
    loops = LOOP_PRELOADS if {"torch", "zbmd.torch"} & {*given} else ()
    return tuple(dict.fromkeys((*PRELOAD, *MORE_PRELOADS, *own_modules(job), *loops, *given)))


def own_modules(job: JobCommand) -> tuple[str, ...]:
    """Return what a job that is a package of zbmd itself imports, so that a replacement need not do it again.

    A user's module is not imported before the fork: what it does then may not survive one.
    """
    if not job.is_module or not job.target.startswith(OWN_PACKAGE):
        return ()
    found = importlib.util.find_spec(job.target)
    folders = found.submodule_search_locations if found is not None else None
    # The packages below it, too. A package is searched by importing it: those of zbmd hold no code.
    modules = pkgutil.walk_packages(folders, f"{job.target}.") if folders else ()
    return tuple(sorted(each.name for each in modules if not each.name.endswith(".__main__")))


async def run_job(
    config: HostConfig,
    template: EarlyTemplate | None,
    *,
    stdin_rank: int | None = None,
    signals: Sequence[str] | None = None,
    guards: Guards | None = None,
    snapshots_s: float = 0.0,
    record: LaunchRecorder | None = None,
) -> int:
    """Run the job on this terminal; returns the exit code.

    template, stdin_rank: see `Host`; signals: more to forward, by name; guards: the others of this host, all
    there, where each rank has one; snapshots_s: the time for which its state outlives this process, 0: none;
    record: takes what becomes of it.
    """
    loop = asyncio.get_running_loop()
    async with Console(hold_last_words=True) as console:
        story = RunNarrator(console, lambda: host.ranks, record)
        notes: list[asyncio.Task[None]] = []

        def note(words: str) -> None:
            notes.append(loop.create_task(console.note(words)))

        host = Host(
            config,
            output=console if guards is None else guards.output(console),
            observer=story.observe if guards is None else guards.observer(story.observe),
            template=template,
            stdin_rank=stdin_rank,
            per_rank=() if guards is None else guards.variables(),
            snapshots=snapshot_keeper(config, snapshots_s, note),
        )
        running = loop.create_task(host.run())
        received: list[signal.Signals] = []
        asked = StopRequests()

        def on_signal(number: signal.Signals, local_rank: int = 0) -> None:
            if (at_once := asked.ask(local_rank)) is None:
                return
            received.append(number)
            host.stop(f"{number.name} received", kill=at_once)
            if len(received) == 1 and host.started:
                grace = format_duration(config.stop_grace_ns)
                words = f"{number.name} received: ranks have {grace} to end (--stop-grace)"
                note(f"{words}; once more to end at once")
            elif len(received) == 1:
                running.cancel()  # the template still imports, and nobody else is there to be stopped

        def on_forwarded(number: signal.Signals, local_rank: int | None = None) -> None:
            rank = 0 if guards is not None and local_rank is None else local_rank
            if words := forwarded(number, partial(host.forward, local_rank=rank), more=signals):
                note(words)

        on_guard = partial(_guard_spoke, host, on_signal, on_forwarded)
        try:
            with handling(on_signal, on_forwarded, more=signals), hearing(guards, on_guard):
                result = await running
        except asyncio.CancelledError:
            if not received:
                raise
            await console.note(f"stopped: {received[0].name} received before any rank had started")
            return 128 + received[0]
        finally:
            await asyncio.gather(*notes)
        if record is not None:
            record.over(result)
        return await _ended(console, story, result, received)


def _guard_spoke(
    host: Host,
    on_signal: Callable[[signal.Signals, int], None],
    on_forwarded: Callable[[signal.Signals, int], None],
    event: GuardEvent,
) -> None:
    match event:
        case GuardLost():
            host.stop(event.reason, failed=True)
        case GuardSignalled(number=number, local_rank=local_rank):
            (on_signal if number in STOP_SIGNALS else on_forwarded)(number, local_rank)


async def _ended(
    console: Console, story: RunNarrator, result: RunResult, received: Sequence[signal.Signals]
) -> int:
    """Report how a run ended; return the exit code."""
    if result.outcome is Outcome.FAILED:
        await story.failed(result)
    elif result.outcome is Outcome.STOPPED:
        await console.note(f"stopped: {result.reason}")
    if result.outcome is Outcome.STOPPED and received:
        return 128 + received[0]
    return result.exit_code
