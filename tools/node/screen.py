"""The full-screen page of `zbmd-node top`: its views, its keys and its tables. It reads and prints nothing.

`Screen.take` takes a look at all processes, `Screen.press` a key; `Screen.drawn` returns what is to be shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import rich.console
import rich.panel
import rich.table
import rich.text

from zbmd.actors.view import rank_name
from zbmd.tools.telemetry.live import ActorRate, ProcessSnapshots, Rates
from zbmd.tools.telemetry.measures import RankPhases
from zbmd.tools.telemetry.schema import PHASES

LINES_MAX: Final = 40
"""As many rows of a host are shown where the output is no terminal."""
LINES_AROUND: Final = 6
"""Of a table: its title, its head, its frame, and the keys."""
SLOW: Final = 1.1
"""A rank that computes so many times as long as the median rank is marked as a straggler."""
MEBIBYTE: Final = 1 << 20


class View(Enum):
    """The choices of what is shown; tab goes from one to the next."""

    ACTORS = "actors"
    PROCESSES = "processes"
    PHASES = "phases"


HELP: Final = (
    ("tab, 1 2 3", "next view; actors, processes with their links, phases of steps"),
    ("s, r", "sort by the next column; reverse the order"),
    ("↓ ↑, j k", "scroll"),
    ("h, ?", "this help"),
    ("q", "quit"),
)
UP, DOWN = ("k", "\x1b[A", "\x1bOA"), ("j", "\x1b[B", "\x1bOB")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a view. value: of a row, to sort by; shown: as text. grows: sorted from the smallest."""

    title: str
    value: Callable[[Any], Any]
    shown: Callable[[Any], str] = "{:,}".format
    grows: bool = False


