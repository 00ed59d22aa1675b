"""`zbmd dashboard`: serve the pages of runs, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from zbmd.tools.cli.options import add_command
from zbmd.tools.dashboard.server import Dashboard, is_local, token_of
from zbmd.transport.errors import UserError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.tcp.address import parse_address

LISTEN_DEFAULT: Final = "127.0.0.1:7380"


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


async def serve(runs: Sequence[Path], host: str, port: int, *, token: str) -> None:
    """Serve until SIGINT or SIGTERM. Raises `UserError`."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with Dashboard(runs, token=token).serving(host, port) as address:
        print(f"dashboard: {address} (Ctrl-C ends it)", flush=True)
        await stopped.wait()
