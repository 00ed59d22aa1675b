"""Hangs of a job over hosts: what the watchdogs of all its ranks say is brought before one judge.

The judge is the lowest of the nodes that run the job, by the job table, so all agree on who it is. The others
pass on what their watchdogs say and do what it asks. When the judge changes, the new one begins with what is
still so: it may tell once more of a hang that is not over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, assert_never

import structlog

from zbmd.actors.cluster.jobs.contracts import (
    HangAsk,
    HangBeats,
    HangEnd,
    HangSeen,
    HangStanding,
    HangWord,
)
from zbmd.actors.cluster.jobs.table import Job
from zbmd.actors.cluster.node_id import NodeKey
from zbmd.actors.hangs.verdict import (
    AskStanding,
    HangEvent,
    LookOutside,
    RankGone,
    RankHeard,
    RankSeen,
    RankStood,
    RankWatched,
    Replace,
    Ticked,
)
from zbmd.actors.hangs.wire import cut

log: Final = structlog.stdlib.get_logger("zbmd.cluster.hang")

Seat = tuple[NodeKey, int]
"""The node that runs a rank, and the rank's incarnation."""


def judge_of(job: Job) -> NodeKey | None:
    """The node that judges the hangs of a job; None if nobody runs it."""
    return min(job.nodes(), default=None)


def seats_of(job: Job | None) -> dict[int, Seat]:
    """Who runs what of a job."""
    entries = () if job is None else job.ranks
    return {e.rank: (e.node, e.incarnation) for e in entries if e.lives and e.node is not None}


class HangRelay:
    """One node's part in the judgement of one job. send: tells another node's life.

    A `zbmd.actors.hangs.collector.HangPeers`; `place` it with each view.
    """

    def __init__(self, job: int, send: Callable[[NodeKey, HangWord], None]) -> None:
        self._job = job
        self._send = send
        self._me: NodeKey | None = None
        self._judge: NodeKey | None = None
        self._seats: dict[int, Seat] = {}
        self._names: Mapping[NodeKey, str] = {}
        self._heard: set[tuple[int, int]] = set()

    def place(
        self, me: NodeKey, job: Job | None, names: Mapping[NodeKey, str]
    ) -> tuple[bool, list[RankGone]]:
        """The job table is another one: whether the judge is, and the ranks elsewhere that have gone."""
        before, judge = self._judge, None if job is None else judge_of(job)
        seats = seats_of(job)
        gone = [
            RankGone(rank=rank, incarnation=seat[1])
            for rank, seat in self._seats.items()
            if seat[0] != self._me and seats.get(rank) != seat
        ]
        self._me, self._judge, self._seats, self._names = me, judge, seats, names
        self._heard = {key for key in self._heard if seats.get(key[0]) == (me, key[1])}
        return judge != before, gone

    @property
    def judges(self) -> bool:
        """Whether this node is the judge."""
        return self._judge is None or self._judge == self._me

    def host_of(self, rank: int) -> str:
        """What people call the node of a rank; nothing while one node runs all of them."""
        seat = self._seats.get(rank)
        if seat is None or len({node for node, _ in self._seats.values()}) < 2:
            return ""
        return self._names.get(seat[0]) or str(seat[0])

    def tell(self, event: HangEvent) -> None:
        """Pass on what a watchdog here says."""
        if self._judge is None:
            return
        match event:
            case RankWatched() | RankHeard():
                self._heard.add((event.rank, event.incarnation))
            case Ticked() if not self._heard:
                pass
            case Ticked():
                self._send(self._judge, HangBeats(job=self._job, ranks=tuple(sorted(self._heard))))
                self._heard.clear()
            case RankStood(rank=rank, incarnation=incarnation, standing=standing):
                self._send(self._judge, HangStanding(self._job, rank, incarnation, standing))
            case RankSeen(rank=rank, incarnation=incarnation, words=words):
                self._send(self._judge, HangSeen(self._job, rank, incarnation, cut(words)))
            case RankGone(rank=rank, incarnation=incarnation):
                self._heard.discard((rank, incarnation))
                self._send(self._judge, HangSeen(self._job, rank, incarnation, "", gone=True))
            case _:
                assert_never(event)

    def ask(self, action: AskStanding | LookOutside | Replace) -> bool:
        """Have the node of a rank do it; False if that rank runs nowhere else."""
        rank, incarnation = action.rank, action.incarnation
        node, runs = self._seats.get(rank, (self._me, 0))
        if node is None or node == self._me or runs != incarnation:
            return False
        match action:
            case AskStanding() | LookOutside():
                outside = isinstance(action, LookOutside)
                self._send(node, HangAsk(self._job, rank, incarnation, outside))
            case Replace():
                self._send(node, HangEnd(self._job, rank, incarnation))
        return True

    def events(self, sender: NodeKey, word: HangBeats | HangStanding | HangSeen) -> Iterator[HangEvent]:
        """What another node passes on, for the judge; of ranks that it runs."""
        if not self.judges:
            return  # it has not heard yet that another one is
        if isinstance(word, HangBeats):
            for rank, incarnation in word.ranks:
                if self._seats.get(rank) == (sender, incarnation):
                    yield RankWatched(rank=rank, incarnation=incarnation, host=self.host_of(rank))
                    yield RankHeard(rank=rank, incarnation=incarnation)
            return
        rank, incarnation = word.rank, word.incarnation
        if self._seats.get(rank) != (sender, incarnation):
            log.debug("word of a rank that it does not run", node=str(sender), rank=rank)
            return
        yield RankWatched(rank=rank, incarnation=incarnation, host=self.host_of(rank))
        if isinstance(word, HangStanding):
            yield RankStood(rank=rank, incarnation=incarnation, standing=word.standing)
        elif word.gone:
            yield RankGone(rank=rank, incarnation=incarnation)
        else:
            yield RankSeen(rank=rank, incarnation=incarnation, words=word.words)

    def obeys(self, sender: NodeKey) -> bool:
        """Whether what `sender` asks is to be done: it is the judge."""
        return sender == self._judge
