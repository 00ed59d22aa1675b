"""The verdict machine: each root once, the right culprit, and nobody accused who is not to blame."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from zbmd.actors.hangs.progress import Looked, ProgressMachine, Sample, look_ns
from zbmd.actors.hangs.verdict import (
    AskStanding,
    CaseState,
    ExtendTimeouts,
    HangAction,
    HangEvent,
    HangMachine,
    HangNotice,
    LookOutside,
    OnHang,
    RankAlive,
    RankDebugged,
    RankGone,
    RankPosition,
    RankSeen,
    RankWatched,
    Replace,
    ReportHang,
    StopRun,
    Ticked,
)
from zbmd.actors.hangs.wire import Frame, Place, PlaceKind, Position, Standing

DEADLINE_NS = 1_600_000_000
LOOK_NS = look_ns(DEADLINE_NS)
LINE = (Frame("train.py", 88, "load_batch"), Frame("threading.py", 1, "wait", 0))


def handler(who: str, *, waits_for: str = "", stuck: bool = True) -> Place:
    kind, what = PlaceKind.HANDLER, "handler Worker.work"
    return Place(kind, who, what, DEADLINE_NS, stuck, LINE, waits_for)


def main_place(rank: int) -> Place:
    return Place(PlaceKind.MAIN, f"rank{rank}", "its main task", 0, False, LINE)


def position(sequence: int, members: int, *, running: bool = True, stuck: bool = True) -> Position:
    return Position(0, 2, sequence, "all_reduce", running, stuck, DEADLINE_NS, tuple(range(members)))


class Ranks:
    """A machine, and ranks that answer with the standing they are given; one without any is silent."""

    def __init__(self, count: int, on_hang: OnHang = OnHang.REPORT) -> None:
        self.machine = HangMachine(deadline_ns=DEADLINE_NS, on_hang=on_hang)
        self.standings: dict[int, Standing | None] = dict.fromkeys(range(count), Standing((), ()))
        self.now_ns = 0
        self.done: list[HangAction] = []
        for rank in range(count):
            self.put(RankWatched(rank=rank, incarnation=1))

    def put(self, event: HangEvent) -> None:
        actions = self.machine.handle(event, now_ns=self.now_ns)
        self.machine.check_invariants()
        for action in actions:
            self.done.append(action)
            match action:
                case AskStanding(rank=rank):
                    self.say(rank)
                case LookOutside(rank=rank):
                    self.put(RankSeen(rank=rank, incarnation=1, words="is stopped (SIGSTOP)"))
                case _:
                    pass

    def say(self, rank: int) -> None:
        standing = self.standings[rank]
        if standing is not None:
            self.put(RankPosition(rank=rank, incarnation=1, standing=standing))

    def now(self, rank: int, *places: Place, groups: tuple[Position, ...] = ()) -> None:
        """The rank's position, as it reports it at the next look."""
        self.standings[rank] = Standing(places, groups)

    def wait(self, for_ns: int) -> None:
        end_ns = self.now_ns + for_ns
        while self.now_ns < end_ns:
            self.now_ns += LOOK_NS
            for rank in self.standings:
                self.say(rank)
            self.put(Ticked())

    @property
    def notices(self) -> list[HangNotice]:
        return [action.notice for action in self.done if isinstance(action, ReportHang)]


def test_a_collective_that_one_never_enters() -> None:
    ranks = Ranks(4)
    ranks.now(3, main_place(3), groups=(position(16, 4, running=False, stuck=False),))
    for rank in range(3):
        ranks.now(rank, groups=(position(17, 4),))
    ranks.wait(3 * DEADLINE_NS)
    (notice,) = ranks.notices
    assert notice.text == (
        "rank 3 never entered all_reduce #17 of epoch 2; ranks 0-2 wait in it for 1.6 s; "
        "rank3 is at train.py:88 in load_batch"
    )
    assert notice.culprits == ((3, 1),)
    assert notice.stack == ("train.py:88 in load_batch", "threading.py:1 in wait")


