"""`zbmd-node top` and `tree` of a job that runs: what they show is what goes on in its ranks."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest
import rich.console
from programs import PROGRAMS
from support.processes.looks import answered

from zbmd.actors.hangs.introspection import ActorRow, InsideReply, SupervisorRow
from zbmd.tools.node.screen import Screen
from zbmd.tools.node.top import main, tree_of
from zbmd.tools.telemetry.live import ProcessSnapshots, Rates
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from support.processes.launcher import Launcher, Running


@pytest.fixture
def job(launcher: Launcher) -> Generator[Running]:
    """A job of two ranks with a busy worker each, below two supervisors."""
    with launcher.session("run", "-n", "2", str(PROGRAMS / "node/watched_job.py")) as running:
        running.until("ready", 2)
        yield running


@pytest.mark.usefixtures("job")
def test_a_running_job_is_looked_into(launcher: Launcher) -> None:
    table = answered(launcher, "top", "--interval", "0.2", "--times", "1")
    busiest = [line for line in table.splitlines() if " worker " in line]
    assert len(busiest) >= 2 and "Worker" in busiest[0], table
    tree = answered(launcher, "tree")
    assert "rank0#1" in tree and "rank1#1" in tree and "outer" in tree
    workers = [line for line in tree.splitlines() if "worker" in line]
    assert sum("Worker, running" in line and "restarted 1 times" in line for line in workers) >= 2, tree
    found = json.loads(answered(launcher, "top", "--json"))
    (host,) = [h for h in found["hosts"] if h["target"].endswith("watched_job.py")]
    rows = {(p["process"], r["name"]): r for p in host["processes"] for r in p["rows"]}
    assert rows["rank0", "worker"]["handled"] > 0 and rows["rank1", "worker"]["parent"] == "rank1/inner"
    assert ("node", "host") in rows
    links = {(p["process"], r["process"]): r for p in host["processes"] for r in p["links"]}
    assert links["rank0", "rank1"]["carrier"] == links["rank1", "node"]["carrier"] == "shm"


def test_bad_input_is_told() -> None:
    with pytest.raises(UserError, match="--interval 0"):
        main(argparse.Namespace(command="top", json=False, interval=0.0, times=None, here=True, at=None))


def actor_row(name: str, kind: str, incarnation: int, waiting: int, handled: int, parent: str) -> ActorRow:
    return ActorRow(
        name=name,
        kind=kind,
        version=2,
        incarnation=incarnation,
        state="running",
        waiting=waiting,
        nbytes=0,
        stashed=0,
        handled=handled,
        turns=handled // 2,
        dropped=0,
        handles="",
        parent=parent,
    )


def reply(handled: int, actors: int = 2, incarnation: int = 5) -> InsideReply:
    boss = actor_row("boss", "Supervisor", 1, 0, 0, "")
    rows = (boss, actor_row("work", "Worker", incarnation, 3, handled, "rank0/boss"))
    children = SupervisorRow("boss", [("work", "running", 5), ("gone", "down", 2)])
    return InsideReply(
        process="rank0",
        incarnation=1,
        actors=actors,
        held=1,
        nbytes=10,
        nbytes_max=100,
        rows=rows,
        supervisors=(children,),
    )


def seen(told: InsideReply, at_s: float) -> ProcessSnapshots:
    return ProcessSnapshots(address="a", target="job.py", replies=(told,), silent=("rank1",), at_s=at_s)


def shown(what: object) -> str:
    screen = rich.console.Console(width=200, record=True, file=io.StringIO())
    screen.print(what)
    return screen.export_text()


def test_rates_are_those_between_two_looks_and_of_one_life() -> None:
    rates = Rates()
    rates.take(seen(reply(100), 1.0))
    (first, boss) = rates.take(seen(reply(300), 3.0))
    assert (first[1].name, first[2], first[3], first[4]) == ("work", 100.0, 50.0, 4) and boss[2] == 0
    (again, *_) = rates.take(seen(reply(7, incarnation=6), 4.0))
    assert again[2] == 0, "another life has not done what the one before did"


def test_the_table_and_the_tree_tell_what_is_out_of_the_ordinary() -> None:
    screen = Screen()
    screen.take([seen(reply(1), 1.0)], ())
    table = shown(screen.drawn(None))
    assert "Worker v2" in table and "no answer: rank1" in table and "loop held 1 times" in table
    tree = shown(tree_of(seen(reply(1, actors=1500), 1.0)))
    assert "work#5  Worker v2, running, 3 waiting, restarted 4 times" in tree
    assert "gone  down, started 2 times" in tree and "and 1498 more" in tree
    assert "rank1  does not answer" in tree
