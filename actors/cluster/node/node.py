"""A node of a cluster, as the process's own loop has it: the cluster's work is done on a thread of its own.

So a loop that is busy for seconds, with output or a job's processes, delays neither heartbeats nor views.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Final, assert_never

import msgspec
import structlog
import uvloop

from zbmd.actors.cluster.membership.reports import COMMANDS_WAITING_MAX
from zbmd.actors.cluster.node.admin_actor import JobRecordStore, NoRecords
from zbmd.actors.cluster.node.incarnations import (
    IncarnationBegan,
    IncarnationEnded,
    Incarnations,
    JoinDelayed,
    MemberSuspected,
    MessageReceived,
    NodeConfig,
    NodeEvent,
    RunningPartFound,
    ViewEntered,
)
from zbmd.actors.cluster.node.persistent_state import NodeStateStore
from zbmd.actors.cluster.port import ClusterListener
from zbmd.actors.cluster.state.job_table import CommandRefused, Order, Submit, problem_of
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView, with_domains
from zbmd.actors.contracts import Contract
from zbmd.actors.process.exit import ending_at_broken_invariant
from zbmd.actors.process.output import JobOutput
from zbmd.transport.host.process import raise_thread_priority

log: Final = structlog.stdlib.get_logger("zbmd.cluster")

OnEvent = Callable[[NodeEvent], None]
NO_VIEW: Final = ClusterView(epoch=0, nodes=())
ORDERS_WAITING_MAX: Final = COMMANDS_WAITING_MAX - 1
"""One less than the cluster's thread takes, so that a number given here is one given there."""


class ClusterNode:
    """One node, on the running loop: the `ClusterPort` of its jobs.

    on_event: called there with every `NodeEvent`, in order; records: what commands ask for the records of
    jobs. Owns `state` and closes it at the end.
    """

    def __init__(
        self,
        config: NodeConfig,
        state: NodeStateStore,
        on_event: OnEvent,
        *,
        records: JobRecordStore | None = None,
    ) -> None:
        self._config = config
        self._state = state
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._thread: threading.Thread | None = None
        self._inner: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._incarnations: Incarnations | None = None
        self._leaving = False
        self._listeners: list[ClusterListener] = []
        self._me: Node | None = None
        self._view = NO_VIEW
        self._ordered = 0
        self.records: JobRecordStore = NoRecords() if records is None else records
        self.output = JobOutput()
        """The output of jobs' ranks on this node; commands read it."""
        self.actors_at = ""
        """Address of the actors of this incarnation, which sessions receive."""

    async def run(self) -> None:
        """Live until the node has left. Raises `UserError`s, `JoinFailed` among them."""
        self._thread = threading.Thread(target=self._run_thread, name="zbmd-cluster")
        self._thread.start()
        try:
            await asyncio.shield(self._done)
        finally:
            self._call(self._cancel)
            await asyncio.wait([self._done])
            self._thread.join()  # its last act was to say that it is done
            self._state.close()

    def leave(self) -> None:
        """Leave the cluster in order; `run` then returns."""
        self._leaving = True
        self._call(self._leave)

    # -- `ClusterPort` -----------------------------------------------------------------------------------

    @property
    def me(self) -> Node:
        """This incarnation. Raises `CommandRefused` while there is none."""
        if self._me is None:
            raise CommandRefused("this node is in no cluster at the moment: it is joining one, or has left")
        return self._me

    @property
    def view(self) -> ClusterView:
        """See `ClusterPort`."""
        return self._view

    def command(self, order: Order) -> int:
        """See `ClusterPort`."""
        if isinstance(order, Submit):
            order = msgspec.structs.replace(order, spec=with_domains(order.spec, self._view.nodes))
        me, problem = self.me, problem_of(order)
        if not problem and self._ordered - self._view.jobs.applied(me.key) >= ORDERS_WAITING_MAX:
            problem = f"{ORDERS_WAITING_MAX} commands of {me} are pending already; try again later"
        if problem:
            raise CommandRefused(problem)
        self._ordered += 1
        self._call(lambda: self._inside.order_in(me.key, order))
        return self._ordered

    def send(self, to: NodeKey, message: Contract) -> None:
        """See `ClusterPort`."""
        me = self._me
        if me is not None:
            self._call(lambda: self._inside.say(me.key, to, message))

    def listen(self, listener: ClusterListener) -> None:
        """See `ClusterPort`."""
        self._listeners.append(listener)
        if self._me is not None:
            listener.began(self._me)
            if self._view.epoch:
                listener.acts_on(self._view, "it has done so before")

    # -- on the cluster's thread -------------------------------------------------------------------------

    def _run_thread(self) -> None:
        error: BaseException | None = None
        # Heartbeats that come late on a busy machine would be taken for a death.
        log.debug("the cluster's thread has", urgency=raise_thread_priority().value)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(ending_at_broken_invariant(self._main()))
        except asyncio.CancelledError:
            log.debug("the cluster's thread was cancelled")
        except BaseException as raised:  # noqa: BLE001 (raised again by `run`)
            error = raised
        self._loop.call_soon_threadsafe(self._ended, error)

    async def _main(self) -> None:
        self._inner = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._incarnations = Incarnations(self._config, self._state, self)
        if self._leaving:
            return
        await self._incarnations.run()

    def tell(self, event: NodeEvent) -> None:
        """See `NodeProcess`."""
        self._loop.call_soon_threadsafe(self._hear, event)

    def order(self, order: Order) -> concurrent.futures.Future[int]:
        """See `NodeProcess`."""
        answer: concurrent.futures.Future[int] = concurrent.futures.Future()

        def give() -> None:
            try:
                answer.set_result(self.command(order))
            except CommandRefused as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(give)
        return answer

    @property
    def _inside(self) -> Incarnations:
        assert self._incarnations is not None, "the cluster's thread has not begun"
        return self._incarnations

    def _leave(self) -> None:
        self._inside.leave()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # -- on the process's loop ---------------------------------------------------------------------------

    def _call(self, function: Callable[[], None]) -> None:
        """Have the cluster's loop call it, if it is there."""
        if self._inner is not None and not self._inner.is_closed():
            try:
                self._inner.call_soon_threadsafe(function)
            except RuntimeError:  # it has just ended
                return

    def _ended(self, error: BaseException | None) -> None:
        self._me, self._view = None, NO_VIEW
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

    def _hear(self, event: NodeEvent) -> None:
        match event:
            case IncarnationBegan(me=me):
                self._me, self._view, self._ordered = me, NO_VIEW, 0
                for listener in self._listeners:
                    listener.began(me)
            case ViewEntered(view=view, reason=reason):
                self._view = view
                for listener in self._listeners:
                    listener.acts_on(view, reason)
            case MessageReceived(sender=sender, contract=contract):
                for listener in self._listeners:
                    listener.received(sender, contract)
            case IncarnationEnded(reason=reason):
                self._me, self._view = None, NO_VIEW
                for listener in self._listeners:
                    listener.stopped(reason)
            case JoinDelayed() | MemberSuspected() | RunningPartFound():
                pass
            case _:
                assert_never(event)
        self._on_event(event)