def test_the_silent_one_is_the_root_of_what_waits_for_it() -> None:
    ranks = Ranks(3)
    ranks.now(2, groups=(position(16, 3, running=False, stuck=False),))
    ranks.wait(LOOK_NS)
    ranks.standings[2] = None
    ranks.now(1, handler("rank1/a", waits_for="rank2/b"))
    ranks.now(0, groups=(position(17, 3),))
    ranks.wait(3 * DEADLINE_NS)
    (notice,) = ranks.notices
    assert notice.text.startswith("ranks 1-2 never entered all_reduce #17 of epoch 2; rank 0 waits in it for")
    assert "rank 2 is stopped (SIGSTOP), for " in notice.text
    assert notice.text.endswith("rank1/a waits for it")
    assert notice.culprits == ((2, 1),)


def test_one_that_stops_inside_an_operation_is_blamed_for_it() -> None:
    ranks = Ranks(2)
    ranks.now(1, groups=(position(17, 2, stuck=False),))
    ranks.wait(LOOK_NS)
    ranks.standings[1] = None
    ranks.now(0, groups=(position(17, 2),))
    ranks.wait(2 * DEADLINE_NS)
    (notice,) = ranks.notices
    assert "rank 1 is stopped (SIGSTOP)" in notice.text
    assert notice.culprits == ((1, 1),)


def test_all_have_entered_and_nobody_is_to_blame() -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.now(rank, groups=(position(17, 2),))
    ranks.wait(DEADLINE_NS)
    (notice,) = ranks.notices
    assert "although all its members have entered it" in notice.text
    assert notice.culprits == ()


def test_members_that_are_elsewhere_are_not_judged() -> None:
    ranks = Ranks(2)
    for rank in range(2):
        ranks.now(rank, groups=(position(17, 5),))
    ranks.wait(DEADLINE_NS)
    (notice,) = ranks.notices
    assert "ranks 2-4 cannot be seen here" in notice.text


@pytest.mark.parametrize("length", [2, 3, 5])
def test_a_ring_of_asks_is_a_deadlock(length: int) -> None:
    ranks = Ranks(length, OnHang.REPLACE)
    for rank in range(length):
        ranks.now(rank, handler(f"rank{rank}/a", waits_for=f"rank{(rank + 1) % length}/a"))
    ranks.wait(DEADLINE_NS)
    (notice,) = ranks.notices
    assert notice.text.startswith("a deadlock for 1.6 s: rank")
    assert notice.text.count(" waits for ") == length
    assert len(notice.culprits) == length
    (ended,) = [action for action in ranks.done if isinstance(action, Replace)]
    assert ended.rank == length - 1, "one end is enough to break a ring"


def test_a_chain_leads_to_its_end_also_if_that_is_not_stuck_yet() -> None:
    ranks = Ranks(3)
    ranks.now(2, handler("rank2/c", stuck=False))
    ranks.now(1, handler("rank1/b", waits_for="rank2/c"))
    ranks.now(0, handler("rank0/a", waits_for="rank1/b"))
    ranks.wait(DEADLINE_NS)
    (notice,) = ranks.notices
    assert notice.text.startswith("rank2/c is at train.py:88 in load_batch")
    ranks.now(2, handler("rank2/c"))
    ranks.wait(DEADLINE_NS)
    assert len(ranks.notices) == 1, "the same root is reported once"


def test_what_is_over_is_told_and_may_come_again() -> None:
    ranks = Ranks(1)
    for _ in range(2):
        ranks.now(0, handler("rank0/a"))
        ranks.wait(DEADLINE_NS)
        ranks.now(0)
        ranks.wait(DEADLINE_NS)
    assert [notice.over for notice in ranks.notices] == [False, True, False, True]
    assert ranks.machine.notices == ()
    assert ranks.machine.state is CaseState.QUIET


def test_the_end_of_a_rank_is_told_of_elsewhere() -> None:
    ranks = Ranks(2)
    ranks.now(1, handler("rank1/a"))
    ranks.wait(DEADLINE_NS)
    ranks.put(RankGone(rank=1, incarnation=1))
    del ranks.standings[1]
    ranks.wait(DEADLINE_NS)
    assert len(ranks.notices) == 1
    ranks.put(RankAlive(rank=1, incarnation=1))
    ranks.put(RankWatched(rank=1, incarnation=2))
    ranks.put(RankGone(rank=1, incarnation=1))
    assert ranks.machine.notices == ()


