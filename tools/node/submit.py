"""`zbmd-node submit`: give a job to the cluster, and follow it."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import Final

from zbmd.actors.bootstrap.environments import NodeRange
from zbmd.actors.cluster.jobs.code_digest import code_of
from zbmd.actors.cluster.node.client import AdminConnection, connect_admin
from zbmd.actors.cluster.state.job_table import JobSpec, Submit
from zbmd.tools.cli.launch import spellings
from zbmd.tools.cli.launch_settings import Settings
from zbmd.tools.cli.options import add_at
from zbmd.tools.cli.settings import SETTINGS, merge
from zbmd.tools.node.jobs import follow, give_order, job_name
from zbmd.transport.clock.deadlines import SECOND_NS
from zbmd.transport.errors import UserError

NAMES: Final = (
    "nnodes",
    "nproc_per_node",
    "on_loss",
    "max_restarts",
    "restart_window",
    "recovery_budget",
    "stop_grace",
    "start_timeout",
    "arena",
    "data",
)
"""The settings of a run that a job of a cluster has too."""
EXAMPLES = """\
examples:
  zbmd-node submit --nnodes 2:4 -n 8 train.py --lr 3e-4   on two to four hosts, 8 ranks on each
  zbmd-node submit --no-follow -m package.module          a module; print the job's name and end
  zbmd-node jobs                                          what runs where
  zbmd-node stop JOB                                      end a job in order
"""


def add_arguments(submit: argparse.ArgumentParser) -> None:
    """The options of `zbmd-node submit`."""
    for setting in SETTINGS:
        if setting.name not in NAMES:
            continue
        short = ["-n"] if setting.name == "nproc_per_node" else []
        submit.add_argument(
            *short, *spellings(setting.name), dest=setting.name, metavar=setting.metavar, help=setting.help
        )
    submit.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML, by the options' names")
    submit.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the ranks; repeatable",
    )
    submit.add_argument(
        "--follow",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show the output of the ranks until the job ends (default: on a terminal)",
    )
    add_at(submit)
    submit.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    submit.add_argument("target", metavar="SCRIPT", help="a Python script, or with -m a module")
    submit.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )


def job_spec(arguments: argparse.Namespace) -> JobSpec:
    """Return the job that was asked for. Raises `UserError`."""
    on_line = {name: getattr(arguments, name) for name in NAMES}
    settings = merge(on_line, os.environ, arguments.config)
    target = arguments.target if arguments.module else str(Path(arguments.target).absolute())
    nodes = settings["nnodes"] or NodeRange(least=1, most=1)
    spec = JobSpec(
        job=secrets.randbits(62) + 1,
        target=target,
        is_module=arguments.module,
        arguments=tuple(arguments.arguments),
        environment=_environment(arguments.env, settings),
        code=code_of(target, is_module=arguments.module),
        ranks_per_node=_ranks(settings),
        nodes_min=nodes.least,
        nodes_max=nodes.most,
        on_loss=settings["on_loss"],
        max_restarts=settings["max_restarts"],
        restart_window_ns=round(settings["restart_window"] * SECOND_NS),
        arena_bytes=settings["arena"],
        recovery_budget_ns=round(settings["recovery_budget"] * SECOND_NS),
        stop_grace_ns=round(settings["stop_grace"] * SECOND_NS),
        start_timeout_ns=round(settings["start_timeout"] * SECOND_NS),
    )
    if problem := spec.problem():
        raise UserError(f"no cluster would take this job: {problem}.")
    return spec


def _ranks(settings: Settings) -> int:
    ranks = settings["nproc_per_node"]
    if not isinstance(ranks, int):
        raise UserError(
            "--nproc-per-node: give a number: the hosts of a job have the same number of ranks each."
        )
    return ranks


def _environment(given: list[str], settings: Settings) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {} if settings["data"] is None else {"ZBMD_DATA": settings["data"]}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--env {text}: write NAME=VALUE.")
        found[name] = value
    return tuple(sorted(found.items()))


async def submit(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    spec = job_spec(arguments)
    async with connect_admin(arguments.at) as admin:
        await give_order(admin, Submit(spec=spec))
        print(job_name(spec.job), flush=True)
        following = sys.stderr.isatty() if arguments.follow is None else arguments.follow
        if not following:
            return 0
        return await _follow(admin, spec.job)


async def _follow(admin: AdminConnection, job: int) -> int:
    try:
        return await follow(admin, job)
    except KeyboardInterrupt:
        print(
            f"[zbmd]: job {job_name(job)} goes on; to end it: zbmd-node stop {job_name(job)}", file=sys.stderr
        )
        raise
