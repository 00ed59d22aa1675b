"""`python -m zbmd.torch.run`: read the place of this process from its launcher, and do what is due there.

The guards of several hosts find each other in torchrun's store, with a cookie of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import uvloop

from zbmd.actors.bootstrap.environments import (
    LauncherFacts,
    ProcessPlacement,
    read_mpi,
    read_slurm,
    read_torchrun,
)
from zbmd.actors.bootstrap.merge import IN_A_RANK, Bootstrap, Role, bootstrap_of
from zbmd.actors.process.early_template import fork_template
from zbmd.actors.process.exit import USAGE_EXIT_CODE, ending_at_broken_invariant
from zbmd.actors.process.log import log_to_stderr
from zbmd.tools.cli import launch
from zbmd.tools.cli.launch_settings import Settings, stated
from zbmd.tools.cli.settings import SETTINGS, merge
from zbmd.tools.node import run_many
from zbmd.tools.node.cli import begun
from zbmd.tools.node.dashboard import opened
from zbmd.tools.node.guard.guards import Guards, follow
from zbmd.tools.node.guard.messages import address_of_guards
from zbmd.tools.node.recorder import LaunchRecorder, recording
from zbmd.tools.node.run import LOOP_PRELOADS, JobCommand, check, preload_of
from zbmd.tools.node.run_many import NodeRun
from zbmd.transport.errors import DeadlineExceeded, PeerLost, UserError, ZbmdError
from zbmd.transport.tcp.address import parse_address

COOKIE_FILE: Final = "ZBMD_COOKIE_FILE"
_MEETS: Final = "from zbmd.collectives.torch.guards import main; main()"
_NEEDED: Final = ("MASTER_ADDR", "MASTER_PORT")


def has_store(variables: Mapping[str, str]) -> bool:
    """Return whether the launcher is torchrun, whose agent serves a store to its processes."""
    agents = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return agents and all(variables.get(name) for name in _NEEDED)


def make_cookie_file() -> int:
    """Have this process, and those that it forks, read the cookie from memory; return its descriptor.

    Nothing of it is left when this process ends.
    """
    fd = os.memfd_create("zbmd-cookie", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.environ[COOKIE_FILE] = f"/proc/{os.getpid()}/fd/{fd}"
    return fd


@asynccontextmanager
async def met(
    plan: NodeRun, facts: LauncherFacts, variables: Mapping[str, str], cookie_fd: int
) -> AsyncGenerator[NodeRun]:
    """Meet the guards of the other hosts; yield the plan with the address that nodes join at.

    cookie_fd: from `make_cookie_file`, is filled. Raises `PeerLost`, `DeadlineExceeded`.
    """
    assert facts.node is not None and facts.nodes is not None
    number, count = facts.node.value, facts.nodes.value.most
    limit_s = plan.patience_ns / 1e9
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = (
        variables["MASTER_ADDR"],
        variables["MASTER_PORT"],
        attempt,
        str(number),
        str(count),
        f"{limit_s:g}",
    )
    # -P: the working directory must not shadow what it imports.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", _MEETS, str(os.getpid()), *place, stdin=PIPE, stdout=PIPE
    )
    try:
        async with asyncio.timeout(limit_s):
            os.write(cookie_fd, f"{await _line(process)}\n".encode())
            joins = "" if number == 0 else await _line(process)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the guards of {count} hosts did not meet within {limit_s:g} s: see whether torchrun has "
            "started them on all hosts, or raise --join-timeout"
        ) from None
    else:
        addresses = tuple(parse_address(address) for address in joins.split(",") if address)
        bootstrap = dataclasses.replace(plan.bootstrap, join_addresses=addresses, port=0)
        tell = _teller(process) if number == 0 else None
        yield dataclasses.replace(plan, bootstrap=bootstrap, on_began=tell)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _teller:
    """Write the address of the first host's node to the process beside this one, once."""

    def __init__(self, process: Process) -> None:
        self._process, self._told = process, False

    def __call__(self, address: str) -> None:
        if not self._told and self._process.stdin is not None:
            self._told = True
            self._process.stdin.write(f"{address}\n".encode())


