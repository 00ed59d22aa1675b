"""`zbmd-node top` and `tree`: the actors of a cluster, and of all ranks here, at work and as a tree."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import rich.console
import rich.live
import rich.table
import rich.tree

from zbmd.actors.hangs.introspection import ActorRow
from zbmd.tools.cli.options import add_at, add_command, add_json
from zbmd.tools.telemetry.live import LiveView, ProcessSnapshots, Rates, nothing_runs, once
from zbmd.transport.errors import UserError

INTERVAL_S: Final = 1.0
INTERVAL_S_MIN: Final = 0.1
INTERVAL_S_MAX: Final = 3600.0
LINES_MAX: Final = 40
"""As many actors are shown by `top`."""


# What is shown by `top`.


def top_table(seen: ProcessSnapshots, rates: Rates) -> rich.table.Table:
    """The busiest actors of one host."""
    actors = sum(reply.actors for reply in seen.replies)
    held = sum(reply.held for reply in seen.replies)
    waits = sum(reply.nbytes for reply in seen.replies)
    silent = f"  no answer: {', '.join(seen.silent)}" if seen.silent else ""
    table = rich.table.Table(
        title=f"{seen.target}  {actors} actors  {waits:,} B wait  loop held {held} times{silent}",
        title_justify="left",
    )
    for column in ("process", "actor", "class", "state", "at"):
        table.add_column(column, overflow="fold")
    for column in ("waiting", "bytes", "msg/s", "handled", "turns/s", "restarts", "dropped"):
        table.add_column(column, justify="right")
    for process, row, rate, turning, restarts in rates.take(seen)[:LINES_MAX]:
        kind = row.kind if row.version == 1 else f"{row.kind} v{row.version}"
        numbers = (row.waiting, row.nbytes, round(rate), row.handled, round(turning), restarts, row.dropped)
        shown = (process, row.name, kind, row.state, row.handles or "-")
        table.add_row(*shown, *(f"{number:,}" for number in numbers))
    return table


async def top(
    screen: rich.console.Console, *, interval_s: float, times: int | None, here: bool, at: str | None
) -> None:
    """Show the table again and again, in place on a terminal. times: how often; None until interrupted."""
    rates = Rates()
    async with LiveView(here=here, at=at) as view:
        first = await view.look(busiest=True)
        if not first:
            raise nothing_runs()
        for one in first:
            rates.take(one)  # so that the first table has rates
        with rich.live.Live(console=screen, auto_refresh=False, screen=screen.is_terminal) as live:
            while times is None or times > 0:
                await asyncio.sleep(interval_s)
                seen = await view.look(busiest=True)
                if not seen:
                    break
                live.update(rich.console.Group(*(top_table(one, rates) for one in seen)), refresh=True)
                times = None if times is None else times - 1


# The tree.


def tree_of(seen: ProcessSnapshots) -> rich.tree.Tree:
    """Processes, their supervisors and the actors below these; what is down is shown as well."""
    root = rich.tree.Tree(seen.target)
    for reply in seen.replies:
        branch = root.add(f"{reply.process}#{reply.incarnation}  {reply.actors} actors")
        rows = {row.name: row for row in reply.rows}
        children = {one.name: one.children for one in reply.supervisors}
        here = {f"{reply.process}/{row.name}" for row in reply.rows}
        for row in reply.rows:
            if row.parent not in here:
                _grow(branch, row, rows, children, set())
        if reply.actors > len(reply.rows):
            branch.add(f"and {reply.actors - len(reply.rows)} more")
    for name in seen.silent:
        root.add(f"{name}  does not answer")
    return root


def _grow(
    branch: rich.tree.Tree,
    row: ActorRow,
    rows: dict[str, ActorRow],
    children: dict[str, list[tuple[str, str, int]]],
    above: set[str],
    starts: int = 1,
) -> None:
    version = "" if row.version == 1 else f" v{row.version}"
    again = f", restarted {starts - 1} times" if starts > 1 else ""
    waits = f", {row.waiting} waiting" if row.waiting else ""
    words = f"{row.name}#{row.incarnation}  {row.kind}{version}, {row.state}{waits}{again}"
    mine = branch.add(words, highlight=False)
    for name, state, count in children.get(row.name, ()):
        child = rows.get(name)
        if child is not None and name not in above:
            _grow(mine, child, rows, children, above | {row.name}, count)
        else:
            mine.add(f"{name}  {state}, started {count} times", highlight=False)


def as_json(seen: Sequence[ProcessSnapshots]) -> str:
    """One JSON object, by the fields' names."""
    hosts: list[dict[str, Any]] = []
    for one in seen:
        processes = [
            {
                **msgspec.structs.asdict(reply),
                "rows": [msgspec.structs.asdict(row) for row in reply.rows],
                "supervisors": [msgspec.structs.asdict(row) for row in reply.supervisors],
                "links": [msgspec.structs.asdict(row) for row in reply.links],
            }
            for reply in one.replies
        ]
        hosts.append({"target": one.target, "processes": processes, "silent": one.silent})
    return msgspec.json.encode({"hosts": hosts}).decode()


# The command line.


def add_commands(commands: Any) -> None:
    """`top` and `tree`."""
    live = add_command(
        commands,
        "top",
        "show the busiest actors of the cluster, or of all ranks here, live",
        examples=("zbmd-node top", "zbmd-node top --times 1 --json"),
    )
    live.add_argument(
        "--interval",
        type=float,
        default=INTERVAL_S,
        metavar="S",
        help="seconds between tables (default: %(default)s)",
    )
    live.add_argument("--times", type=int, metavar="N", help="end after this many tables")
    tree = add_command(
        commands,
        "tree",
        "show the supervision tree of the cluster, or of all ranks here",
        examples=("zbmd-node tree", "zbmd-node tree --here --json"),
    )
    for command in (live, tree):
        command.add_argument("--here", action="store_true", help="show only ranks of this host")
        add_at(command)
        add_json(command)
        command.set_defaults(run_command=main)


def main(arguments: argparse.Namespace) -> int:
    """Show it. Raises `UserError`."""
    screen = rich.console.Console()
    here, at = arguments.here, arguments.at
    if arguments.json:
        print(as_json(asyncio.run(once(busiest=arguments.command == "top", here=here, at=at))))
    elif arguments.command == "tree":
        for one in asyncio.run(once(busiest=False, here=here, at=at)):
            screen.print(tree_of(one), soft_wrap=True)
    else:
        if not INTERVAL_S_MIN <= arguments.interval <= INTERVAL_S_MAX:
            raise UserError(
                f"--interval {arguments.interval:g}: give {INTERVAL_S_MIN:g} to {INTERVAL_S_MAX:g} seconds."
            )
        asyncio.run(top(screen, interval_s=arguments.interval, times=arguments.times, here=here, at=at))
    return 0
