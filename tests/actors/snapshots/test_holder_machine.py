"""The machine of a snapshot process, under any order of launchers, tools, losses and time."""

from __future__ import annotations

import random

import msgspec
import pytest

from zbmd.actors.snapshots import machine as m
from zbmd.actors.snapshots.messages import (
    FORMAT,
    Attach,
    Drop,
    Dropped,
    Finish,
    Hold,
    Holds,
    JobIdentity,
    Look,
    Memory,
    Refused,
    Request,
    Standing,
    Work,
    decode_answer,
    decode_request,
    encode,
)
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

IDLE_NS = 1000
IDENTITY = JobIdentity(
    run="here python train.py",
    release="1",
    python="3.11",
    code="c0",
    ranks=3,
    arena_bytes=1 << 20,
    settings="s0",
)
LAUNCHER, OTHER, TOOL = 1, 2, 3


def holder() -> m.Holder:
    return m.Holder(7, IDENTITY, IDLE_NS, client=LAUNCHER, pid=100)


def asked(client: int, request: Request, memory: int | None = None) -> m.Asked:
    return m.Asked(client=client, pid=100 + client, request=request, memory=memory)


def orphan() -> m.Holder:
    made = holder()
    for rank in range(2):
        made.handle(asked(LAUNCHER, Hold(rank=rank), rank + 10), now_ns=0)
    assert made.handle(m.ClientLost(client=LAUNCHER), now_ns=5) == [SetTimer(at_ns=5 + IDLE_NS)]
    return made


def test_memory_is_held_replaced_and_given_to_the_next_launcher() -> None:
    made = orphan()
    held = made.handle(asked(OTHER, Attach(identity=IDENTITY)), now_ns=6)
    standing = Standing(
        job=7, identity=IDENTITY, ranks=(0, 1), launcher=102, idle_ns=IDLE_NS, left_ns=IDLE_NS
    )
    assert held == [
        m.Reply(client=OTHER, answer=standing),
        m.Reply(client=OTHER, answer=Memory(rank=0), memory=10),
        m.Reply(client=OTHER, answer=Memory(rank=1), memory=11),
    ]
    assert made.handle(asked(OTHER, Hold(rank=1), 12), now_ns=7) == [
        m.Release(memory=11),
        m.Reply(client=OTHER, answer=Holds(rank=1)),
    ]
    assert made.handle(TimerFired(), now_ns=6 + IDLE_NS) == [], "a launcher came in time"
    ended = made.handle(asked(OTHER, Finish()), now_ns=8)
    assert ended == [m.Release(memory=10), m.Release(memory=12), m.End(reason="its job has ended")]


@pytest.mark.parametrize("field", ["run", "release", "python", "code", "ranks", "arena_bytes", "settings"])
def test_a_launcher_of_another_job_code_or_version_is_refused_and_told_what_differs(field: str) -> None:
    made = orphan()
    value = getattr(IDENTITY, field)
    other = msgspec.structs.replace(IDENTITY, **{field: value + (1 if isinstance(value, int) else "x")})
    (refused,) = made.handle(asked(OTHER, Attach(identity=other)), now_ns=6)
    reason = f"these snapshots are of another {field}"
    assert refused == m.Reply(client=OTHER, answer=Refused(reason=reason, fields=(field,)))
    assert made.state is m.HolderState.ORPHANED and len(made.held) == 2, "it waits for its own"


def test_a_launcher_of_a_job_that_runs_is_refused_and_so_is_a_drop() -> None:
    made = holder()
    (refused,) = made.handle(asked(OTHER, Attach(identity=IDENTITY)), now_ns=0)
    assert refused == m.Reply(client=OTHER, answer=Refused(reason="process 100 runs this job"))
    (refused,) = made.handle(asked(TOOL, Drop()), now_ns=0)
    assert isinstance(refused, m.Reply) and isinstance(refused.answer, Refused)
    (refused,) = orphan().handle(asked(OTHER, Attach(identity=IDENTITY, format=FORMAT + 1)), now_ns=6)
    assert isinstance(refused, m.Reply) and isinstance(refused.answer, Refused)


def test_it_ends_when_dropped_and_when_nobody_comes_and_at_once_with_nothing_to_hold() -> None:
    made = orphan()
    assert made.handle(TimerFired(), now_ns=4 + IDLE_NS) == []
    assert made.handle(TimerFired(), now_ns=5 + IDLE_NS)[-1] == m.End(reason="no launcher came for it")
    dropped = orphan().handle(asked(TOOL, Drop()), now_ns=6)
    assert dropped[0] == m.Reply(client=TOOL, answer=Dropped())
    assert dropped[-1] == m.End(reason="a user dropped it")
    (ended,) = holder().handle(m.ClientLost(client=LAUNCHER), now_ns=0)
    assert isinstance(ended, m.End)


@pytest.mark.parametrize(
    "event",
    [
        asked(OTHER, Hold(rank=0), 9),
        asked(OTHER, Finish()),
        asked(LAUNCHER, Hold(rank=3), 9),
        asked(LAUNCHER, Hold(rank=0)),
        asked(LAUNCHER, Look(), 9),
    ],
)
def test_what_a_client_may_not_send_ends_its_connection_and_changes_nothing(event: m.Asked) -> None:
    made = holder()
    with pytest.raises(RemoteProtocolError):
        made.handle(event, now_ns=0)
    assert made.state is m.HolderState.ATTACHED and not made.held


