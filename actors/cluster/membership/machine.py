"""The view-change machine of one node (sans-I/O): who is in the cluster, without a coordinator.

Members report what they know (silent members, nodes that ask to join, orders of their jobs) to the
**speaker**: the member with the lowest id among those that they do not suspect. After a short delay in
which reports gather, the speaker has the members agree on the next view: one Paxos decree for each view,
over a tree of all members (`rounds`), so that a member's cost does not grow with the cluster. If the
speaker is gone, the next in line takes over; two speakers at once are safe, as any two proposers are in
Paxos.

A decided view is entered in two phases: LEARN makes it known to all of its members, and once all have
confirmed, ENTER lets them act on it. So every member of a view that anybody acts on knows that view. If a
member dies in between, the view is followed by another and nobody ever acts on it.

A member that cannot reach a quorum for as long as the recovery budget stops itself. So does one that learns
that the others went on without it; it may come back with its next incarnation.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import assert_never

from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.membership.reports import OwnReport, Reports
from zbmd.actors.cluster.membership.rounds import Acceptor, Agenda, Round, overlay_of, tree_of, waits_of
from zbmd.actors.cluster.membership.witness import TieBreak
from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.cluster.state.view import ClusterView, ViewChange
from zbmd.transport.clock.deadlines import Deadlines
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

CANDIDATES_MAX = 4
"""Members that a report goes to: the speaker and its successors, one more with each retry."""
STORY_EVENTS_MAX = 16
LEFT = "it left"
"""The stop reason of a node that was asked to leave."""


class MemberState(Enum):
    """State of this incarnation."""

    NEW = "new"
    JOINING = "joining"
    MEMBER = "member"
    STOPPED = "stopped"


class ClusterMachine:
    """The membership of one node's incarnation.

    me: this node; deadlines, witnessed (see `TieBreak`): of the cluster, the same on all nodes. Raises
    `LocalProtocolError` for events out of turn. After `Stopped` every event is ignored.
    """

    def __init__(self, me: Node, deadlines: Deadlines, *, witnessed: bool = False) -> None:
        self.me = me
        self.state = MemberState.NEW
        self.view = ClusterView(epoch=0, nodes=())
        """The newest view that is known to be decided."""
        self.entered = 0
        """The epoch of the view that this node acts on."""
        self.story: deque[str] = deque(maxlen=STORY_EVENTS_MAX)
        self.waits = waits_of(deadlines)
        self._doors: tuple[Node, ...] = ()
        self._asked, self._word = 0, OwnReport(me.key)
        self._unreachable: set[int] = set()
        self._tie = TieBreak(witnessed=witnessed)
        self._reports = Reports(self.view, self.waits.deaths_ns[False])
        self._acceptor = Acceptor()
        self._number = 0
        self._own: Round | None = None
        self._relay: Round | None = None
        self._change: ViewChange | None = None
        """The change that led to the known view, if it was learnt as a change."""
        self._known_ns = 0
        self._reported_ns: int | None = None
        self._gathering_ns: int | None = None
        self._lonely_since_ns: int | None = None
        self._agenda = Agenda()
        self._actions: list[m.Action] = []

    def handle(self, event: m.Event, *, now_ns: int) -> list[m.Action]:
        """Take one event at `now_ns` (monotonic) and return what to do, in order."""
        if self.state is MemberState.STOPPED:
            return []
        self._actions = []
        timer_before = self._agenda.next_ns
        match event:
            case m.Received(sender=sender, message=message):  # first, since most events are messages
                self._received(sender, message, now_ns)
            case m.FoundCluster():
                self._begin(MemberState.MEMBER)
                self._adopt(ClusterView(epoch=1, nodes=(self.me,)), now_ns)
                self._enter("it founds the cluster", now_ns)
            case m.JoinCluster(doors=doors):
                self._begin(MemberState.JOINING)
                if not doors:
                    raise LocalProtocolError("entering a cluster needs the address of a member")
                self._doors = doors
                self._agenda.put("give up joining", now_ns + self.waits.join_ns)
                self._knock(now_ns)
            case m.Suspected(key=key):
                self._word.suspected.add(key)
                self._report(now_ns)
            case m.Trusted(key=key):
                self._word.suspected.discard(key)
                self._unreachable.discard(key.id)
                self._report(now_ns, retract=True)
            case m.Proven(key=key):
                if self.view.holds(key):
                    self._word.proven.add(key)
                    self._report(now_ns)
            case m.LeaveRequested():
                self._leave(now_ns)
            case m.WitnessGave():
                self._tie.gave(event)
            case m.Ordered(order=order):
                self._word.order(order)
                self._report(now_ns)
            case TimerFired():
                self._timer(now_ns)
            case _:
                assert_never(event)
        return self._done(timer_before)

    @property
    def ordered(self) -> int:
        """The number of this incarnation's last command; 0 before the first."""
        return self._word.ordered

    def check_invariants(self) -> None:
        """A member is in its view, and acts on no view that it does not know."""
        if self.state is MemberState.MEMBER:
            assert self.view.holds(self.me.key), f"{self.me.key} is a member outside of {self.view}"
            assert self.entered <= self.view.epoch, (self.entered, self.view.epoch)
        assert self._own is None or self._own.parent is None, "our own round has a parent"
        assert self._relay is None or self._relay.parent is not None, "a round that we relay has none"
        assert self._own is None or self._own.cast.epoch == self.view.epoch, "a round on another view"
        self._word.check_invariants()

    def _begin(self, state: MemberState) -> None:
        if self.state is not MemberState.NEW:
            raise LocalProtocolError(f"{self.me.key} has begun already", story=tuple(self.story))
        self.state = state

    def _done(self, timer_before: int | None) -> list[m.Action]:
        actions, self._actions = self._actions, []
        due = self._agenda.next_ns
        if self.state is not MemberState.STOPPED and due is not None and due != timer_before:
            actions.append(SetTimer(at_ns=due))
        return actions

    def _timer(self, now_ns: int) -> None:
        due = self._agenda.take(now_ns)
        for what in due:
            if self.state is MemberState.STOPPED:
                return
            match what:
                case "knock":
                    self._knock(now_ns)
                case "give up joining":
                    doors = ", ".join(door.address or str(door.key) for door in self._doors)
                    self._stop(f"no member of the cluster admitted it: asked {doors}")
                case "report":
                    self._report(now_ns)
                case "propose":
                    self._propose(now_ns)
                case "confirm":
                    self._confirm(now_ns)
                case "own round" | "relayed round":
                    asked = self._own if what == "own round" else self._relay
                    if asked is not None:
                        asked.give_up()
                        self._finish(asked, now_ns)
                case _:
                    raise AssertionError(what)
        if not due and (due_ns := self._agenda.next_ns) is not None:  # early: ask again
            self._actions.append(SetTimer(at_ns=due_ns))

    # -- messages ----------------------------------------------------------------------------------------

    def _received(self, sender: Node, message: m.Message, now_ns: int) -> None:
        self._unreachable.discard(sender.id)
        match message:
            case m.Beat() | m.MemberReport() | m.RoundRequest() | m.RoundReply():  # most events
                if self.state is MemberState.MEMBER or isinstance(message, m.RoundRequest):
                    self._of_members(sender, message, now_ns)
            case m.Join(node=node):
                self._knocked(node, now_ns)
            case m.Learn(view=view):
                self._learn(view, now_ns)
            case m.Excluded(epoch=epoch, reason=reason):
                if epoch > self.view.epoch:
                    self._stop(f"the others went on without it, in view {epoch}: {reason}")
            case m.Behind(epoch=epoch):
                self._catch_up(sender, epoch)
            case _:
                assert_never(message)

    def _of_members(self, sender: Node, message: m.AmongMembers, now_ns: int) -> None:
        epoch = message.known if isinstance(message, m.Beat) else message.epoch
        if self.state is MemberState.MEMBER and not self.view.holds(sender.key) and epoch <= self.view.epoch:
            self._exclude(sender)
            return
        match message:
            case m.Beat():
                self._beat(sender, message, now_ns)
            case m.MemberReport():
                self._take_report(sender, message, now_ns)
            case m.RoundRequest():
                self._cast(sender, message, now_ns)
            case m.RoundReply():
                self._echo(sender, message, now_ns)

    def _exclude(self, sender: Node) -> None:
        known = self.view.by_id.get(sender.id)
        if known is not None and known.key.incarnation < sender.key.incarnation:
            return  # a newer incarnation than the known one: it will join
        self._send(sender, m.Excluded(epoch=self.view.epoch, reason=f"{sender.key} is not in {self.view}"))

    def _catch_up(self, sender: Node, epoch: int) -> None:
        """Send the view to a node that is behind and cannot answer a round without it."""
        if epoch >= self.view.epoch:
            return
        if not self.view.holds(sender.key):
            self._exclude(sender)
            return
        self._send(sender, m.Learn(view=self.view))
        for running in (self._own, self._relay):
            if running is not None and sender.id in running.waiting:
                self._send(sender, running.cast)
        if self.entered == self.view.epoch:
            self._send(sender, m.Beat(known=self.view.epoch, entered=self.entered))

    def _beat(self, sender: Node, beat: m.Beat, now_ns: int) -> None:
        if beat.known > self.view.epoch:
            self._send(sender, m.Behind(epoch=self.view.epoch))
        elif beat.known < self.view.epoch:
            if now_ns - self._known_ns > self.waits.retry_ns:
                self._catch_up(sender, beat.known)
        elif beat.entered == self.view.epoch and self.entered < self.view.epoch:
            self._enter(f"{sender.key} acts on it, so all members know it", now_ns)

    # -- joining and leaving -----------------------------------------------------------------------------

    def _knock(self, now_ns: int) -> None:
        if self.state is not MemberState.JOINING:
            return
        self._send(self._doors[self._asked % len(self._doors)], m.Join(node=self.me))
        self._asked += 1
        self._agenda.put("knock", now_ns + self.waits.retry_ns)

    def _knocked(self, node: Node, now_ns: int) -> None:
        if self.state is not MemberState.MEMBER:
            return
        member = self.view.by_id.get(node.id)
        if member is not None and member.key == node.key:
            self._send(node, m.Learn(view=self.view))
            return
        if member is not None and member.key.incarnation > node.key.incarnation:
            self._send(node, m.Excluded(epoch=self.view.epoch, reason=f"{member.key} has taken its place"))
            return
        if self._word.knocked(node):
            self._report(now_ns)

    def _leave(self, now_ns: int) -> None:
        if self.state is not MemberState.MEMBER or len(self.view.nodes) == 1:
            self._stop(LEFT)
            return
        self._word.leaving = True
        self._report(now_ns)

    def candidates(self) -> list[int]:
        """Return the members that are not suspected, in the order in which they become speaker."""
        out = {key.id for key in self._word.suspected | self._word.proven}
        out |= self._unreachable | self._reports.down() | self._reports.proven()
        leaving = {self.me.id} if self._word.leaving else set()
        return [node_id for node_id in self.view.ids if node_id not in out and node_id not in leaving]

    def _report(self, now_ns: int, *, retract: bool = False) -> None:
        """Report to the speaker; each retry includes one more member, until the report is dealt with."""
        if self.state is not MemberState.MEMBER:
            return
        report = self._word.report(self.view)
        anything = self._reports.take(self.me.key, report, now_ns=now_ns)
        if not anything:
            self._reported_ns = None
            self._agenda.drop("report")
            if not retract:
                return
        elif self._reported_ns is None:
            self._reported_ns = now_ns
        attempt = 0 if self._reported_ns is None else (now_ns - self._reported_ns) // self.waits.retry_ns
        line = self.candidates()
        for node_id in self._reports.addressees(line[: min(attempt + 1, CANDIDATES_MAX)], retracts=retract):
            if node_id != self.me.id:
                self._send(self.view.by_id[node_id], report)
        if not anything:
            return
        self._agenda.put("report", now_ns + self.waits.retry_ns)
        place = line.index(self.me.id) if self.me.id in line else len(line)
        if place == 0 or attempt > min(place, CANDIDATES_MAX) + place % CANDIDATES_MAX:
            self._gather(report, now_ns)

    def _take_report(self, sender: Node, report: m.MemberReport, now_ns: int) -> None:
        if report.epoch < self.view.epoch:
            self._catch_up(sender, report.epoch)
        elif report.epoch > self.view.epoch:
            self._send(sender, m.Behind(epoch=self.view.epoch))
        else:
            self._send(sender, m.Beat(known=self.view.epoch, entered=self.entered))
            if self._reports.take(sender.key, report, now_ns=now_ns):
                self._gather(report, now_ns)

    def _gather(self, report: m.MemberReport, now_ns: int) -> None:
        """Schedule a proposal, after a delay in which more reports can arrive."""
        if self._gathering_ns is None:
            self._gathering_ns = now_ns
        wait_ns = self.waits.deaths_ns[self.view.jobs.busy] if report.down else self.waits.batch_ns
        self._agenda.put_by("propose", now_ns + (self.waits.quick_ns if report.is_urgent else wait_ns))

    # -- proposing ---------------------------------------------------------------------------------------

    def _propose(self, now_ns: int) -> None:
        """Propose the change that follows from the reports, if this node is the speaker."""
        if self._own is not None or self.state is not MemberState.MEMBER:
            return
        change = self._wanted(now_ns)
        gathering_ns = now_ns if self._gathering_ns is None else self._gathering_ns
        if self._reports.empty:
            self._gathering_ns = None
            return
        if change is None:
            # Reported by too few to be believed. Are we the ones who are cut off?
            if self._hears_enough() and now_ns - gathering_ns < self.waits.lonely_ns:
                self._propose_again(self.waits.retry_ns, now_ns)
                return
        elif (
            (change.removed or not change.commands)
            and not self._reports.settled(now_ns=now_ns)
            and now_ns - gathering_ns < self.waits.settle_ns[self.view.jobs.busy]
        ):
            self._propose_again(self.waits.batch_ns, now_ns)
            return
        elif not change.removed and self.entered < self.view.epoch and self._hears_enough():
            self._agenda.put(
                "propose", now_ns + self.waits.retry_ns
            )  # first let those in who have been agreed on
            return
        self._number = max(self._number, self._acceptor.promised.number if self._acceptor.promised else 0)
        fresh = self._acceptor.promised is None and self.view.ids[0] == self.me.id
        if fresh and change is not None:
            self._ask(m.RoundPhase.ACCEPT, m.Ballot(0, self.me.id), now_ns, change)
        else:
            self._number += 1
            self._ask(m.RoundPhase.PREPARE, m.Ballot(self._number, self.me.id), now_ns)

    def _propose_again(self, wait_ns: int, now_ns: int) -> None:
        """Propose again after a delay, or earlier when another suspicion has stood long enough."""
        ripe_ns = self._reports.ripe_ns(now_ns)
        self._agenda.put("propose", min(now_ns + wait_ns, ripe_ns or now_ns + wait_ns))

    def _hears_enough(self) -> bool:
        """Whether the unsuspected members form a quorum."""
        return self._tie.quorum(self.view, self.candidates(), self._reports.proven()).holds

    def _wanted(self, now_ns: int) -> ViewChange | None:
        return self._reports.change(now_ns=now_ns, elapsed_ns=max(0, now_ns - self._known_ns))

    def _ask(
        self, phase: m.RoundPhase, ballot: m.Ballot, now_ns: int, change: ViewChange | None = None
    ) -> None:
        """Begin a round as its root."""
        agreeing = phase in (m.RoundPhase.PREPARE, m.RoundPhase.ACCEPT)
        out = self._reports.down() | self._unreachable | {key.id for key in self._word.suspected}
        excluded = tuple(sorted((out & set(self.view.ids)) - {self.me.id})) if agreeing else ()
        cast = m.RoundRequest(
            phase=phase,
            epoch=self.view.epoch,
            ballot=ballot,
            root=self.me.key,
            excluded=excluded,
            change=change,
        )
        tree = tree_of(self.view, self.me.id, excluded)
        self._own = asked = Round(cast, tree, self.me.id, None, now_ns + self.waits.round_ns)
        self._agenda.put("own round", asked.deadline_ns)
        asked.answer(missing=excluded)
        self._answer(asked)
        self._hand_on(asked)
        self._finish(asked, now_ns)

    def _answer(self, asked: Round) -> bool:
        """Answer a round for this node; return whether to pass it on."""
        cast, acceptor = asked.cast, self._acceptor
        refused: m.Ballot | None = None
        if cast.phase is m.RoundPhase.PREPARE:
            refused = acceptor.prepare(cast.ballot)
        elif cast.phase is m.RoundPhase.ACCEPT:
            assert cast.change is not None
            refused = acceptor.accept(cast.ballot, cast.change)
        self._number = max(self._number, cast.ballot.number)
        accepted = acceptor.accepted if cast.phase is m.RoundPhase.PREPARE and refused is None else None
        asked.answer(accepted=accepted, refused=refused)
        return refused is None

    def _hand_on(self, asked: Round) -> None:
        for child in sorted(asked.waiting):
            self._send(self.view.by_id[child], asked.cast)

    def _finish(self, asked: Round, now_ns: int) -> None:
        """Once all nodes below have answered, answer the parent, or conclude the round at its root."""
        if asked.waiting:
            return
        if asked.parent is not None:
            self._relay = None
            self._agenda.drop("relayed round")
            self._send(asked.parent, asked.result)
            return
        self._own = None
        self._agenda.drop("own round")
        result = asked.result
        if result.phase is m.RoundPhase.LEARN:
            self._learned_by(asked, result, now_ns)
        else:
            self._agreed_by(asked, result, now_ns)

    def _agreed_by(self, asked: Round, result: m.RoundReply, now_ns: int) -> None:
        self._unreachable |= set(result.missing) & set(self.view.ids)
        if result.refused is not None:
            self._number = max(self._number, result.refused.number)
            place = self.view.ids.index(self.me.id)
            self._agenda.put("propose", now_ns + self.waits.retry_ns * (1 + place % CANDIDATES_MAX))
            return
        verdict = self._tie.quorum(self.view, asked.present(), self._reports.proven())
        if not verdict.holds:
            self._actions += self._tie.question(self.view, verdict)
            self._reports.doubt(now_ns)
            if self._lonely_since_ns is None:
                self._lonely_since_ns = now_ns
            if now_ns - self._lonely_since_ns >= self.waits.lonely_ns:
                self._stop(f"it is cut off: {verdict.reason}")
            else:
                self._agenda.put("propose", now_ns + self.waits.retry_ns)
            return
        self._lonely_since_ns = None
        if result.phase is m.RoundPhase.PREPARE:
            change = result.accepted.change if result.accepted is not None else self._wanted(now_ns)
            if change is None:
                self._gathering_ns = now_ns  # we are not cut off, and too few agree with us
                self._agenda.put("propose", now_ns + self.waits.retry_ns)
            else:
                self._ask(m.RoundPhase.ACCEPT, asked.cast.ballot, now_ns, change)
            return
        assert asked.cast.change is not None
        self._decided(asked.cast.change, verdict.reason, now_ns)

    def _decided(self, change: ViewChange, reason: str, now_ns: int) -> None:
        self.story.append(f"{change} is decided: {reason}")
        before, after = self.view, self.view.after(change)
        told = m.Excluded(epoch=after.epoch, reason=f"{change} was agreed: {reason}")
        for key in change.removed:
            if key != self.me.key:
                self._send(before.by_id[key.id], told)
        if not after.holds(self.me.key):
            for node in after.nodes[:CANDIDATES_MAX]:
                self._send(node, m.Learn(view=after))
            self._stop(f"the others go on without it: {told.reason}")
            return
        self._adopt(after, now_ns, change)
        self._confirm(now_ns)

    # -- knowing and entering a view ---------------------------------------------------------------------

    def _adopt(self, view: ClusterView, now_ns: int, change: ViewChange | None = None) -> None:
        """Take over a decided view; all state about the previous view is discarded."""
        self.view = view
        if self._word.leaving and len(view.nodes) == 1:
            self._stop(LEFT)
            return
        self._change = change
        self._known_ns = now_ns
        self._acceptor, self._number = Acceptor(), 0
        self._own = self._relay = None
        self._lonely_since_ns = self._gathering_ns = self._reported_ns = None
        self._unreachable.clear()
        self._agenda.drop("own round", "relayed round", "propose", "report", "knock", "give up joining")
        self._word.adopted(view)
        self._reports = Reports(view, self.waits.deaths_ns[view.jobs.busy])
        overlay = overlay_of(view)
        self._actions.append(
            m.WatchMembers(
                subjects=tuple(view.by_id[i] for i in overlay.subjects[self.me.id]),
                observers=tuple(view.by_id[i] for i in overlay.observers[self.me.id]),
            )
        )
        self._agenda.put("confirm", now_ns + self.waits.retry_ns)
        self._report(now_ns)

    def _learn(self, view: ClusterView, now_ns: int, change: ViewChange | None = None) -> None:
        if view.epoch <= self.view.epoch:
            return
        if not view.holds(self.me.key):
            if self.state is MemberState.MEMBER:
                self._stop(f"the others went on without it, in {view}")
            return
        self.state = MemberState.MEMBER
        self._adopt(view, now_ns, change)

    def _confirm(self, now_ns: int) -> None:
        """As speaker, ask whether all members know a view that nobody acts on yet."""
        if self.entered == self.view.epoch or self.state is not MemberState.MEMBER:
            return
        line = self.candidates()
        place = line.index(self.me.id) if self.me.id in line else len(line)
        waited = (now_ns - self._known_ns) // self.waits.retry_ns
        self._agenda.put("confirm", now_ns + self.waits.retry_ns)
        if self._own is None and (
            place == 0 or waited > place
        ):  # staggered by place, so that not all ask at once
            self._ask(m.RoundPhase.LEARN, m.Ballot(waited, self.me.id), now_ns, self._change)

    def _learned_by(self, asked: Round, result: m.RoundReply, now_ns: int) -> None:
        if result.missing:  # `confirm` asks again, unless their observers have reported them
            self._propose(now_ns)
            return
        cast = m.RoundRequest(
            phase=m.RoundPhase.ENTER,
            epoch=self.view.epoch,
            ballot=asked.cast.ballot,
            root=self.me.key,
            excluded=(),
        )
        for child in asked.tree.children(self.me.id):
            self._send(self.view.by_id[child], cast)
        self._enter("all members know it", now_ns)

    def _enter(self, reason: str, now_ns: int) -> None:
        self.entered = self.view.epoch
        self._agenda.drop("confirm")
        self.story.append(f"acts on {self.view}: {reason}")
        self._actions.append(m.Installed(view=self.view, reason=reason))
        if self._gathering_ns is not None:
            self._agenda.put_by("propose", now_ns)  # it waited for this

    # -- others' rounds ----------------------------------------------------------------------------------

    def _cast(self, sender: Node, cast: m.RoundRequest, now_ns: int) -> None:
        follows = self.state is MemberState.MEMBER and self.view.epoch + 1 == cast.epoch
        if follows and cast.phase is m.RoundPhase.LEARN and cast.change is not None:
            self._learn(self.view.after(cast.change), now_ns, cast.change)
            if self.view.epoch != cast.epoch:
                return  # we are not in it
        if self.view.epoch < cast.epoch:
            self._send(sender, m.Behind(epoch=self.view.epoch))
            return
        if self.view.epoch > cast.epoch:
            self._catch_up(sender, cast.epoch)
            return
        tree = tree_of(self.view, cast.root.id, cast.excluded)
        if self.me.id not in tree.place:
            return
        if cast.phase is m.RoundPhase.ENTER:
            if self.entered < self.view.epoch:
                for child in tree.children(self.me.id):
                    self._send(self.view.by_id[child], cast)
                self._enter(f"{cast.root} says that all members know it", now_ns)
            return
        self._relay_on(sender, cast, now_ns)

    def _relay_on(self, sender: Node, cast: m.RoundRequest, now_ns: int) -> None:
        tree = tree_of(self.view, cast.root.id, cast.excluded)
        height = tree.height(self.me.id)
        share_ns = self.waits.round_ns * height // (tree.height(cast.root.id) + 1)
        self._relay = asked = Round(cast, tree, self.me.id, sender, now_ns + share_ns)
        if self._answer(asked):
            self._hand_on(asked)
            self._agenda.put("relayed round", asked.deadline_ns)
        else:
            asked.waiting.clear()
        self._finish(asked, now_ns)

    def _echo(self, sender: Node, echo: m.RoundReply, now_ns: int) -> None:
        for asked in (self._own, self._relay):
            if asked is not None and asked.echo_of(sender.id, echo):
                self._finish(asked, now_ns)
                return

    def _send(self, to: Node, message: m.Message) -> None:
        self._actions.append(m.Send(to=to, message=message))

    def _stop(self, reason: str) -> None:
        reason = LEFT if self._word.leaving else reason
        self.story.append(f"stops: {reason}")
        self.state, self._own, self._relay = MemberState.STOPPED, None, None
        self._agenda.clear()
        self._actions.append(m.Stopped(reason=reason))
