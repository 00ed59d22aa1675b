"""`zbmd dashboard`: serve the pages of runs, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from zbmd.tools.cli.options import add_command
from zbmd.tools.dashboard.access import is_local, token_of
from zbmd.tools.dashboard.server import Dashboard
from zbmd.transport.errors import UserError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.host.process import end_with_parent
from zbmd.transport.tcp.address import parse_address

LISTEN_DEFAULT: Final = "127.0.0.1:7380"
NICE: Final = 5
"""Of a launcher's dashboard: ranks come first."""


def add_dashboard(commands: Any) -> None:
    """Add `zbmd dashboard`."""
    command = add_command(
        commands,
        "dashboard",
        "serve pages on runs: time of steps, utilisation, losses, recoveries, ranks; live; and the planners",
        description="Serve pages on runs, live or finished, and the planners of clusters and checkpoints, to "
        "a browser. On an address other than loopback the printed link carries a token, which comes from "
        "this machine's cookie.",
        examples=(
            "zbmd dashboard",
            "zbmd dashboard zbmd-runs/demo",
            "zbmd dashboard runs/monday runs/tuesday --listen 0.0.0.0:7380",
        ),
    )
    command.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN", help="directories of runs; none: the planners alone"
    )
    command.add_argument(
        "--listen",
        default=LISTEN_DEFAULT,
        metavar="HOST:PORT",
        help="address to serve on; port 0 for any (default: %(default)s)",
    )
    command.set_defaults(run_command=_dashboard)


def _dashboard(arguments: argparse.Namespace) -> int:
    where = parse_address(arguments.listen)
    token = "" if is_local(arguments.listen) else token_of(load_or_create_cookie())
    for run in arguments.runs:
        if not run.is_dir():
            raise UserError(f"{run} is not the directory of a run.")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.runs, where.host or "0.0.0.0", where.port, token=token))
    return 0


def serve_beside(listening_fd: int, announced: int, launcher_pid: int) -> None:
    """Be the dashboard of a launcher: serve on its socket until it ends, or asks this process to."""
    end_with_parent(launcher_pid)
    os.nice(NICE)
    with socket.socket(fileno=listening_fd) as listening:
        host, port = listening.getsockname()[:2]
        token = "" if is_local(f"[{host}]" if ":" in host else host) else token_of(load_or_create_cookie())
        asyncio.run(serve((), host, port, token=token, listening=listening, announced=announced))


async def serve(
    runs: Sequence[Path],
    host: str,
    port: int,
    *,
    token: str,
    listening: socket.socket | None = None,
    announced: int | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. listening, announced: see `Dashboard`. Raises `UserError`."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    dashboard = Dashboard(runs, token=token, announced=announced)
    async with dashboard.serving(host, port, listening=listening) as address:
        print(f"dashboard: {address} (Ctrl-C ends it)", flush=True)
        await stopped.wait()


if __name__ == "__main__":  # started by a launcher
    serve_beside(*map(int, sys.argv[1:4]))
