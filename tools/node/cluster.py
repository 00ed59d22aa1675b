"""The commands of `zbmd-node` that are about a cluster: nodes, and the jobs that they run."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Final

import uvloop

from zbmd.actors.process.early_template import fork_template
from zbmd.tools.cli.console import screen_for_tables
from zbmd.tools.cli.options import add_at, add_command, add_json
from zbmd.tools.node import (
    jobs as node_jobs,
)
from zbmd.tools.node import (
    join_token as node_token,
)
from zbmd.tools.node import (
    members as node_members,
)
from zbmd.tools.node import (
    submit as node_submit,
)
from zbmd.tools.node import (
    up as node_up,
)

REQUESTS: Final = {
    "token": "print the line to paste on the next host; it holds the cookie",
    "members": "show the members of the cluster, as one node sees them",
    "down": "make a node leave the cluster in an orderly way",
    "jobs": "show the jobs of the cluster and the hosts they run on",
    "stop": "end a job of the cluster",
}
REQUEST_EXAMPLES: Final = {
    "token": ("zbmd-node token",),
    "members": ("zbmd-node members", "zbmd-node members --at node0:29400 --json"),
    "down": ("zbmd-node down",),
    "jobs": ("zbmd-node jobs --json",),
    "stop": ("zbmd-node stop job-1", "zbmd-node stop job-1 --kill"),
}


def add_commands(commands: Any) -> None:
    """Add `up`, `submit` and the requests to a running node."""
    shape: dict[str, Any] = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    up = commands.add_parser(
        "up",
        help="run this host's node of a cluster",
        description="Run the node of this host in the foreground, until it is asked to leave.",
        epilog=node_up.EXAMPLES,
        **shape,
    )
    node_up.add_arguments(up)
    submit = commands.add_parser(
        "submit",
        help="run a script or module on the cluster",
        description="Give a job to the cluster. Its files must be the same, in the same place, on all hosts.",
        epilog=node_submit.EXAMPLES,
        **shape,
    )
    node_submit.add_arguments(submit)
    for name, text in REQUESTS.items():
        asked = add_command(commands, name, text, examples=REQUEST_EXAMPLES[name])
        add_at(asked)
        if name in ("members", "jobs"):
            add_json(asked)
        if name == "stop":
            asked.add_argument("job", metavar="JOB", help="name of the job, or a prefix of it")
            asked.add_argument("--kill", action="store_true", help="send SIGKILL instead of SIGTERM")


def main(arguments: argparse.Namespace) -> int:
    """Run one of them; returns the exit code."""
    match arguments.command:
        case "up":
            config = node_up.node_config(arguments)
            template = fork_template(node_up.PRELOADS, os.environ)
            start = None if arguments.actors is None else node_up.load_start(arguments.actors)
            return uvloop.run(node_up.run_node(config, arguments.store, start, template))
        case "submit":
            return uvloop.run(node_submit.submit(arguments))
        case "token":
            uvloop.run(node_token.print_token(arguments.at))
        case "members":
            members = uvloop.run(node_members.members(arguments.at))
            _print(node_members, members, as_json=arguments.json)
        case "jobs":
            _print(node_jobs, uvloop.run(node_jobs.jobs(arguments.at)), as_json=arguments.json)
        case "stop":
            _tell(uvloop.run(node_jobs.stop(arguments.at, arguments.job, kill=arguments.kill)))
        case _:
            _tell(uvloop.run(node_members.down(arguments.at)))
    return 0


def _print(shown_by: Any, reply: Any, *, as_json: bool) -> None:
    if as_json:
        print(shown_by.as_json(reply))
    else:
        shown_by.show(reply, screen_for_tables())


def _tell(text: str) -> None:
    print(f"zbmd-node: {text}", file=sys.stderr)
