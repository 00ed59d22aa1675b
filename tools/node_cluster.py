"""The commands of `zbmd-node` that are about a cluster: `up`, `token`, `members`, `down`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import rich.console
import uvloop

from zbmd.tools import node_members, node_token, node_up


def add_commands(commands: Any) -> None:
    """Their parsers."""
    up = commands.add_parser(
        "up",
        help="run this host's node of a cluster",
        description="Run this host's node: in the foreground, until it is told to leave.",
        epilog=node_up.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    node_up.add_arguments(up)
    helps = {
        "token": "print the line to paste on the next host; it holds the cookie",
        "members": "show who is in the cluster, as one node sees it",
        "down": "have a node leave the cluster in order, and end",
    }
    for name, text in helps.items():
        asked = commands.add_parser(name, help=text, allow_abbrev=False)
        asked.add_argument("--at", metavar="HOST:PORT", help="ask this node; default: the one of this host")
        if name == "members":
            asked.add_argument("--json", action="store_true", help="one JSON object on standard output")


def main(arguments: argparse.Namespace) -> int:
    """Run one of them; returns the exit code."""
    match arguments.command:
        case "up":
            return uvloop.run(node_up.run_node(node_up.node_config(arguments)))
        case "token":
            uvloop.run(node_token.print_token(arguments.at))
        case "members":
            reply = uvloop.run(node_members.members(arguments.at))
            if arguments.json:
                print(node_members.as_json(reply))
            else:
                node_members.show(reply, rich.console.Console())
        case _:
            print(f"zbmd-node: {uvloop.run(node_members.down(arguments.at))}", file=sys.stderr)
    return 0
