"""`zbmd-node`: run jobs on one host or several, show what runs, check the machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import zbmd
from zbmd.actors.process.exit import REQUEUE_EXIT_CODE, USAGE_EXIT_CODE
from zbmd.actors.process.log import log_to_stderr
from zbmd.tools.cli import process
from zbmd.transport.errors import UserError, ZbmdError

if TYPE_CHECKING:
    from zbmd.actors.bootstrap.merge import Bootstrap
    from zbmd.tools.cli.launch_settings import Settings
    from zbmd.tools.node.guard.guards import Guards
    from zbmd.tools.node.preflight.host import MeasuredHost
    from zbmd.tools.node.recorder import LaunchRecorder
    from zbmd.tools.node.run import JobCommand

EXAMPLES = """\
examples:
  zbmd-node run train.py                    one process a core
  zbmd-node run -n 4 train.py --lr 3e-4     options after the script are the script's
  zbmd-node run -n 4 -m package.module      a module instead of a script
  zbmd-node run --nnodes 2 --rdzv-endpoint node0:29400 train.py   the same on two hosts
  srun --ntasks-per-node=1 zbmd-node run train.py   on all nodes of a Slurm step
  srun --ntasks-per-node=1 zbmd-node run --explain train.py   what Slurm says of the nodes
  zbmd-node run --on-loss shrink train.py   go on without a lost rank instead of replacing it
  zbmd-node run --nnodes 4:5 --rdzv-endpoint node0:29400 --preflight train.py   on fit hosts only
  zbmd-node run --dashboard 127.0.0.1:7380 train.py   with pages on its runs
  zbmd-node run --capture run.zlog train.py   record every input, for zbmd replay run.zlog
  zbmd-node run --config job.toml --show-config train.py
  zbmd-node status                          nodes, ranks, actors, restarts
  zbmd-node dump --trace flights.json       what the ranks' groups have run lately
  zbmd-node top                             the busiest actors of all ranks, live
  zbmd-node tree                            who supervises whom
  zbmd-node doctor                          this machine: its parts, links and deadlines
  zbmd-node up                              begin a cluster, or go back into the one this node was in
  zbmd-node token                           the line to paste on the next host
  zbmd-node members                         who is in the cluster, as this host's node sees it
  zbmd-node down                            leave the cluster in order
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one paragraph, and ends with the exit code for misuse."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See {self.prog} --help.")


