"""Hangs of a job over hosts: one host judges, names the root on whichever host it is, and acts once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.machines.job_world import World, world

from zbmd.actors.cluster.contracts import (
    HangAsk,
    HangBeats,
    HangDebugged,
    HangEnd,
    HangExtend,
    HangMessage,
    HangReport,
    HangSeen,
)
from zbmd.actors.cluster.jobs.hosted_job import HangRelay, judge_of
from zbmd.actors.cluster.jobs.reports import RankDown
from zbmd.actors.cluster.state.job_table import Job, JobSpec, RankEntry, SlotState
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.hangs.verdict import (
    AskStanding,
    ExtendTimeouts,
    HangEvent,
    HangNotice,
    LookOutside,
    RankAlive,
    RankDebugged,
    RankGone,
    RankPosition,
    RankSeen,
    RankWatched,
    Replace,
    Ticked,
)
from zbmd.actors.hangs.wire import Standing

NODES = tuple(NodeKey(i, 1) for i in range(3))
STANDING = Standing((), ())

NEVER_ENTERS = PROGRAMS / "actors/never_enters.py"


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


def hang(w: World, rank: int, on_hang: str, *, deadline: str = "3s") -> None:
    """Submit a job whose `rank` never enters what the others wait in."""
    w.script = NEVER_ENTERS
    environment = (("HANGS", str(rank)), ("ZBMD_PROGRESS_DEADLINE", deadline), ("ZBMD_ON_HANG", on_hang))
    w.submit(nodes_min=3, nodes_max=3, environment=environment)


def named(w: World) -> list[list[HangNotice]]:
    """Of each host, the hangs whose root it named.

    Before the other hosts have answered it may tell of a wait that it sees no root of.
    """
    told = [[event for event in place.events if isinstance(event, HangNotice)] for place in w.places]
    return [[notice for notice in of if notice.culprits and not notice.over] for of in told]


@pytest.mark.parametrize("rank", [0, 2])
async def test_the_root_is_named_by_one_host_wherever_it_is(tmp_path: Path, rank: int) -> None:
    async with world(tmp_path, 3) as w:
        hang(w, rank, "report")
        await w.until(lambda: any(named(w)), "there is no report")
        told = named(w)
        assert [bool(of) for of in told] == [True, False, False]
        lines = NEVER_ENTERS.read_text().splitlines()
        line = next(number for number, text in enumerate(lines, 1) if "STANDS HERE" in text)
        waiting = "ranks 1-2" if rank == 0 else "ranks 0-1"
        found = re.match(
            rf"rank {rank} on node{rank}#1 never entered all_reduce #\d+ of epoch \d+; {waiting} wait in it "
            rf"for .*; rank{rank} .* at .*never_enters.py:{line} in load_batch",
            told[0][0].text,
        )
        assert found, told[0][0].text
        assert told[0][0].culprits == ((rank, 1),)


async def test_the_root_is_ended_on_its_host_and_the_job_goes_on(tmp_path: Path) -> None:
    async with world(tmp_path, 3) as w:
        hang(w, 2, "replace")  # a replacement has that time, too, until it enters
        job = await w.ended()
        downs = [down for place in w.places for down in place.of(RankDown)]
        ends = [(down.rank, down.incarnation, down.reason, down.tail[-1:]) for down in downs]
        assert job.restarts_total == 1 and job.ranks[2].incarnation == 2, (job.restarts_total, ends)
        assert "every rank finished" in job.reason
        assert [len(of) for of in named(w)] == [1, 0, 0]


async def test_ranks_of_all_hosts_wait_for_one_in_a_debugger(tmp_path: Path) -> None:
    """Beyond the time-outs of their operations, and nobody takes any of them for hanging."""
    async with world(tmp_path, 3) as w:
        w.script = PROGRAMS / "actors/debugged.py"
        environment = (("ZBMD_PROGRESS_DEADLINE", "2s"), ("ZBMD_ON_HANG", "stop"))
        w.submit(nodes_min=3, nodes_max=3, environment=environment)
        job = await w.ended()
    assert "every rank finished" in job.reason and job.restarts_total == 0, job
    assert [place.lines for place in w.places] == [[f"{rank}#1: sum 3"] for rank in range(3)]
    assert not [event for place in w.places for event in place.events if isinstance(event, HangNotice)]


# --- the relay ------------------------------------------------------------------------------------------


def job_of(*nodes: int) -> Job:
    """A job whose rank r runs on node `nodes[r]`."""
    ranks = tuple(
        RankEntry(rank=rank, node=NODES[node], incarnation=1, state=SlotState.UP)
        for rank, node in enumerate(nodes)
    )
    return Job(spec=JobSpec(job=5, target="t", nodes_max=3), submitter=NODES[0], ranks=ranks)


class Relays:
    """One relay a node; what they send arrives at once."""

    def __init__(self, job: Job) -> None:
        self.sent: list[tuple[int, HangMessage]] = []
        self.relays = [HangRelay(5, lambda to, word: self.sent.append((to.id, word))) for _ in NODES]
        self.place(job)

    def place(self, job: Job) -> list[tuple[bool, list[RankGone]]]:
        names = {NODES[0]: "a", NODES[1]: "b", NODES[2]: "c"}
        return [relay.place(NODES[i], job, names) for i, relay in enumerate(self.relays)]


def test_the_lowest_node_judges_and_the_others_pass_on() -> None:
    job = job_of(2, 1)
    assert judge_of(job) == NODES[1]
    relays = Relays(job)
    one, judge = relays.relays[2], relays.relays[1]
    assert (judge.judges, one.judges) == (True, False)
    events: list[HangEvent] = [
        RankWatched(rank=0, incarnation=1),
        RankAlive(rank=0, incarnation=1),
        RankPosition(rank=0, incarnation=1, standing=STANDING),
        RankSeen(rank=0, incarnation=1, words="sleeps"),
        RankDebugged(rank=0, incarnation=1),
        Ticked(),
        RankGone(rank=0, incarnation=1),
    ]
    for event in events:
        one.tell(event)
    assert [to for to, _ in relays.sent] == [1, 1, 1, 1, 1]
    heard = [
        event
        for _, word in relays.sent
        if isinstance(word, HangReport)
        for event in judge.events(NODES[2], word)
    ]
    watched = RankWatched(rank=0, incarnation=1, host="c")
    told = [events[2], events[3], events[4], events[1], events[6]]
    assert heard == [event for one in told for event in (watched, one)]


def test_nobody_speaks_for_ranks_of_others() -> None:
    relays = Relays(job_of(1, 2))
    judge = relays.relays[1]
    beats = HangBeats(job=5, ranks=((1, 1), (0, 1), (7, 1), (-3, 9)))
    for word in (beats, HangSeen(5, 0, 1, "lies"), HangDebugged(5, 0, 1)):
        assert [e for e in judge.events(NODES[2], word) if e.rank != 1] == []  # type: ignore[union-attr]
    assert list(relays.relays[2].events(NODES[1], HangSeen(5, 1, 1, "to one that does not judge"))) == []
    assert judge.obeys(NODES[1]) and not judge.obeys(NODES[2])


def test_what_is_asked_goes_to_the_node_of_the_rank() -> None:
    relays = Relays(job_of(0, 2))
    judge = relays.relays[0]
    assert judge.ask(AskStanding(rank=1, incarnation=1)) and judge.ask(LookOutside(rank=1, incarnation=1))
    assert judge.ask(Replace(rank=1, incarnation=1, reason="it hangs"))
    assert judge.ask(ExtendTimeouts(rank=1, incarnation=1))
    words = [HangAsk(5, 1, 1), HangAsk(5, 1, 1, True), HangEnd(5, 1, 1), HangExtend(5, 1, 1)]
    assert relays.sent == [(2, word) for word in words]
    assert not judge.ask(AskStanding(rank=0, incarnation=1)), "it is here"
    assert not judge.ask(AskStanding(rank=1, incarnation=7)), "it is not that one"


def test_a_judge_that_goes_has_a_successor_and_its_ranks_are_gone() -> None:
    relays = Relays(job_of(0, 1, 2))
    (_, of_first), (changed, of_second), (_, of_third) = relays.place(job_of(1, 1, 2))
    assert changed and relays.relays[1].judges and not relays.relays[2].judges
    assert of_first == [RankGone(rank=0, incarnation=1)] or of_first == []
    assert of_second == [RankGone(rank=0, incarnation=1)] == of_third