async def _line(process: Process) -> str:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise PeerLost("the guards of the other hosts", "the meeting failed: see standard error")
    return line.decode().strip()


PROGRAM: Final = "zbmd.torch.run"
EXAMPLES: Final = """\
examples:
  torchrun --nproc-per-node 4 -m zbmd.torch.run train.py --lr 3e-4
  torchrun --nproc-per-node 4 -m zbmd.torch.run -m package.module
  torchrun --nnodes 2 --node-rank 0 --master-addr HOST0 -m zbmd.torch.run train.py
  srun --kill-on-bad-exit=0 python -m zbmd.torch.run train.py
  mpirun -n 4 python -m zbmd.torch.run train.py
  torchrun --nproc-per-node 4 -m zbmd.torch.run --max-restarts 10 train.py
"""
OF_THE_LAUNCHER: Final = frozenset(
    [
        *("nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "rdzv_backend", "rdzv_id"),
        *("master_addr", "master_port", "role", "service", "store", "stdin"),
    ]
)
"""Settings of `zbmd-node run` that the launcher of the guards decides."""
TORCHRUNS: Final = "PET_"
"""Begins variables with torchrun's own options, such as its --max-restarts."""
OF_ENV: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that together name a rank under a launcher that is not known by its own variables."""
AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
KEPT: Final[tuple[str, ...]] = ("TORCHELASTIC_RUN_ID", "ROLE_NAME")
"""Variables that ranks have as torchrun sets them."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See python -m {PROGRAM} --help.")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = _Parser(
        prog=f"python -m {PROGRAM}",
        description="Run a rank of torchrun, srun or mpirun as a supervised process, replaced in place.\n"
        "The launcher notices nothing, and the other ranks go on. Start it once for each rank.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for setting in SETTINGS:
        if setting.name not in OF_THE_LAUNCHER:
            launch.add_setting(top, setting)
    top.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML, by the options' names")
    top.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    top.add_argument("target", metavar="SCRIPT", help="a Python script, or with -m a module")
    top.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    return top


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The rank that this process stands for.

    place: among the ranks of its host; facts: all that its launcher says; variables: of its environment,
    without torchrun's own settings.
    """

    place: ProcessPlacement
    facts: LauncherFacts
    variables: Mapping[str, str]


def place_of(environment: Mapping[str, str]) -> Place:
    """Return what the launcher says of this process. Raises `UserError`, if there is no launcher."""
    if IN_A_RANK in environment:
        raise UserError(
            f"this process is a rank of `zbmd-node run` or {PROGRAM}, which replaces it already: start the "
            "script itself"
        )
    variables = {name: value for name, value in environment.items() if not name.startswith(TORCHRUNS)}
    facts = _facts(variables)
    if facts is None and all(variables.get(name) for name in OF_ENV):
        variables = {**variables, **_as_torchruns(variables)}
        facts = read_torchrun(variables)
    if facts is None or facts.place is None:
        raise UserError(
            "expected to be started by torchrun, srun or mpirun once for each rank, or with "
            f"{', '.join(OF_ENV)} in the environment, and found the variables of none of them. Without a "
            "launcher, use: zbmd-node run SCRIPT"
        )
    return Place(place=facts.place.value, facts=facts, variables=variables)


def _facts(variables: Mapping[str, str]) -> LauncherFacts | None:
    """Return what the innermost launcher says, in the order of `zbmd.actors.bootstrap.merge`."""
    return read_torchrun(variables) or read_mpi(variables) or read_slurm(variables)


def _as_torchruns(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would set beside the variables of `env://`. Raises `UserError`."""
    try:
        group = int(variables["RANK"]) // int(variables["LOCAL_WORLD_SIZE"])
    except (ValueError, ZeroDivisionError):
        raise UserError(
            f"RANK={variables['RANK'][:32]!r} and LOCAL_WORLD_SIZE={variables['LOCAL_WORLD_SIZE'][:32]!r}: "
            "expected a rank, and the number of ranks on this host"
        ) from None
    run = f"{variables['MASTER_ADDR']}-{variables['MASTER_PORT']}"
    return {"TORCHELASTIC_RUN_ID": run, "GROUP_RANK": str(group)}


def settings_of(arguments: argparse.Namespace, where: Place) -> Settings:
    """Return the merged settings. Raises `UserError`."""
    on_line = {setting.name: getattr(arguments, setting.name, None) for setting in SETTINGS}
    settings = merge(on_line, where.variables, arguments.config)
    settings = settings.with_value("nproc_per_node", where.place.count, "the launcher")
    preload = tuple(dict.fromkeys((*LOOP_PRELOADS, *settings["preload"])))
    return settings.with_value("preload", preload, settings.source("preload"))


def supervise(job: JobCommand, settings: Settings, where: Place) -> int:
    """Supervise the ranks of this host, for all of its guards; return the exit code. Raises `ZbmdError`."""
    bootstrap = bootstrap_of(where.variables, stated(settings))
    for note in bootstrap.notes if bootstrap.role is not Role.ALONE else ():
        print(f"{PROGRAM}: {note}", file=sys.stderr)
    with recording(job.words, settings, bootstrap.nodes.most) as record:
        return _supervise(job, settings, where, bootstrap, record)


def _supervise(
    job: JobCommand, settings: Settings, where: Place, bootstrap: Bootstrap, record: LaunchRecorder
) -> int:
    check(job, settings)
    print(f"{PROGRAM}: {launch.threads_in_words(where.place.count, where.variables)}", file=sys.stderr)
    running = _begun(job, settings, bootstrap, where, record)
    address, patience_s = address_of_guards(where.variables), float(settings["join_timeout"])
    guarded = _guarded(running, address, where.place.count, patience_s)
    return uvloop.run(ending_at_broken_invariant(guarded))


def _begun(
    job: JobCommand, settings: Settings, bootstrap: Bootstrap, where: Place, record: LaunchRecorder
) -> Callable[[Guards], Coroutine[Any, Any, int]]:
    """See `begun`. Guards of several hosts meet in torchrun's store, if there is one."""
    variables = variables_of_ranks(settings, where.variables)
    if bootstrap.role is Role.ALONE or not has_store(where.variables):
        return begun(job, settings, bootstrap, variables, record)
    dashboard = opened(settings["dashboard"])
    record.listen()
    cookie_fd = make_cookie_file()
    plan = run_many.NodeRun(
        job=job, settings=settings, bootstrap=bootstrap, variables=variables, record=record
    )
    template = fork_template(preload_of(plan.job, plan.settings), run_many.local_variables(plan))

    async def running(guards: Guards) -> int:
        async with met(plan, where.facts, where.variables, cookie_fd) as found:
            return await run_many.run_over_nodes(found, template, guards)

    return running if dashboard is None else dashboard.beside(running)


def variables_of_ranks(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that scripts for torchrun read and that all ranks share."""
    # The agent of torchrun has its port open, where rank 0 of the script would listen.
    agents = environment.get(AGENT_STORE) == "True"
    own = {name: value for name, value in environment.items() if not (agents and name == "MASTER_PORT")}
    kept = {name: own[name] for name in KEPT if name in own}
    return {**launch.rank_variables(settings, own), **kept}


async def _guarded(
    running: Callable[[Guards], Coroutine[Any, Any, int]], address: str, count: int, patience_s: float
) -> int:
    guards = Guards(address, count, patience_s)
    with guards.open():
        await guards.gathered()
        code = await running(guards)
        return await guards.over(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    log_to_stderr()
    try:
        arguments = parser().parse_args(argv)
        where = place_of(os.environ)
        settings = settings_of(arguments, where)
        local_rank = where.place.index
        if local_rank > 0:
            return follow(
                address_of_guards(where.variables),
                local_rank,
                patience_s=settings["join_timeout"],
                signals=settings["signals_to_handle"] or (),
            )
        job = JobCommand(
            target=arguments.target, is_module=arguments.module, arguments=tuple(arguments.arguments)
        )
        return supervise(job, settings, where)
    except UserError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped: SIGINT received", file=sys.stderr)
        return 128 + signal.SIGINT
    except ZbmdError as error:
        print(f"{PROGRAM}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