def _text(value: Any) -> str:
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Actor:
    """A row of the view of actors."""

    process: str
    row: Any
    per_s: float
    turns_per_s: float
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A row of the view of processes. reply, rank: None where they are not known."""

    name: str
    reply: Any
    rank: Any

    @property
    def waiting(self) -> int:
        return 0 if self.reply is None else sum(row.waiting for row in self.reply.rows)

    @property
    def links(self) -> str:
        if self.reply is None:
            return ""
        return ", ".join(
            f"{link.process} {link.carrier}" + (f" ({link.waiting} wait)" if link.waiting else "")
            for link in self.reply.links
        )

    @property
    def state(self) -> str:
        if self.rank is not None:
            return str(self.rank.state)
        return "silent" if self.reply is None else "up"


ACTORS: Final = (
    Column("process", lambda one: one.process, _text, grows=True),
    Column("actor", lambda one: one.row.name, _text, grows=True),
    Column("class", lambda one: _kind(one.row), _text, grows=True),
    Column("state", lambda one: one.row.state, _text, grows=True),
    Column("at", lambda one: one.row.handles or "-", _text, grows=True),
    Column("waiting", lambda one: one.row.waiting),
    Column("bytes", lambda one: one.row.nbytes),
    Column("msg/s", lambda one: round(one.per_s)),
    Column("handled", lambda one: one.row.handled),
    Column("turns/s", lambda one: round(one.turns_per_s)),
    Column("restarts", lambda one: one.restarts),
    Column("dropped", lambda one: one.row.dropped),
)
PROCESSES: Final = (
    Column("process", lambda one: one.name, _text, grows=True),
    Column("state", lambda one: one.state, _text, grows=True),
    Column("links", lambda one: one.links, _text, grows=True),
    Column("pid", lambda one: 0 if one.rank is None else one.rank.pid, _text),
    Column("restarts", lambda one: getattr(one.rank, "restarts", 0)),
    Column("MiB", lambda one: 0 if one.rank is None else one.rank.memory_bytes // MEBIBYTE),
    Column("actors", lambda one: 0 if one.reply is None else one.reply.actors),
    Column("waiting", lambda one: one.waiting),
    Column("bytes", lambda one: 0 if one.reply is None else one.reply.nbytes),
    Column("loop held", lambda one: 0 if one.reply is None else one.reply.held),
)


@dataclass(slots=True)
class Screen:
    """A state of the page."""

    view: View = View.ACTORS
    rates: Rates = field(default_factory=Rates)
    is_help: bool = False
    is_reversed: bool = False
    skipped: int = 0
    sorts: dict[View, int] = field(
        default_factory=lambda: {View.ACTORS: 7, View.PROCESSES: 0, View.PHASES: 0}
    )
    """The column that each view is sorted by."""
    hosts: list[tuple[ProcessSnapshots, list[ActorRate]]] = field(
        default_factory=list[tuple[ProcessSnapshots, "list[ActorRate]"]]
    )
    phases: list[RankPhases] = field(default_factory=list[RankPhases])
    _skipped_max: int = 0

    def press(self, key: str) -> bool:
        """Take a key; return whether to go on."""
        views = list(View)
        if key == "q":
            return False
        if self.is_help:
            self.is_help = False
        elif key in ("h", "?"):
            self.is_help = True
        elif key == "\t":
            self._show(views[(views.index(self.view) + 1) % len(views)])
        elif key in ("1", "2", "3"):
            self._show(views[int(key) - 1])
        elif key == "s":
            self.sorts[self.view] = (self.sorts[self.view] + 1) % len(_columns(self.view))
            self.is_reversed = False
        elif key == "r":
            self.is_reversed = not self.is_reversed
        elif key in DOWN:
            self.skipped += 1
        elif key in UP:
            self.skipped = max(0, self.skipped - 1)
        return True

    def _show(self, view: View) -> None:
        self.view, self.skipped, self.is_reversed = view, 0, False

    def take(self, seen: Sequence[ProcessSnapshots], phases: Sequence[RankPhases]) -> None:
        """Take a look at all processes, and the phases of their runs."""
        self.phases = list(phases)
        self.hosts = [(one, self.rates.take(one)) for one in seen]

    def drawn(self, height: int | None) -> rich.console.RenderableType:
        """Return what is to be shown. height: lines of the terminal; None where it is none."""
        if self.is_help:
            table = rich.table.Table.grid(padding=(0, 3))
            for keys, words in HELP:
                table.add_row(rich.text.Text(keys, style="bold"), words)
            return rich.panel.Panel(table, title="zbmd-node top", subtitle="any key: back", expand=False)
        hosts = 1 if self.view is View.PHASES else max(1, len(self.hosts))
        lines = LINES_MAX if height is None else max(3, (height - 1) // hosts - LINES_AROUND)
        self._skipped_max = 0
        tables = self._tables(lines)
        self.skipped = min(self.skipped, self._skipped_max)
        return rich.console.Group(*tables) if height is None else rich.console.Group(*tables, self._keys())

    def _tables(self, lines: int) -> Sequence[rich.console.RenderableType]:
        match self.view:
            case View.ACTORS:
                return [self.table(_title(seen), ACTORS, _actors(rates), lines) for seen, rates in self.hosts]
            case View.PROCESSES:
                return [
                    self.table(_job_title(seen), PROCESSES, _processes(seen), lines) for seen, _ in self.hosts
                ]
            case View.PHASES if not self.phases:
                return [rich.text.Text("no rank here takes part in a run with a profile yet")]
            case View.PHASES:
                title = f"ms a step, of the latest {self.phases[0].window} steps"
                return [self.table(title, PHASE_COLUMNS, self.phases, lines)]

    def _keys(self) -> rich.text.Text:
        column = _columns(self.view)[self.sorts[self.view]].title
        order = ", reversed" if self.is_reversed else ""
        words = f" {self.view.value}, by {column}{order}   tab next view  s sort  r reverse  ↓↑ scroll"
        return rich.text.Text(f"{words}  h help  q quit", style="reverse", no_wrap=True, overflow="crop")

    def table(
        self, title: str, columns: Sequence[Column], rows: Sequence[Any], lines: int
    ) -> rich.table.Table:
        """Return the rows as a table, sorted and scrolled."""
        sort = columns[self.sorts[self.view]]
        ordered = sorted(rows, key=sort.value, reverse=sort.grows == self.is_reversed)
        most = max(0, len(ordered) - lines)
        skipped = min(self.skipped, most)
        self._skipped_max = max(self._skipped_max, most)
        table = rich.table.Table(title=title, title_justify="left")
        for column in columns:
            number = column.shown is not _text
            mark = " ▾" if column is sort else ""
            table.add_column(column.title + mark, justify="right" if number else "left", overflow="fold")
        for row in ordered[skipped : skipped + lines]:
            style = "bold red" if getattr(row, "is_slow", False) else ""
            table.add_row(*(column.shown(column.value(row)) for column in columns), style=style)
        return table


def _actors(rates: Sequence[ActorRate]) -> list[_Actor]:
    return [
        _Actor(process=process, row=row, per_s=per_s, turns_per_s=turning, restarts=restarts)
        for process, row, per_s, turning, restarts in rates
    ]


def _processes(seen: ProcessSnapshots) -> list[_Process]:
    status = seen.status
    ranks = {} if status is None else {rank_name(rank.rank): rank for rank in status.ranks}
    replies = {reply.process: reply for reply in seen.replies}
    names = dict.fromkeys([*replies, *ranks, *seen.silent])
    found = [_Process(name=name, reply=replies.get(name), rank=ranks.get(name)) for name in names]
    spares = () if status is None else status.spares
    return [*found, *(_Process(name="spare", reply=None, rank=spare) for spare in spares)]


def _title(seen: ProcessSnapshots) -> str:
    actors = sum(reply.actors for reply in seen.replies)
    held = sum(reply.held for reply in seen.replies)
    waits = sum(reply.nbytes for reply in seen.replies)
    silent = f"  no answer: {', '.join(seen.silent)}" if seen.silent else ""
    return f"{seen.target}  {actors} actors  {waits:,} B wait  loop held {held} times{silent}"


def _job_title(seen: ProcessSnapshots) -> str:
    status = seen.status
    if status is None:
        return seen.target
    hangs = f"  {len(status.hangs)} hangs" if status.hangs else ""
    return f"{seen.target}  epoch {status.epoch}  {status.restarts} restarts{hangs}"


def _kind(row: Any) -> str:
    return str(row.kind) if row.version == 1 else f"{row.kind} v{row.version}"


def _columns(view: View) -> Sequence[Column]:
    return {View.ACTORS: ACTORS, View.PROCESSES: PROCESSES, View.PHASES: PHASE_COLUMNS}[view]


def _phase_columns() -> tuple[Column, ...]:
    def of_phase(phase: str) -> Callable[[RankPhases], float]:
        return lambda one: one.ms.get(phase, 0.0)

    def ms(value: float) -> str:
        return f"{value:,.2f}"

    named = [Column(phase, of_phase(phase), ms) for phase in PHASES]
    return (
        Column("run", lambda one: one.run, _text, grows=True),
        Column("rank", lambda one: one.rank, "{:d}".format, grows=True),
        Column("step", lambda one: one.step, "{:,}".format),
        Column("ms", lambda one: one.step_ms, ms),
        Column("own", lambda one: one.own_ms, ms),
        Column("x median", lambda one: one.slowness, "{:.2f}".format),
        *named,
    )


PHASE_COLUMNS: Final = _phase_columns()


def with_slowness(found: Sequence[RankPhases]) -> list[RankPhases]:
    """Return the ranks of a run, each compared with the median."""
    middle = statistics.median(one.own_ms for one in found) if found else 0.0
    return [one.compared(middle, SLOW) for one in found]