def test_work_hears_that_a_client_is_lost_which_has_asked_for_it() -> None:
    made = orphan()
    made.handle(asked(OTHER, Work(payload=b"write"), 20), now_ns=6)
    assert made.handle(m.ClientLost(client=TOOL), now_ns=7) == []
    assert made.handle(m.ClientLost(client=OTHER), now_ns=7) == [m.Leave(client=OTHER)]
    assert made.handle(m.ClientLost(client=OTHER), now_ns=7) == []


def test_it_does_not_end_in_the_middle_of_work_but_for_a_drop() -> None:
    made = orphan()
    work = made.handle(asked(OTHER, Work(payload=b"write"), 20), now_ns=6)
    assert work == [m.Perform(client=OTHER, payload=b"write", arguments=20)]
    assert made.handle(m.Working(is_busy=True), now_ns=7) == []
    assert made.handle(TimerFired(), now_ns=5 + IDLE_NS) == [m.Hasten()]
    assert made.state is m.HolderState.ENDING
    (refused,) = made.handle(asked(OTHER, Attach(identity=IDENTITY)), now_ns=6 + IDLE_NS)
    assert isinstance(refused, m.Reply) and isinstance(refused.answer, Refused)
    with pytest.raises(RemoteProtocolError):
        made.handle(asked(OTHER, Work(payload=b"more")), now_ns=7 + IDLE_NS)
    assert made.handle(m.Working(is_busy=False), now_ns=8 + IDLE_NS)[-1] == m.End(
        reason="no launcher came for it"
    )
    made = orphan()
    made.handle(m.Working(is_busy=True), now_ns=6)
    assert made.handle(asked(TOOL, Drop()), now_ns=7)[-1] == m.End(reason="a user dropped it")
    assert made.handle(m.Working(is_busy=False), now_ns=8) == []
    made = holder()
    made.handle(m.Working(is_busy=True), now_ns=0)
    assert made.handle(asked(LAUNCHER, Finish()), now_ns=1) == [m.Hasten()]
    assert made.handle(m.ClientLost(client=LAUNCHER), now_ns=2) == []
    assert made.handle(m.Working(is_busy=False), now_ns=3) == [m.End(reason="its job has ended")]


def test_any_history_gives_each_memory_back_once(seed: int) -> None:
    for number in range(200):
        _history(random.Random(seed + number))


def _history(draw: random.Random) -> None:
    """Random clients; every handle that came in is held or released, once; the end releases all."""
    made, now_ns, given, freed, ended = holder(), 0, 0, list[int](), False
    due_ns: int | None = None
    for _ in range(draw.randrange(1, 60)):
        now_ns += draw.choice((1, 1, 10, IDLE_NS // 2))
        if due_ns is not None and now_ns >= due_ns:
            event: m.Event = TimerFired()
        elif draw.random() < 0.15:
            event = m.ClientLost(client=draw.choice((LAUNCHER, OTHER, TOOL)))
        elif draw.random() < 0.1:
            event = m.Working(is_busy=draw.random() < 0.4)
        else:
            other = msgspec.structs.replace(IDENTITY, code="c1")
            request = draw.choice(
                (
                    Hold(rank=draw.randrange(4)),
                    Look(),
                    Work(payload=b"work"),
                    Finish(),
                    Drop(),
                    Attach(identity=IDENTITY),
                    Attach(identity=other),
                )
            )
            memory = None
            if isinstance(request, Hold) or draw.random() < 0.02:
                memory, given = given, given + 1
            event = asked(draw.choice((LAUNCHER, OTHER, TOOL)), request, memory)
        try:
            actions = made.handle(event, now_ns=now_ns)
        except RemoteProtocolError:
            if isinstance(event, m.Asked) and event.memory is not None:
                freed.append(event.memory)  # the driver closes what came with it
            made.check_invariants()
            continue
        for action in actions:
            match action:
                case m.Release(memory=memory):
                    freed.append(memory)
                case m.Perform(arguments=arguments):
                    freed += [] if arguments is None else [arguments]  # it belongs to the work now
                case SetTimer(at_ns=at_ns):
                    due_ns = at_ns
                case m.End():
                    assert not ended, "it ends once"
                    ended = True
                case m.Reply(memory=handle):
                    assert handle is None or handle in made.held.values(), "what is sent is held"
                case m.Hasten() | m.Leave():
                    pass
        assert sorted([*made.held.values(), *freed]) == list(range(given)), "no memory is lost or freed twice"
        assert ended == (made.state is m.HolderState.ENDED)
        if made.state is m.HolderState.ORPHANED:
            assert due_ns is not None and due_ns > now_ns, "an orphan always ends by itself"


def test_messages_are_decoded_within_bounds() -> None:
    for request in (Attach(identity=IDENTITY), Hold(rank=1), Finish(), Look(), Drop(), Work(payload=b"x")):
        assert decode_request(encode(request)) == request
    for bad in (
        b"",
        b"\xc1",
        encode(Hold(rank=-1)),
        encode(Hold(rank=1 << 20)),
        encode(["hold"]),
        b"\x00" * (1 << 18),
    ):
        with pytest.raises(RemoteProtocolError):
            decode_request(bad)
        with pytest.raises(RemoteProtocolError):
            decode_answer(bad)