def test_a_host_that_slept_accuses_nobody() -> None:
    ranks = Ranks(2)
    ranks.wait(DEADLINE_NS)
    ranks.now_ns += 1000 * DEADLINE_NS
    ranks.put(Ticked())
    ranks.wait(2 * DEADLINE_NS)
    assert not ranks.notices


def debugged(ranks: Ranks, rank: int, looks: int) -> None:
    for _ in range(looks):
        ranks.put(RankDebugged(rank=rank, incarnation=1))
        ranks.wait(LOOK_NS)


def test_nobody_hangs_while_one_is_in_a_debugger_and_all_extend_their_time_outs() -> None:
    ranks = Ranks(3, OnHang.STOP)
    ranks.now(0, groups=(position(17, 3),))
    ranks.standings[2] = None
    ranks.put(RankDebugged(rank=2, incarnation=1))
    extended = [ExtendTimeouts(rank=rank, incarnation=1) for rank in range(3)]
    assert ranks.done == extended, "before any time-out that is longer than that"
    looks = 4 * DEADLINE_NS // LOOK_NS
    debugged(ranks, 2, looks)
    assert ranks.done == (1 + looks) * extended
    ranks.now(0)
    ranks.now(2)
    ranks.wait(4 * DEADLINE_NS)
    assert not ranks.notices


