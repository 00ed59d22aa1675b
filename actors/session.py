"""Actors from code that blocks: scripts, notebooks, an interactive interpreter.

    with zbmd.Session() as session:
        counter = session.spawn(Counter)
        print(session.ask(counter, Add(1)))

The event loop runs in a thread of its own, so it does not matter whether the caller's thread has one, as a
notebook's has.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

import uvloop

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor
from zbmd.actors.core.actor_base import MailboxSpec
from zbmd.actors.core.ref import Down, Ref, owner_of
from zbmd.actors.core.system import STOP_S, ActorInfo
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import LocalProtocolError, ZbmdError

ASK_S = 30.0
"""Default timeout of an ask."""
LOOK_S = 0.2
"""The longest delay of a Ctrl-C that arrives just before a wait."""

ContractT = TypeVar("ContractT", bound=Contract)
ResultT = TypeVar("ResultT")


class _Call(Generic[ResultT]):
    """A coroutine that another thread waits for, and may cancel before it has started."""

    def __init__(self, work: Coroutine[Any, Any, ResultT]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._given_up = False

    async def perform(self) -> ResultT:
        """Run the coroutine. Raises `CancelledError` if it was cancelled before."""
        if self._given_up:
            self._work.close()
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        return await self._work

    def withdraw(self) -> None:
        """Cancel the coroutine: nobody waits for it any more."""
        self._given_up = True
        if self._task is not None:
            self._task.cancel()


class Session:
    """An actor system whose calls block. Use it from any thread but its loop's; `close` ends it.

    Ctrl-C in a call cancels the call, and the session goes on. `system`: the actor system in the thread, for
    coroutines passed to `run`. opens: coroutine function that makes it; by default it is in no cluster.
    """

    def __init__(
        self, name: str = "session", *, opens: Callable[[], Awaitable[ActorSystem]] | None = None
    ) -> None:
        log_to_stderr()
        self.node = ""
        """The node through which the session is in a cluster, such as "node1"; see `connect`."""
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"zbmd {name}", daemon=True)
        self._thread.start()
        try:
            self.system: ActorSystem = self.run(self._open(name, opens))
        except BaseException:
            self._end()
            raise

    @classmethod
    def connect(cls, at: str | None = None) -> Self:
        """Return a session whose actors reach, and are reached by, all actors of a cluster.

        at: HOST:PORT of any node of it; None: the node of this host. `session.ref("node1/counter")` and
        `session.ref("rank0@1f/counter")`, rank 0 of job 1f, are addresses. Raises `UserError` if there is no
        such node, and `ZbmdError`.
        """
        from zbmd.actors.cluster.node.client import open_session

        session = cls(opens=partial(open_session, at))
        session.node = owner_of(session.system.name)
        return session

    async def _open(self, name: str, opens: Callable[[], Awaitable[ActorSystem]] | None) -> ActorSystem:
        return ActorSystem(name) if opens is None else await opens()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on the session's loop, and return what it returns or raise what it raises.

        Raises `LocalProtocolError` on the session's own thread, after its end, and in a forked child.
        """
        why = ""
        if self._pid != os.getpid():
            why = "it belongs to the parent process; make one in the child"
        elif threading.current_thread() is self._thread:
            why = "an actor would wait for its own loop: await ref.ask(...) there"
        elif not self._thread.is_alive() or self._loop.is_closed():
            why = "it has been closed"
        if why:
            work.close()
            raise LocalProtocolError(f"{self!r} cannot be used here: {why}")
        call = _Call(work)
        try:
            future = asyncio.run_coroutine_threadsafe(call.perform(), self._loop)
            while not future.done():
                # A signal between the last look at signals and the wait would not end the wait.
                concurrent.futures.wait([future], timeout=LOOK_S)
            return future.result()
        except BaseException:  # Ctrl-C, wherever it comes in between
            self._loop.call_soon_threadsafe(call.withdraw)
            raise

    def spawn(
        self,
        cls: type[Actor],
        *args: Any,
        name: str | None = None,
        mailbox: MailboxSpec | None = None,
        **kwargs: Any,
    ) -> Ref:
        """Spawn an actor as `ActorSystem.spawn` does. The constructor runs in the session's thread."""
        return self.run(self.system.spawn(cls, *args, name=name, mailbox=mailbox, **kwargs))

    def supervise(self, children: Sequence[ChildSpec], **options: Any) -> Ref:
        """Start a supervisor as `ActorSystem.supervise` does."""
        return self.run(self.system.supervise(children, **options))

    @overload
    def ask(self, ref: Ref | str, message: Contract, *, timeout: float = ASK_S) -> Any: ...

    @overload
    def ask(
        self, ref: Ref | str, message: Contract, *, reply: type[ContractT], timeout: float = ASK_S
    ) -> ContractT: ...

    def ask(
        self,
        ref: Ref | str,
        message: Contract,
        *,
        reply: type[Any] | None = None,
        timeout: float = ASK_S,
    ) -> Any:
        """Return the answer, as `Ref.ask` does. ref: a reference or an address. timeout: seconds."""
        to = self.ref(ref)
        if reply is None:
            return self.run(to.ask(message, timeout=timeout))
        return self.run(to.ask(message, reply=reply, timeout=timeout))

    def tell(self, ref: Ref | str, message: Contract) -> None:
        """Send a message as `Ref.tell` does."""
        self.run(self.ref(ref).tell(message))

    def tell_all(self, refs: Sequence[Ref], message: Contract) -> dict[Ref, ZbmdError]:
        """Send one message to many as `ActorSystem.tell_all` does."""
        return self.run(self.system.tell_all(refs, message))

    def terminate(self, ref: Ref | str, *, timeout: float = STOP_S) -> Down:
        """End an actor as `ActorSystem.terminate` does."""
        return self.run(self.system.terminate(self.ref(ref), timeout=timeout))

    def upgrade(self, old: type[Actor], new: type[Actor], **options: Any) -> Any:
        """Change a class as `ActorSystem.upgrade` does."""
        return self.run(self.system.upgrade(old, new, **options))

    def ref(self, address: Ref | str) -> Ref:
        """Return the reference of an address as `ActorSystem.ref` does."""
        return self.system.ref(address) if isinstance(address, str) else address

    def actors(self) -> list[ActorInfo]:
        """Return all actors of the session, in the order in which they were spawned."""

        async def describe() -> list[ActorInfo]:
            return self.system.describe()

        return self.run(describe())

    def close(self) -> None:
        """Stop all actors, the loop and its thread. Idempotent."""
        if self._loop.is_closed() or self._pid != os.getpid():
            return
        with contextlib.suppress(LocalProtocolError):  # another thread closes it as well
            self.run(self._leave())
        self._end()

    async def _leave(self) -> None:
        """Stop the actors; called once, before the loop ends."""
        await self.system.stop()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._loop.is_closed() else "open"
        return f"<Session {state}, thread {self._thread.name!r}>"
