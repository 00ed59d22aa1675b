"""What one member reports to the speaker (sans-I/O): suspicions, joins, leaves, and orders of its jobs."""

from __future__ import annotations

from collections.abc import Iterable

from zbmd.actors.cluster.messages import Report
from zbmd.actors.cluster.state.job_table import Command, CommandRefused, Order, order_bytes, problem_of
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView

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

    def report(self, view: ClusterView) -> Report:
        """Return the report for the members of `view`."""
        return Report(
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
