"""Collects what members report on a view, and derives the change that follows (sans-I/O).

A member is believed dead once most of its observers report it, not counting observers that are believed
dead themselves (Rapid's multi-node cut detection, reduced): a few deaf nodes cannot condemn anybody, and a
rack that fails at once is removed in one view. A suspicion must stand for a while before it counts: when a
network heals, nodes that were cut off deliver their old suspicions, and retract them one beat later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zbmd.actors.cluster.membership.rounds import overlay_of
from zbmd.actors.cluster.messages import MemberReport
from zbmd.actors.cluster.state.job_table import Command, CommandRefused, Order, order_bytes, problem_of
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView, ViewChange

# --- what one member reports to the speaker ---------------------------------------------------------------


JOINS_WAITING_MAX = 4096
COMMANDS_WAITING_MAX = 1024
"""Commands of this node that no view contains yet."""
COMMANDS_IN_REPORT_MAX = 64
REPORT_COMMAND_BYTES_MAX = 256 * 1024


class OwnReport:
    """Collects everything that `me` wants the next view to contain."""

    def __init__(self, me: NodeKey) -> None:
        self.me = me
        self.suspected: set[NodeKey] = set()
        self.proven: set[NodeKey] = set()
        self.joins: dict[int, Node] = {}
        self.leaving = False
        self.ordered = 0
        """The number of this node's last command."""
        self._commands: list[Command] = []

    def order(self, order: Order) -> None:
        """Queue an order. Raises `CommandRefused`."""
        problem = problem_of(order)
        if not problem and len(self._commands) >= COMMANDS_WAITING_MAX:
            problem = f"{COMMANDS_WAITING_MAX} commands of {self.me} are pending already; try again later"
        if problem:
            raise CommandRefused(problem)
        self.ordered += 1
        self._commands.append(Command(origin=self.me, number=self.ordered, order=order))

    def knocked(self, node: Node) -> bool:
        """Note a node that asks to join; return whether it is new. Beyond the bound it has to ask again."""
        known = self.joins.get(node.id)
        if known is None and len(self.joins) >= JOINS_WAITING_MAX:
            return False
        if known is not None and known.key.incarnation >= node.key.incarnation:
            return False
        self.joins[node.id] = node
        return True

    def report(self, view: ClusterView) -> MemberReport:
        """Return the report for the members of `view`."""
        return MemberReport(
            epoch=view.epoch,
            down=tuple(sorted(key for key in self.suspected if view.holds(key))),
            proven=tuple(sorted(key for key in self.proven if view.holds(key))),
            joins=tuple(self.joins[node_id] for node_id in sorted(self.joins)),
            leaves=self.leaving,
            commands=first_commands(self._commands, COMMANDS_IN_REPORT_MAX, REPORT_COMMAND_BYTES_MAX),
        )

    def adopted(self, view: ClusterView) -> None:
        """Drop what a new view already contains."""
        self.suspected = {key for key in self.suspected if view.holds(key)}
        self.proven = {key for key in self.proven if view.holds(key)}
        self.joins = {
            node.id: node
            for node in self.joins.values()
            if node.id not in view.by_id or view.by_id[node.id].key.incarnation < node.key.incarnation
        }
        if self._commands:
            applied = view.jobs.applied(self.me)
            self._commands = [command for command in self._commands if command.number > applied]

    def check_invariants(self) -> None:
        """The bounds hold, and commands are numbered without a gap."""
        assert len(self.joins) <= JOINS_WAITING_MAX, len(self.joins)
        assert len(self._commands) <= COMMANDS_WAITING_MAX, len(self._commands)
        if self._commands:
            last = self._commands[-1].number
            assert last == self.ordered and last - self._commands[0].number + 1 == len(self._commands)


def first_commands(commands: Iterable[Command], most: int, bytes_max: int) -> tuple[Command, ...]:
    """Return as many of the first commands as a message takes; at least one, if there is any."""
    taken: list[Command] = []
    nbytes = 0
    for command in commands:
        nbytes += order_bytes(command.order)
        if len(taken) >= most or (taken and nbytes > bytes_max):
            break
        taken.append(command)
    return tuple(taken)


JOINS_MAX = 4096
"""Nodes let in by one change; more wait for the next."""
COMMANDS_IN_CHANGE_MAX = 256
CHANGE_COMMAND_BYTES_MAX = 512 * 1024


