"""Hang detection of a job over several hosts: the watchdogs of all its ranks report to one judge.

The judge is the lowest of the nodes that run the job by the job table, so all nodes agree on it. The others
forward what their watchdogs report and do what the judge asks. A new judge starts from the current state,
so it may report an ongoing hang once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, assert_never

import structlog

from zbmd.actors.cluster.jobs.contracts import (
    HangAsk,
    HangBeats,
    HangEnd,
    HangMessage,
    HangSeen,
    HangStanding,
)
from zbmd.actors.cluster.state.job_table import Job
from zbmd.actors.cluster.state.node_id import NodeKey
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

RankSlot = tuple[NodeKey, int]
"""The node that runs a rank, and the rank's incarnation."""


def judge_of(job: Job) -> NodeKey | None:
    """Return the node that judges a job's hangs; None if no node runs the job."""
    return min(job.nodes(), default=None)


def slots_of(job: Job | None) -> dict[int, RankSlot]:
    """Return the node and incarnation of each running rank of a job."""
    entries = () if job is None else job.ranks
    return {e.rank: (e.node, e.incarnation) for e in entries if e.lives and e.node is not None}


class HangRelay:
    """One node's part in the judgement of one job. send: tells another node's incarnation.

    A `zbmd.actors.hangs.collector.HangPeers`; `place` it with each view.
    """

    def __init__(self, job: int, send: Callable[[NodeKey, HangMessage], None]) -> None:
        self._job = job
        self._send = send
        self._me: NodeKey | None = None
        self._judge: NodeKey | None = None
        self._slots: dict[int, RankSlot] = {}
        self._names: Mapping[NodeKey, str] = {}
        self._heard: set[tuple[int, int]] = set()

    def place(
        self, me: NodeKey, job: Job | None, names: Mapping[NodeKey, str]
    ) -> tuple[bool, list[RankGone]]:
        """Take a new job table; return whether the judge changed, and the remote ranks that are gone."""
        before, judge = self._judge, None if job is None else judge_of(job)
        slots = slots_of(job)
        gone = [
            RankGone(rank=rank, incarnation=slot[1])
            for rank, slot in self._slots.items()
            if slot[0] != self._me and slots.get(rank) != slot
        ]
        self._me, self._judge, self._slots, self._names = me, judge, slots, names
        self._heard = {key for key in self._heard if slots.get(key[0]) == (me, key[1])}
        return judge != before, gone

    @property
    def judges(self) -> bool:
        """Whether this node is the judge."""
        return self._judge is None or self._judge == self._me

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's node; empty while one node runs all ranks."""
        slot = self._slots.get(rank)
        if slot is None or len({node for node, _ in self._slots.values()}) < 2:
            return ""
        return self._names.get(slot[0]) or str(slot[0])

    def tell(self, event: HangEvent) -> None:
        """Forward a local watchdog's event to the judge."""
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
        """Send the action to the node of a rank; False if that rank runs on no other node."""
        rank, incarnation = action.rank, action.incarnation
        node, runs = self._slots.get(rank, (self._me, 0))
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
        """Yield the events that another node forwards, for ranks that it runs."""
        if not self.judges:
            return  # it has not heard yet that another one is
        if isinstance(word, HangBeats):
            for rank, incarnation in word.ranks:
                if self._slots.get(rank) == (sender, incarnation):
                    yield RankWatched(rank=rank, incarnation=incarnation, host=self.host_of(rank))
                    yield RankHeard(rank=rank, incarnation=incarnation)
            return
        rank, incarnation = word.rank, word.incarnation
        if self._slots.get(rank) != (sender, incarnation):
            log.debug(
                "ignored a hang report for a rank that the sender does not run", node=str(sender), rank=rank
            )
            return
        yield RankWatched(rank=rank, incarnation=incarnation, host=self.host_of(rank))
        if isinstance(word, HangStanding):
            yield RankStood(rank=rank, incarnation=incarnation, standing=word.standing)
        elif word.gone:
            yield RankGone(rank=rank, incarnation=incarnation)
        else:
            yield RankSeen(rank=rank, incarnation=incarnation, words=word.words)

    def obeys(self, sender: NodeKey) -> bool:
        """Whether `sender` is the judge, so that its requests are carried out."""
        return sender == self._judge