def test_a_hang_from_before_a_debugger_is_found_once_it_is_over() -> None:
    """A rank says only once that it is stuck, and all were busy with the debugger then."""
    ranks = Ranks(3)
    ranks.now(0, groups=(position(17, 3),))
    ranks.now(1, groups=(position(17, 3),))
    debugged(ranks, 1, 2 * DEADLINE_NS // LOOK_NS)
    for _ in range(3 * DEADLINE_NS // LOOK_NS):
        ranks.now_ns += LOOK_NS
        for rank in ranks.standings:
            ranks.put(RankAlive(rank=rank, incarnation=1))
        ranks.put(Ticked())
    assert [notice.culprits for notice in ranks.notices] == [((2, 1),)]


def test_a_rank_that_ends_in_its_debugger_is_in_it_no_more() -> None:
    ranks = Ranks(2)
    ranks.put(RankDebugged(rank=1, incarnation=1))
    ranks.put(RankGone(rank=1, incarnation=1))
    del ranks.standings[1]
    ranks.put(RankDebugged(rank=1, incarnation=1))  # on its way meanwhile
    before = len(ranks.done)
    ranks.wait(LOOK_NS)
    assert not [action for action in ranks.done[before:] if isinstance(action, ExtendTimeouts)]


def test_the_run_is_stopped_if_so_asked() -> None:
    ranks = Ranks(1, OnHang.STOP)
    ranks.now(0, handler("rank0/a"))
    ranks.wait(DEADLINE_NS)
    assert [action.reason for action in ranks.done if isinstance(action, StopRun)] == [ranks.notices[0].text]


def test_claims_without_end_are_followed_to_an_end() -> None:
    """Standings may claim anything, say every rank to be in many operations that wait for every other."""
    ranks, count = Ranks(32), 32
    for rank in range(count):
        groups = tuple(
            Position(c, rank + 1, rank + 2, "x", True, True, DEADLINE_NS, tuple(range(count)))
            for c in range(16)
        )
        ranks.now(rank, groups=groups)
    ranks.wait(DEADLINE_NS)
    assert ranks.notices


# ---- a simulated job: ranks in step, one of which may hang


@dataclass
class SimulatedRank:
    """Steps of work, and an operation that all must enter. It hangs from `hangs_ns` on, as `how` says."""

    rank: int
    hangs_ns: int
    how: str
    machine: ProgressMachine
    sequence: int = 0
    inside: bool = False
    busy_ns: int = 0
    log: list[str] = field(default_factory=list[str])

    def hangs(self, now_ns: int) -> bool:
        return now_ns >= self.hangs_ns

    def look(self, now_ns: int) -> bool:
        """Whether there is anything to tell."""
        samples = [Sample(key="loop", mark=0 if self.hangs(now_ns) and self.how == "blocked" else now_ns)]
        if self.inside:
            samples.append(Sample(key="operation", mark=self.sequence))
        return bool(self.machine.handle(Looked(samples=tuple(samples)), now_ns=now_ns))

    def standing(self, now_ns: int, members: int) -> Standing:
        still, stuck = self.machine.still_ns, self.machine.is_stuck
        places = [main_place(self.rank)]
        if self.hangs(now_ns) and self.how == "blocked":
            what, who = "its event loop is blocked", f"rank{self.rank}"
            places.append(Place(PlaceKind.LOOP, who, what, still("loop"), stuck("loop"), LINE))
        running = self.inside
        at = Position(
            0,
            1,
            self.sequence,
            "all_reduce",
            running,
            running and stuck("operation"),
            still("operation"),
            tuple(range(members)),
        )
        return Standing(tuple(places), (at,))


def simulate(seed: int) -> tuple[list[HangNotice], int, bool]:
    """One history: its notices, who hung, and whether anybody did."""
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    hung, how = draw.random() < 0.8, draw.choice(["silent", "blocked", "late"] if count > 1 else ["blocked"])
    culprit = draw.randrange(count)
    start_ns = draw.randint(0, DEADLINE_NS)
    never_ns = 1 << 62
    members = [
        SimulatedRank(
            rank,
            start_ns if hung and rank == culprit else never_ns,
            how,
            ProgressMachine(deadline_ns=DEADLINE_NS, look_ns=LOOK_NS),
        )
        for rank in range(count)
    ]
    machine = HangMachine(deadline_ns=DEADLINE_NS)
    notices: list[HangNotice] = []
    inbox: list[tuple[int, int, HangEvent]] = []
    now_ns = serial = 0

    def post(event: HangEvent) -> None:
        nonlocal serial
        serial += 1
        inbox.append((now_ns + draw.randint(0, LOOK_NS), serial, event))

    def put(event: HangEvent) -> None:
        actions = machine.handle(event, now_ns=now_ns)
        machine.check_invariants()
        for action in actions:
            match action:
                case ReportHang(notice=notice):
                    notices.append(notice)
                case AskStanding(rank=rank):
                    member = members[rank]
                    if not (member.hangs(now_ns) and how == "silent"):
                        post(RankPosition(rank=rank, incarnation=1, standing=member.standing(now_ns, count)))
                case LookOutside(rank=rank):
                    put(RankSeen(rank=rank, incarnation=1, words="is stopped (SIGSTOP)"))
                case _:
                    raise AssertionError(action)

    for rank in range(count):
        put(RankWatched(rank=rank, incarnation=1))
    while now_ns < 5 * DEADLINE_NS:
        now_ns += LOOK_NS // 2 + draw.randint(0, LOOK_NS // 2)
        for member in members:
            if member.hangs(now_ns):
                member.busy_ns = never_ns
            member.busy_ns = max(0, member.busy_ns - LOOK_NS)
            if not member.inside and not member.busy_ns:
                member.inside, member.sequence = True, member.sequence + 1
            if member.hangs(now_ns) and how == "silent":
                continue
            if member.look(now_ns):
                post(RankPosition(rank=member.rank, incarnation=1, standing=member.standing(now_ns, count)))
            else:
                post(RankAlive(rank=member.rank, incarnation=1))
        # One that hangs inside does its part nevertheless, natively, unless all of it is stopped.
        if all(m.inside and not (m.hangs(now_ns) and how == "silent") for m in members):
            for member in members:
                member.inside, member.busy_ns = False, draw.randint(0, DEADLINE_NS // 4)
        for due in sorted(item for item in inbox if item[0] <= now_ns):
            inbox.remove(due)
            put(due[2])
        put(Ticked())
    return notices, culprit, hung


@pytest.mark.parametrize("part", range(4))
def test_simulated_jobs(part: int, seed: int) -> None:
    """Safety: nobody is accused who does not hang. Liveness: a rank that hangs is reported, once."""
    for history in range(100):
        notices, culprit, hung = simulate(seed + 1000 * part + history)
        story = f"seed {seed + 1000 * part + history}: {[notice.text for notice in notices]}"
        blamed = {rank for notice in notices for rank, _ in notice.culprits}
        assert blamed == ({culprit} if hung else set[int]()), story
        assert sum(not notice.over for notice in notices) == hung, story