class Reports:
    """The reports on one view, of each member its newest.

    stand_ns: for so long a suspicion has to stand before a member is removed for it.
    """

    def __init__(self, view: ClusterView, stand_ns: int) -> None:
        self.view = view
        self._stand_ns = stand_ns
        self._by_reporter: dict[int, MemberReport] = {}
        self._since: dict[int, dict[NodeKey, int]] = {}
        """By reporter and suspect: since when it has been reported, ns."""
        self._told: set[int] = set()

    def addressees(self, line: Sequence[int], *, retracts: bool) -> list[int]:
        """Return whom to send our report: the line, and for a retraction all earlier addressees as well.

        Otherwise a member that was in line for a while would believe the old report for good.
        """
        others = self._told.difference(line) if retracts else ()
        self._told.update(line)
        return [*line, *sorted(others)]

    def take(self, reporter: NodeKey, report: MemberReport, *, now_ns: int) -> bool:
        """Take a member's report on this view; return whether it reports anything."""
        if report.epoch != self.view.epoch or not self.view.holds(reporter):
            return False
        before = self._since.pop(reporter.id, {})
        if report.down:
            self._since[reporter.id] = {key: before.get(key, now_ns) for key in report.down}
        if report.down or report.proven or report.joins or report.leaves or report.commands:
            self._by_reporter[reporter.id] = report
        else:
            self._by_reporter.pop(reporter.id, None)
        return reporter.id in self._by_reporter

    def doubt(self, now_ns: int) -> None:
        """Restart the clock of every suspicion: this node itself may have been cut off."""
        for suspects in self._since.values():
            suspects.update(dict.fromkeys(suspects, now_ns))

    def ripe_ns(self, now_ns: int) -> int | None:
        """Return when the next suspicion will have stood long enough; None if all have."""
        due_ns = (since_ns + self._stand_ns for said in self._since.values() for since_ns in said.values())
        return min((at_ns for at_ns in due_ns if at_ns > now_ns), default=None)

    @property
    def empty(self) -> bool:
        """Whether nothing is reported."""
        return not self._by_reporter

    def proven(self) -> frozenset[int]:
        """Return the ids of members that are proven dead."""
        keys = {key for report in self._by_reporter.values() for key in report.proven}
        keys |= {node.key for node in self._joins() if self._old_incarnation(node) is not None}
        return frozenset(key.id for key in keys if key.id in self.view.by_id)

    def down(self, *, said_by_ns: int | None = None) -> frozenset[int]:
        """The ids of members who are believed to be dead.

        said_by_ns: by what was said by then, and still is; None for all that is.
        """
        reported = {key.id for r in self._by_reporter.values() for key in r.down if self.view.holds(key)}
        observers, believed = overlay_of(self.view).observers, set(self.proven())
        while True:  # ends: each pass but the last believes somebody more
            more = {s for s in reported - believed if self._agreed(s, observers[s], believed, said_by_ns)}
            if not more:
                return frozenset(believed)
            believed |= more

    def _agreed(
        self, subject: int, observers: tuple[int, ...], believed: set[int], said_by_ns: int | None
    ) -> bool:
        sound = [observer for observer in observers if observer not in believed]
        says = sum(1 for observer in sound if self._reports_down(observer, subject, said_by_ns))
        return 2 * says > len(sound) or not sound

    def settled(self, *, now_ns: int) -> bool:
        """Whether every believed death has stood long enough, and no report is still disputed."""
        down = self.down()
        return down == self.down(said_by_ns=now_ns - self._stand_ns) and all(
            key.id in down or not self.view.holds(key)
            for reporter, report in self._by_reporter.items()
            if reporter not in down
            for key in report.down
        )

    def change(self, *, now_ns: int, elapsed_ns: int = 0) -> ViewChange | None:
        """Return the change that follows from the reports, or None. elapsed_ns: since the view was known."""
        view, down = self.view, self.down(said_by_ns=now_ns - self._stand_ns)
        leaves = {node_id for node_id, report in self._by_reporter.items() if report.leaves}
        joins = self._joins()
        replaced = {node.id for node in joins if node.id in view.by_id}
        gone = sorted((down | leaves | replaced) & set(view.ids))
        if len(gone) == len(view.ids) and not joins:
            # Somebody has to agree on the change: the last member leaves once it is alone.
            gone = [node_id for node_id in gone if node_id != min(leaves - down, default=None)]
        commands = self._commands(frozenset(gone))
        if not gone and not joins and not commands:
            return None
        if len(gone) == len(view.ids) and not joins:
            return None  # nobody would be left
        removed = tuple(view.by_id[node_id].key for node_id in gone)
        return ViewChange(
            epoch=view.epoch + 1, removed=removed, added=joins, commands=commands, elapsed_ns=elapsed_ns
        )

    def _commands(self, gone: frozenset[int]) -> tuple[Command, ...]:
        """Return commands of the remaining members in turn: the first of each, then the second, and so on."""
        waiting = [
            (place, node_id, command)
            for node_id, report in self._by_reporter.items()
            if node_id not in gone
            for place, command in enumerate(report.commands)
        ]
        waiting.sort(key=lambda entry: entry[:2])
        return first_commands(
            (command for _, _, command in waiting), COMMANDS_IN_CHANGE_MAX, CHANGE_COMMAND_BYTES_MAX
        )

    def _joins(self) -> tuple[Node, ...]:
        """Return the nodes that ask to join, by id; of each its newest incarnation."""
        newest: dict[int, Node] = {}
        for report in self._by_reporter.values():
            for node in report.joins:
                known, member = newest.get(node.id), self.view.by_id.get(node.id)
                if member is not None and member.key.incarnation >= node.key.incarnation:
                    continue
                if known is None or known.key.incarnation < node.key.incarnation:
                    newest[node.id] = node
        return tuple(newest[node_id] for node_id in sorted(newest)[:JOINS_MAX])

    def _old_incarnation(self, node: Node) -> Node | None:
        """Return the node's previous incarnation, if it is still in the view."""
        member = self.view.by_id.get(node.id)
        return member if member is not None and member.key.incarnation < node.key.incarnation else None

    def _reports_down(self, reporter: int, subject: int, said_by_ns: int | None) -> bool:
        since_ns = self._since.get(reporter, {}).get(self.view.by_id[subject].key)
        return since_ns is not None and (said_by_ns is None or since_ns <= said_by_ns)
