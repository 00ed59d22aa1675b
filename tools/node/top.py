"""`zbmd-node top` and `tree`: what runs in a cluster, and in all ranks here, live and as a tree."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import rich.console
import rich.live
import rich.tree

from zbmd.actors.hangs.introspection import ActorRow
from zbmd.tools.cli.options import add_at, add_command, add_json
from zbmd.tools.node.screen import Screen, View, with_slowness
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.tools.telemetry.live import LiveView, ProcessSnapshots, nothing_runs, once
from zbmd.tools.telemetry.measures import RankPhases, latest_phases
from zbmd.training.profiler.lines import PROFILE_DIRECTORY
from zbmd.transport.errors import UserError

INTERVAL_S: Final = 1.0
INTERVAL_S_MIN: Final = 0.1
INTERVAL_S_MAX: Final = 3600.0
PHASES_S: Final = 2.0
"""The databases of runs are brought up to date at most that often."""
WINDOW_STEPS: Final = 50
KEY_BYTES_MAX: Final = 64
_KEYS: Final = re.compile(r"\x1b[\[O][A-Z]|[^\x1b]")


class Runs:
    """The databases of the runs that live ranks take part in, read on another thread than the screen's."""

    def __init__(self) -> None:
        self.phases: list[RankPhases] = []
        self._databases: dict[str, RunDatabase | None] = {}
        self._reading: asyncio.Future[list[RankPhases]] | None = None
        self._read_s = -1e9

    def look(self, seen: Sequence[ProcessSnapshots]) -> None:
        """Begin to read what is new, unless that goes on or was done just now."""
        if self._reading is not None and self._reading.done():
            self.phases, self._reading = self._reading.result(), None
        runs = dict.fromkeys(run for one in seen for reply in one.replies for run in reply.runs)
        if runs and self._reading is None and time.monotonic() - self._read_s >= PHASES_S:
            self._read_s = time.monotonic()
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read, list(runs)))

    async def settled(self) -> None:
        """Wait for what is being read."""
        if self._reading is not None:
            self.phases, self._reading = await self._reading, None

    def _read(self, runs: Sequence[str]) -> list[RankPhases]:
        found: list[RankPhases] = []
        for run in runs:
            directory = Path(run)
            if run not in self._databases and (directory / PROFILE_DIRECTORY).is_dir():
                self._databases[run] = _database(directory)
            database = self._databases.get(run)
            if database is None:
                continue  # of another host, or it has no profile yet
            with contextlib.suppress(UserError):
                database.update()
                found += with_slowness(
                    latest_phases(database.connection, directory.name, window=WINDOW_STEPS)
                )
        return found

    async def close(self) -> None:
        """Close the databases."""
        await self.settled()
        for database in self._databases.values():
            if database is not None:
                database.connection.close()


def _database(directory: Path) -> RunDatabase | None:
    try:
        return RunDatabase(directory)
    except UserError:
        return None


@contextlib.contextmanager
def keys(take: Callable[[str], None]) -> Generator[None]:
    """Have each key of the terminal call `take` within the context, at once and without an echo."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    loop = asyncio.get_running_loop()

    def read() -> None:
        data = os.read(fd, KEY_BYTES_MAX)
        if not data:
            loop.remove_reader(fd)
        for key in _KEYS.findall(data.decode(errors="replace")):
            take(key)

    try:
        tty.setcbreak(fd)
        loop.add_reader(fd, read)
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def top(
    console: rich.console.Console,
    *,
    view: View,
    interval_s: float,
    times: int | None,
    here: bool,
    at: str | None,
) -> None:
    """Show a view again and again, in place on a terminal, where keys choose.

    times: how often; None until it is quit.
    """
    screen, runs, pressed = Screen(view=view), Runs(), asyncio.Event()
    is_over = False

    def press(key: str) -> None:
        nonlocal is_over
        is_over = is_over or not screen.press(key)
        pressed.set()

    has_keys = console.is_terminal and sys.stdin.isatty()
    async with LiveView(here=here, at=at) as live, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runs.close)
        seen = await live.look(busiest=True)
        if not seen:
            raise nothing_runs()
        screen.take(seen, ())  # so that the first table has rates
        shown = stack.enter_context(
            rich.live.Live(console=console, auto_refresh=False, screen=console.is_terminal)
        )
        if has_keys:
            stack.enter_context(keys(press))
        runs.look(seen)
        while not is_over and (times is None or times > 0):
            if has_keys:
                shown.update(screen.drawn(console.height), refresh=True)
            if await _pressed(pressed, interval_s):
                continue  # what is known is drawn in another way
            seen = await live.look(busiest=True)
            if not seen:
                break
            runs.look(seen)
            if times is not None:
                await runs.settled()
                times -= 1
            screen.take(seen, runs.phases)
            if not has_keys:
                shown.update(screen.drawn(console.height if console.is_terminal else None), refresh=True)


async def _pressed(pressed: asyncio.Event, wait_s: float) -> bool:
    """Wait for a key, so long; return whether there was one."""
    try:
        async with asyncio.timeout(wait_s):
            await pressed.wait()
    except TimeoutError:
        return False
    pressed.clear()
    return True


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
        "show the busiest actors, the processes with their links, and the phases of steps, live",
        description="Show, of the cluster or of all ranks here: the busiest actors, the processes with their "
        "links, and the phases of the steps of their runs. On a terminal it takes the whole screen: tab for "
        "the next view, s to sort, h for help, q to quit.",
        examples=("zbmd-node top", "zbmd-node top --view phases --times 1", "zbmd-node top --times 1 --json"),
    )
    live.add_argument(
        "--interval",
        type=float,
        default=INTERVAL_S,
        metavar="S",
        help="seconds between tables (default: %(default)s)",
    )
    live.add_argument(
        "--view",
        choices=[view.value for view in View],
        default=View.ACTORS.value,
        help="view to begin with (default: %(default)s)",
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
        view = View(arguments.view)
        interval_s, times = arguments.interval, arguments.times
        asyncio.run(top(screen, view=view, interval_s=interval_s, times=times, here=here, at=at))
    return 0
