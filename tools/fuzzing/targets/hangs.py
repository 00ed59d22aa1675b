"""The target of what watchdogs and hosts say to each other, and of the judgement over what they claim."""

from __future__ import annotations

from zbmd.actors.hangs import wire as hang_wire
from zbmd.actors.hangs.verdict import AskStanding, HangMachine, RankStood, RankWatched, Ticked
from zbmd.actors.hangs.wire import Frame, Place, PlaceKind, Position, Standing
from zbmd.tools.fuzzing.target import Target
from zbmd.transport.errors import RemoteProtocolError

DEADLINE_NS = 1_000_000_000
RANKS = 3


def _seeds() -> tuple[bytes, ...]:
    frames = (Frame("train.py", 8, "main"), Frame("threading.py", 1, "wait", 0))
    places = tuple(
        Place(kind, "rank0/a", "handler A.b", DEADLINE_NS, True, frames, "rank1/a") for kind in PlaceKind
    )
    groups = (Position(0, 2, 17, "all_reduce", True, True, DEADLINE_NS, (0, 1, 2)),)
    messages: tuple[hang_wire.FromRank | hang_wire.FromHost, ...] = (
        hang_wire.Hello(0, 1),
        hang_wire.Beat(),
        Standing(places, groups),
        Standing((), ()),
        hang_wire.Ask(),
    )
    return tuple(hang_wire.encode(message) for message in messages)


def _run(data: bytes) -> None:
    try:
        hang_wire.decode_from_host(data)
    except RemoteProtocolError:
        message = hang_wire.decode_from_rank(data)
        if isinstance(message, Standing):
            _judge(message)


def _judge(standing: Standing) -> None:
    """Whatever ranks claim, the judgement ends, and its invariants hold."""
    machine = HangMachine(deadline_ns=DEADLINE_NS)
    for rank in range(RANKS):
        machine.handle(RankWatched(rank=rank, incarnation=1), now_ns=0)
    for turn in range(1, 4):
        for action in machine.handle(Ticked(), now_ns=turn * DEADLINE_NS):
            if isinstance(action, AskStanding):
                machine.handle(RankStood(rank=action.rank, incarnation=1, standing=standing), now_ns=0)
        for rank in range(RANKS):
            machine.handle(RankStood(rank=rank, incarnation=1, standing=standing), now_ns=turn * DEADLINE_NS)
        machine.check_invariants()


TARGETS = (
    Target(
        name="hang.packet",
        what="what a rank's watchdog and its host say to each other",
        allowed=(RemoteProtocolError,),
        seeds=_seeds,
        run=_run,
    ),
)
