"""The full-screen page of `zbmd-node top`: what keys do to it, and the page on a terminal over a real job."""

from __future__ import annotations

import dataclasses
import io
import termios
from typing import TYPE_CHECKING

import rich.console
from programs import PROGRAMS
from support.processes.looks import answered
from support.processes.terminal import on_terminal

from zbmd.actors.hangs.introspection import ActorRow, InsideReply, LinkRow
from zbmd.actors.rank.host_contracts import NodeStatus, RankStatus, SpareStatus
from zbmd.tools.node.screen import ACTORS, Screen, View, with_slowness
from zbmd.tools.telemetry.live import ProcessSnapshots
from zbmd.tools.telemetry.measures import RankPhases

if TYPE_CHECKING:
    from support.processes.launcher import Launcher


def actor(name: str, waiting: int) -> ActorRow:
    return ActorRow(name, "Any", 1, 1, "running", waiting, 0, 0, 0, 0, 0, "", "")


def look(actors: int) -> list[ProcessSnapshots]:
    """Actors that are called a00, a01, …, the first with most waiting."""
    reply = InsideReply(
        process="rank0",
        incarnation=1,
        actors=actors,
        held=0,
        nbytes=0,
        nbytes_max=1,
        rows=tuple(actor(f"a{n:02}", actors - n) for n in range(actors)),
        supervisors=(),
        links=(LinkRow("rank1", 1, "tcp", 3, 4096),),
    )
    return [ProcessSnapshots(address="a", target="job.py", replies=(reply,), silent=("rank1",), at_s=1.0)]


def shown(screen: Screen, height: int | None = 20) -> list[str]:
    console = rich.console.Console(width=220, record=True, file=io.StringIO())
    console.print(screen.drawn(height))
    return console.export_text().splitlines()


def names(lines: list[str]) -> list[str]:
    return [line.split()[3] for line in lines if line.startswith("│ rank0")]


def press(screen: Screen, keys: str) -> None:
    assert all(screen.press(key) for key in keys)


def test_keys_sort_reverse_and_scroll() -> None:
    screen = Screen()
    screen.take(look(30), ())
    most_first = [f"a{n:02}" for n in range(30)]
    lines = shown(screen)
    assert names(lines) == most_first[:13] and "by msg/s" in lines[-1] and len(lines) <= 20
    press(screen, "jj")
    assert names(shown(screen)) == most_first[2:15]
    press(screen, "k")
    assert names(shown(screen)) == most_first[1:14]
    for _ in range(50):
        press(screen, "j")
    assert names(shown(screen)) == most_first[-13:] and screen.skipped == 17, "there is no more below"
    while ACTORS[screen.sorts[View.ACTORS]].title != "waiting":
        press(screen, "s")
    press(screen, "r")
    screen.skipped = 0
    lines = shown(screen)
    assert names(lines) == most_first[::-1][:13] and "by waiting, reversed" in lines[-1]
    assert any("waiting ▾" in line for line in lines)


def test_tab_goes_round_the_views_help_comes_and_goes_and_q_quits() -> None:
    screen = Screen()
    screen.take(look(2), ())
    seen: list[View] = []
    for _ in range(3):
        press(screen, "\t")
        seen.append(screen.view)
    assert seen == [View.PROCESSES, View.PHASES, View.ACTORS]
    press(screen, "2")
    lines = shown(screen)
    assert any("rank1 tcp (3 wait)" in line for line in lines)
    assert any(line.startswith("│ rank1") and "silent" in line for line in lines)
    press(screen, "3")
    assert any("no rank here takes part in a run" in line for line in shown(screen))
    press(screen, "h")
    assert any("quit" in line for line in shown(screen)) and screen.is_help
    press(screen, "x")
    assert not screen.is_help and screen.view is View.PHASES, "any key goes back, and does nothing else"
    assert not screen.press("q")


def test_spares_are_processes_of_a_host() -> None:
    spare = SpareStatus(pid=4711, state="waiting", memory_bytes=8 << 20)
    rank = RankStatus(0, 4710, 1, "joined", 0, 1 << 20, None)
    status = NodeStatus("a", 1, 2, "job.py", "replace", 1, 0, 1.0, (rank,), spares=(spare,))
    screen = Screen(view=View.PROCESSES)
    screen.take([dataclasses.replace(look(1)[0], status=status)], ())
    (line,) = [line for line in shown(screen) if line.startswith("│ spare")]
    cells = [cell.strip() for cell in line.split("│")]
    assert cells[1:3] == ["spare", "waiting"] and cells[4:7] == ["4711", "0", "8"], cells


def phases(rank: int, forward_ms: float, comm_ms: float) -> RankPhases:
    ms = {"forward": forward_ms, "comm": comm_ms}
    step_ms = forward_ms + comm_ms
    return RankPhases(run="run", rank=rank, step=7, window=50, step_ms=step_ms, ms=ms)


def test_a_rank_that_computes_longer_than_the_others_is_marked() -> None:
    ranks = with_slowness([phases(0, 10, 5), phases(1, 15, 0), phases(2, 10, 5)])
    assert [(one.slowness, one.is_slow) for one in ranks] == [(1.0, False), (1.5, True), (1.0, False)]
    screen = Screen(view=View.PHASES)
    screen.take(look(1), ranks)
    lines = [line for line in shown(screen) if line.startswith("│ run ") and "forward" not in line]
    assert ["1.50" in line for line in lines] == [False, True, False]


def test_the_page_of_a_real_job_on_a_terminal(launcher: Launcher) -> None:
    size = {"COLUMNS": "240", "LINES": "50"}
    with launcher.start("run", "-n", "2", str(PROGRAMS / "node" / "begins_run.py")) as running:
        running.until("joined")
        with on_terminal(launcher, "top", "--interval", "0.2", **size) as terminal:
            terminal.until("MemberActor")
            terminal.until("q quit")
            terminal.type("\t")
            terminal.until("rank1 shm")
            terminal.type("\t")
            terminal.until("of the latest 50 steps")
            terminal.until("x median")
            terminal.type("h")
            terminal.until("any key: back")
            terminal.type("xq")
            assert terminal.end() == 0
            assert termios.tcgetattr(terminal._fd)[3] & termios.ECHO, "keys are echoed again"
        assert "\x1b[?1049h" in terminal.text and terminal.text.rstrip().endswith(
            ("\x1b[?25h", "\x1b[?1049l")
        )
        (launcher.directory / "done").touch()


def test_each_view_without_a_terminal(launcher: Launcher) -> None:
    words = {View.ACTORS: "MemberActor", View.PROCESSES: "rank0 shm", View.PHASES: "of the latest 50 steps"}
    with launcher.start("run", "-n", "1", str(PROGRAMS / "node" / "begins_run.py")) as running:
        running.until("joined")
        for view, expected in words.items():
            given = ("--view", view.value, "--times", "1", "--interval", "0.1")
            shown = answered(launcher, "top", *given)
            assert expected in shown, shown
        (launcher.directory / "done").touch()