def parser(*only: str) -> argparse.ArgumentParser:
    """The command line: all of it, or that of these commands, whose modules alone are imported."""
    top = _Parser(
        prog="zbmd-node",
        description="Run a supervised training job, and show what runs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"zbmd {zbmd.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in dict.fromkeys(ADDS[name] for name in only or ADDS):
        add(commands)
    return top


def _add_run(commands: Any) -> None:
    from zbmd.tools.cli.launch import add_flags, add_setting
    from zbmd.tools.cli.options import add_command
    from zbmd.tools.cli.settings import SETTINGS

    run = add_command(
        commands,
        "run",
        "run a script or module in supervised processes",
        description="Run a script or module in supervised processes, on one node or several.",
        epilog=EXAMPLES,
    )
    run.set_defaults(run_command=run_command)
    for setting in SETTINGS:
        add_setting(run, setting)
    add_flags(run)
    run.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML, by the options' names")
    run.add_argument(
        "--show-config", "--show_config", action="store_true", help="print the merged settings and exit"
    )
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    run.add_argument("target", nargs="?", metavar="SCRIPT", help="a Python script, or with -m a module")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def _add_status(commands: Any) -> None:
    from zbmd.tools.cli.options import add_command, add_json

    shown = add_command(
        commands,
        "status",
        "show the nodes of this user on this host, with their ranks, actors and restarts",
        examples=("zbmd-node status", "zbmd-node status --json"),
    )
    add_json(shown)
    shown.set_defaults(run_command=status_command)


def _add_dump(commands: Any) -> None:
    from zbmd.tools.node import status as node_dump

    node_dump.add_dump(commands)


def _add_inside(commands: Any) -> None:
    from zbmd.tools.node import top as node_inside

    node_inside.add_commands(commands)


def _add_cluster(commands: Any) -> None:
    from zbmd.tools.node import cluster as node_cluster

    node_cluster.add_commands(commands)


def _add_doctor(commands: Any) -> None:
    from zbmd.tools.cli.options import add_command, add_json
    from zbmd.tools.doctor import command as doctor

    examined = add_command(
        commands,
        "doctor",
        "check this machine; show its parts, links and deadlines",
        description="Check this machine: what it has, which link each pair of processes gets and why, "
        "every deadline and where it comes from, and what is missing.",
        epilog=doctor.EXAMPLES,
    )
    examined.set_defaults(run_command=doctor.main)
    add_json(examined)
    examined.add_argument(
        "--peer", action="append", metavar="HOST[:PORT]", help="another host to reach; may be repeated"
    )
    examined.add_argument(
        "--measure", action="store_true", help="measure processors, memory, disk and loopback too"
    )
    for name in ("--recovery-budget", "--recovery_budget"):
        hidden = (
            argparse.SUPPRESS if "_" in name else "derive the deadlines from it; default: the setting, or 1s"
        )
        examined.add_argument(name, dest="recovery_budget", metavar="TIME", help=hidden)
    examined.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")


ADDS: Final = {
    "run": _add_run,
    "status": _add_status,
    "dump": _add_dump,
    "top": _add_inside,
    "tree": _add_inside,
    "doctor": _add_doctor,
    **dict.fromkeys(("up", "submit", "token", "members", "jobs", "stop", "down"), _add_cluster),
}
"""Functions that add the parser of each command."""


def begun(
    job: JobCommand,
    settings: Settings,
    bootstrap: Bootstrap,
    variables: Mapping[str, str],
    record: LaunchRecorder,
    host: MeasuredHost | None = None,
) -> Callable[[Guards | None], Coroutine[Any, Any, int]]:
    """Fork the template of this host's ranks; return what runs them there, to the exit code.

    variables: for the ranks; record: takes what becomes of them; host: what was measured of this one.
    Call it on the main thread, ahead of any loop; see `fork_template`.
    """
    from zbmd.tools.node.dashboard import opened

    dashboard = opened(settings["dashboard"])  # ahead of the fork: ranks have to know where to announce runs
    record.listen()
    running = _forked(job, settings, bootstrap, variables, record, host)
    return running if dashboard is None else dashboard.beside(running)


def _forked(
    job: JobCommand,
    settings: Settings,
    bootstrap: Bootstrap,
    variables: Mapping[str, str],
    record: LaunchRecorder,
    host: MeasuredHost | None,
) -> Callable[[Guards | None], Coroutine[Any, Any, int]]:
    from zbmd.actors.bootstrap.merge import Role
    from zbmd.actors.process.early_template import fork_template
    from zbmd.tools.node.run import host_config, preload_of, run_job

    if bootstrap.role is Role.ALONE:
        config = host_config(job, settings, variables)
        alone = fork_template(config.preload, os.environ)
        stdin, signals, snapshots_s = settings["stdin"], settings["signals_to_handle"], settings["snapshots"]
        return lambda guards: run_job(
            config,
            alone,
            stdin_rank=stdin,
            signals=signals,
            guards=guards,
            snapshots_s=snapshots_s,
            record=record,
        )
    from zbmd.tools.node import run_many

    plan = run_many.NodeRun(
        job=job, settings=settings, bootstrap=bootstrap, variables=variables, record=record, host=host
    )
    template = fork_template(preload_of(plan.job, plan.settings), run_many.local_variables(plan))
    return lambda guards: run_many.run_over_nodes(plan, template, guards)


def run_command(arguments: argparse.Namespace) -> int:
    """`zbmd-node run`."""
    from zbmd.actors.bootstrap.merge import Role
    from zbmd.tools.cli import launch
    from zbmd.tools.cli.settings import SETTINGS, merge
    from zbmd.tools.node.recorder import recording
    from zbmd.tools.node.run import JobCommand

    on_line = {setting.name: getattr(arguments, setting.name) for setting in SETTINGS}
    settings = merge(on_line, os.environ, arguments.config)
    bootstrap = launch.read(arguments, settings, os.environ)
    settings = launch.with_processes(settings, bootstrap)
    notes = launch.notes(arguments, settings, bootstrap)
    if arguments.show_config or arguments.explain:
        shown = settings.lines() if arguments.show_config else []
        if arguments.explain:
            shown += bootstrap.explain() + [f"note: {note}" for note in notes]
        print("\n".join(shown))
        return 0
    for note in notes:
        print(f"zbmd-node: {note}", file=sys.stderr)
    if bootstrap.role is Role.EXTRA:
        print(f"zbmd-node: nothing to do here: {bootstrap.facts[-1].source}", file=sys.stderr)
        return 0
    if arguments.target is None:
        raise UserError("SCRIPT: expected a Python file, or -m and the name of a module, got nothing")
    job = JobCommand(
        target=arguments.target, is_module=arguments.module, arguments=tuple(arguments.arguments)
    )
    with recording(job.words, settings, bootstrap.nodes.most) as record:
        return _run_recorded(job, settings, bootstrap, record)


def _run_recorded(job: JobCommand, settings: Settings, bootstrap: Bootstrap, record: LaunchRecorder) -> int:
    import uvloop

    from zbmd.actors.bootstrap.merge import Role
    from zbmd.actors.process.exit import ending_at_broken_invariant
    from zbmd.tools.cli import launch
    from zbmd.tools.node.preflight.host import measured_host
    from zbmd.tools.node.run import OWN_JOBS, check, check_own

    check(job, settings)
    if not (job.is_module and job.target in OWN_JOBS):  # which states its own threads
        words = launch.threads_in_words(settings["nproc_per_node"], os.environ)
        print(f"zbmd-node: {words}", file=sys.stderr)
    variables = launch.rank_variables(settings, os.environ)
    if bootstrap.role is Role.ALONE:
        check_own(job, settings)
        launch.check_master_port(settings, os.environ)
    host = measured_host() if settings["preflight"] else None
    if settings["preflight"] and host is None:
        record.end("refused", "--preflight found this host not fit", exit_code=REQUEUE_EXIT_CODE)
        return REQUEUE_EXIT_CODE
    running = begun(job, settings, bootstrap, variables, record, host)
    return uvloop.run(ending_at_broken_invariant(running(None)))


def status_command(arguments: argparse.Namespace) -> int:
    """`zbmd-node status`."""
    import uvloop

    from zbmd.tools.cli.console import screen_for_tables
    from zbmd.tools.node import status

    nodes, silent = uvloop.run(status.collect())
    if arguments.json:
        print(status.as_json(nodes, silent))
    else:
        status.show(nodes, silent, screen_for_tables())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    log_to_stderr()
    try:
        with process.ended_by_ctrl_c():
            found = parser(*(word for word in words[:1] if word in ADDS))
        arguments = found.parse_args(words)
        return int(arguments.run_command(arguments))
    except UserError as error:
        print(f"zbmd-node: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        print("zbmd-node: stopped: SIGINT received", file=sys.stderr)
        return 128 + signal.SIGINT
    except ZbmdError as error:
        print(f"zbmd-node: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(process.run(main))
