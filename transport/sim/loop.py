"""`SimLoop`: an asyncio event loop on a virtual clock. One seed, one order of callbacks.

Time passes when nothing can run: the clock then jumps to the next timer (as trio's autojump clock does). So
a test that sleeps for an hour takes as long as its callbacks do:

    with asyncio.Runner(loop_factory=lambda: SimLoop(seed=7)) as runner:
        runner.run(asyncio.sleep(3600))

There are no sockets, signals or threads (`NotSimulated`); a job for an executor runs on the loop after a
drawn time. A loop on which nothing can run any more while its main task waits raises `Deadlock`.

Callbacks belong to simulated processes (`LoopProcess`), by their context. Those of one process run in order,
each taking a little virtual time; whose turn is next among several is drawn from the seed. `asyncio.Handle`,
`Future` and `Task` are asyncio's own.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import random
import sys
import threading
import weakref
from asyncio import events
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, Unpack, cast

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.sim.model import SIM_START_NS, Deadlock, Livelock, NotSimulated
from zbmd.transport.sim.process import (
    Disguise,
    LocalClock,
    LoopProcess,
    SimFuture,
    SimTask,
    discard,
    in_place_of_real_time,
    process_of,
    waiting,
)

# What an event loop on a virtual clock has not: it would reach outside of the simulation.


def _refusing(name: str) -> Any:
    def refuse(self: object, *args: object, **options: object) -> object:
        raise NotSimulated(
            f"loop.{name}() would reach outside of the simulation: "
            "let processes talk through `SimProcess.listen`, `dial` and `send_datagram`"
        )

    refuse.__name__ = name
    return refuse


class NoRealIO(asyncio.AbstractEventLoop):
    """Every method that needs sockets, pipes, signals or child processes raises `NotSimulated`."""

    add_reader: Any = _refusing("add_reader")
    remove_reader: Any = _refusing("remove_reader")
    add_writer: Any = _refusing("add_writer")
    remove_writer: Any = _refusing("remove_writer")
    add_signal_handler: Any = _refusing("add_signal_handler")
    remove_signal_handler: Any = _refusing("remove_signal_handler")
    getaddrinfo: Any = _refusing("getaddrinfo")
    getnameinfo: Any = _refusing("getnameinfo")
    create_connection: Any = _refusing("create_connection")
    create_server: Any = _refusing("create_server")
    create_unix_connection: Any = _refusing("create_unix_connection")
    create_unix_server: Any = _refusing("create_unix_server")
    start_tls: Any = _refusing("start_tls")
    sendfile: Any = _refusing("sendfile")
    connect_accepted_socket: Any = _refusing("connect_accepted_socket")
    create_datagram_endpoint: Any = _refusing("create_datagram_endpoint")
    connect_read_pipe: Any = _refusing("connect_read_pipe")
    connect_write_pipe: Any = _refusing("connect_write_pipe")
    subprocess_shell: Any = _refusing("subprocess_shell")
    subprocess_exec: Any = _refusing("subprocess_exec")
    sock_recv: Any = _refusing("sock_recv")
    sock_recv_into: Any = _refusing("sock_recv_into")
    sock_recvfrom: Any = _refusing("sock_recvfrom")
    sock_recvfrom_into: Any = _refusing("sock_recvfrom_into")
    sock_sendall: Any = _refusing("sock_sendall")
    sock_sendto: Any = _refusing("sock_sendto")
    sock_connect: Any = _refusing("sock_connect")
    sock_accept: Any = _refusing("sock_accept")
    sock_sendfile: Any = _refusing("sock_sendfile")


TURNS_AT_ONE_INSTANT_MAX = 100_000
"""Callbacks in a row between which virtual time stands still; more is a livelock."""

TIMERS_MAX = 1_000_000
"""Timers and turns under way at once."""

CANCELLED_TIMERS_MIN = 256
"""Cancelled timers that may lie in the heap before they are swept out, if they are more than the others."""

JOB_NS_MIN = 20_000
JOB_NS_MAX = 2_000_000
"""Range of the time that a job in an executor takes."""

TURNS_PER_COLLECTION = 1 << 16
"""Cycles are collected every so many turns of the loop: fixed, as finalisers are part of a history."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Unexpected: TypeAlias = Callable[[LoopProcess | None, str, BaseException | None], None]


class SimLoop(NoRealIO):
    """See the module's text. `seed` names the history. Close it when done, as any loop."""

    def __init__(self, seed: int | str = 0) -> None:
        self.seed = seed
        self.now_ns = SIM_START_NS
        """True virtual time; `time()` is the clock of the process that runs."""
        self.turns = 0
        self.on_turn: Callable[[int, LoopProcess], None] | None = None
        """Called before each callback, with the time and the process."""
        self.on_unexpected: Unexpected | None = None
        """Called with each exception that no handler of the program's own takes."""
        self.main = LoopProcess("main", 1, rng=self.rng("main"), clock=LocalClock(), callback_ns=0)
        """Whatever runs in no process: the test, the scenario. It takes no virtual time."""
        self._order, self._jobs = self.rng("loop/order"), self.rng("loop/jobs")
        self._dice = self.rng("loop/random")
        self._disguise = Disguise(self, self.rng("loop/urandom"))
        self._heap: list[tuple[int, float, int, LoopProcess | asyncio.TimerHandle | Callable[[], None]]] = []
        self._sequence = 0
        self._made = 0
        self._cancelled = 0
        self._running_process = self.main
        self._charged_ns = 0
        self._instant_turns = 0
        self._thread: int | None = None
        self._stopping = False
        self._closed = False
        self._debug = False
        self._factory: Any = None
        self._handler: Any = None
        self._living: dict[LoopProcess, None] = {}
        self._gone: list[asyncio.Task[Any]] = []
        self._generators: weakref.WeakKeyDictionary[AsyncGenerator[Any, Any], LoopProcess] = (
            weakref.WeakKeyDictionary()
        )

    def rng(self, purpose: str) -> random.Random:
        """A random stream of this seed for one purpose, independent of all the others."""
        return random.Random(f"{self.seed}/{purpose}")

    def __repr__(self) -> str:
        return f"<SimLoop seed={self.seed!r} now_ns={self.now_ns} turns={self.turns}>"

    # -- clocks: what the `time` module tells -------------------------------------------------------------

    def time(self) -> float:
        """The monotonic clock of the running process, seconds."""
        return self.monotonic_ns() / 1e9

    def monotonic_ns(self) -> int:
        """The monotonic clock of the running process."""
        return self._running_process.clock.local_ns(self.now_ns + self._charged_ns)

    def wall_ns(self) -> int:
        """The wall clock of the running process, ns since 1970."""
        return self._running_process.clock.wall_ns(self.now_ns + self._charged_ns)

    def charge(self, busy_ns: int) -> None:
        """The running callback takes so much longer: `time.sleep`, a slow disk."""
        self._charged_ns += max(0, busy_ns)

    # -- callbacks ---------------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Queue the callback behind those of its process."""
        self._check_usable()
        handle = asyncio.Handle(callback, args, self, copy_context() if context is None else context)
        self._make_ready(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`: there is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call after `delay` seconds of the running process's clock."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call when the running process's clock shows `when` seconds. Timers of one moment keep order."""
        self._check_usable()
        timer = asyncio.TimerHandle(
            when, callback, args, self, copy_context() if context is None else context
        )
        timer._scheduled = True  # type: ignore[attr-defined]  # else a cancel is not told to the loop
        self._push_timer(timer)
        return timer

    def act_at(self, at_ns: int, act: Callable[[], None]) -> None:
        """Have the world itself do something at true time `at_ns`, outside of every process."""
        self._push(at_ns, 0.0, act)

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        if not timer._scheduled:  # type: ignore[attr-defined]
            return
        self._cancelled += 1
        if self._cancelled < CANCELLED_TIMERS_MIN or 2 * self._cancelled < len(self._heap):
            return
        self._heap = [entry for entry in self._heap if not _is_cancelled(entry[3])]
        heapq.heapify(self._heap)
        self._cancelled = 0

    def _push_timer(self, timer: asyncio.TimerHandle) -> None:
        clock = self._process_of(timer).clock
        self._push(clock.true_ns(round(timer.when() * 1e9)), 0.0, timer)

    def _push(
        self, at_ns: int, tie: float, item: LoopProcess | asyncio.TimerHandle | Callable[[], None]
    ) -> None:
        if len(self._heap) >= TIMERS_MAX:
            raise Livelock(f"{TIMERS_MAX} timers are under way: something sets them without end")
        self._sequence += 1
        heapq.heappush(self._heap, (max(at_ns, self.now_ns), tie, self._sequence, item))

    def _process_of(self, handle: asyncio.Handle) -> LoopProcess:
        return process_of(handle._context) or self.main  # type: ignore[attr-defined]

    def _make_ready(self, handle: asyncio.Handle) -> None:
        process = self._process_of(handle)
        if process.dead:
            return
        process.ready.append(handle)
        if not process.scheduled:
            self._schedule(process)

    def _schedule(self, process: LoopProcess) -> None:
        process.scheduled = True
        # The tie decides among processes; timers and acts of that moment, with tie 0, come before them.
        self._push(process.free_at_ns, self._order.random() or 0.5, process)

    # -- processes ---------------------------------------------------------------------------------------

    def add(self, process: LoopProcess) -> None:
        """A process besides `main` begins; what is called in its `context` is its own from now on."""
        self._living[process] = None

    def kill(self, process: LoopProcess) -> None:
        """End a process as SIGKILL does: nothing of it runs again, no `finally`, no `except`.

        Its tasks stay as they are until the loop is closed; then they are thrown away.
        """
        process.dead = True
        self._living.pop(process, None)
        process.ready.clear()
        for task in process.pending():
            asyncio.tasks._unregister_task(task)
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            self._gone.append(task)

    def retime(self, process: LoopProcess) -> None:
        """The process's clock runs differently now: its timers with it."""
        entries, self._heap = self._heap, []
        for old_ns, tie, sequence, item in entries:
            at_ns = old_ns
            if isinstance(item, asyncio.TimerHandle) and self._process_of(item) is process:
                at_ns = max(self.now_ns, process.clock.true_ns(round(item.when() * 1e9)))
            self._heap.append((at_ns, tie, sequence, item))
        heapq.heapify(self._heap)

    def reschedule(self, process: LoopProcess) -> None:
        """The process is free earlier than it was: give it its turn then."""
        if process.scheduled:
            self._heap = [entry for entry in self._heap if entry[3] is not process]
            heapq.heapify(self._heap)
            self._schedule(process)

    # -- running -----------------------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Run until `stop()`. Raises `Deadlock` if nothing can run any more, and `Livelock`."""
        with self.entered():
            self._stopping = False
            while not self._stopping:
                self.take_turn()

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run until `future` is done, and return its result; a coroutine becomes a task of `main`."""
        self._check_usable()
        waited: asyncio.Future[T] = asyncio.ensure_future(cast("Awaitable[T]", future), loop=self)
        with self.entered():
            while not waited.done():
                self.take_turn()
        return waited.result()

    @contextmanager
    def entered(self) -> Generator[None]:
        """Be the running loop of this thread, in virtual time. Raises `LocalProtocolError` if one runs."""
        self._check_enterable()
        with in_place_of_real_time(self._disguise, self._dice):
            hooks, collecting = self._begin_running()
            try:
                yield
            finally:
                self._end_running(hooks, collecting)

    def _check_enterable(self) -> None:
        self._check_usable()
        if events._get_running_loop() is not None:
            raise LocalProtocolError(
                "a simulation cannot run inside a running event loop: call it from sync code"
            )

    def _begin_running(self) -> tuple[Any, bool]:
        """Be the thread's running loop; what `_end_running` is to be given."""
        hooks, collecting = sys.get_asyncgen_hooks(), gc.isenabled()
        gc.disable()
        sys.set_asyncgen_hooks(firstiter=self._generator_began, finalizer=self._generator_lost)
        self._thread = threading.get_ident()
        events._set_running_loop(self)
        self._instant_turns = 0
        return hooks, collecting

    def _end_running(self, hooks: Any, collecting: bool) -> None:
        events._set_running_loop(None)
        self._thread = None
        sys.set_asyncgen_hooks(*hooks)
        if collecting:
            gc.enable()

    def quiet(self) -> bool:
        """Whether nothing can run and no timer is set."""
        while self._heap and self._is_void(self._heap[0][3]):
            heapq.heappop(self._heap)
        return not self._heap

    def next_ns(self) -> int:
        """When the next thing happens, true time, unless the loop is `quiet`."""
        return self._heap[0][0]

    def take_turn(self) -> None:
        """Advance to what is next and do it. Raises `Deadlock` if there is nothing."""
        if self.quiet():
            raise Deadlock(waiting(self._all_processes()))
        at_ns, _, _, item = heapq.heappop(self._heap)
        if at_ns > self.now_ns:
            self.now_ns = at_ns
            self._instant_turns = 0
        if isinstance(item, LoopProcess):
            self._turn(item)
        elif isinstance(item, asyncio.TimerHandle):
            item._scheduled = False  # type: ignore[attr-defined]
            self._make_ready(item)
        else:
            item()

    def _is_void(self, item: object) -> bool:
        if _is_cancelled(item):
            self._cancelled -= 1
            return True
        if isinstance(item, LoopProcess):
            return item.dead
        return isinstance(item, asyncio.TimerHandle) and self._process_of(item).dead

    def _turn(self, process: LoopProcess) -> None:
        if process.free_at_ns > self.now_ns:  # paused, after its turn was set
            self._schedule(process)
            return
        self.turns += 1
        self._instant_turns += 1
        if self._instant_turns > TURNS_AT_ONE_INSTANT_MAX:
            self._schedule(process)
            what = f"{TURNS_AT_ONE_INSTANT_MAX} callbacks ran and no virtual time passed"
            raise Livelock(f"{what}; it is the turn of {process}")
        if self.on_turn is not None:
            self.on_turn(self.now_ns, process)
        handle = process.ready.popleft()
        self._running_process, self._charged_ns = process, 0
        try:
            if not handle.cancelled():
                handle._run()
        finally:
            self._running_process = self.main
            cost_ns = self._charged_ns
            self._charged_ns = 0
            if process.callback_ns:
                cost_ns += int(process.callback_ns * process.slowness * (0.5 + self._order.random()))
            process.busy_until_ns = self.now_ns + cost_ns
            if process.ready and not process.dead:
                self._schedule(process)
            else:
                process.scheduled = False
        if not self.turns % TURNS_PER_COLLECTION:
            gc.collect(1)

    def stop(self) -> None:
        """End `run_forever` after the running callback."""
        self._stopping = True

    def is_running(self) -> bool:
        """Whether callbacks run just now."""
        return self._thread is not None

    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Throw away what is left, without a word; nothing that it does then has an effect. Idempotent."""
        if self.is_running():
            raise LocalProtocolError("the simulated loop is running: close it afterwards")
        if self._closed:
            return
        self._closed = True
        left = [task for process in self._all_processes() for task in process.pending()]
        self._heap.clear()
        discard(self._gone + left)
        self._gone.clear()

    def _all_processes(self) -> list[LoopProcess]:
        return [self.main, *self._living]

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if self._thread is not None and self._thread != threading.get_ident():
            raise NotSimulated(
                "a simulated loop is used from another thread: its history would not be repeatable"
            )

    # -- futures, tasks, generators, executors ------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        self._made += 1
        return SimFuture(loop=self, number=self._made)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        """A task of the process whose context it runs in; its default name counts that process's tasks."""
        if self._closed:
            coro.close()  # what is thrown away with the loop may start more, of which nobody is to hear
        self._check_usable()
        context = copy_context() if context is None else context
        process = process_of(context) or self.main
        name = f"task-{process.made_tasks + 1}" if name is None else str(name)
        self._made += 1
        task: asyncio.Task[T]
        if self._factory is not None:
            task = self._factory(self, coro, context=context, **options)
            task.set_name(name)
        else:
            started = cast("Coroutine[Any, Any, T]", coro)
            task = SimTask(started, number=self._made, loop=self, name=name, context=context, **options)
        process.adopt(task)
        return task

    def set_task_factory(self, factory: Any) -> None:
        """As asyncio's."""
        self._factory = factory

    def get_task_factory(self) -> Any:
        """As asyncio's."""
        return self._factory

    def run_in_executor(
        self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run `func` on the loop after a drawn time, in the caller's process; it takes no turn of others."""
        self._check_usable()
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 (whatever it raised is the awaiter's)
                future.set_exception(error)
            else:
                future.set_result(result)

        process = self._running_process
        delay_ns = int(self._jobs.randint(JOB_NS_MIN, JOB_NS_MAX) * process.slowness)
        self.call_later(delay_ns / 1e9, run)
        return future

    def set_default_executor(self, executor: Any) -> None:
        """Every executor is the same here."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to shut down: jobs that have not run yet never will."""

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators of `main` and of the processes that live."""
        alive = [agen for agen, process in self._generators.items() if not process.dead]
        self._generators.clear()
        for agen in alive:
            await agen.aclose()

    def _generator_began(self, agen: AsyncGenerator[Any, Any]) -> None:
        self._generators[agen] = self._running_process

    def _generator_lost(self, agen: AsyncGenerator[Any, Any]) -> None:
        process = self._generators.pop(agen, self.main)
        if not process.dead and not self._closed:
            closing = agen.aclose()
            self.call_soon(lambda: self.create_task(closing), context=process.context.copy())

    # -- errors ------------------------------------------------------------------------------------------

    def get_debug(self) -> bool:
        """As asyncio's."""
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        """As asyncio's."""
        self._debug = enabled

    def get_exception_handler(self) -> Any:
        """As asyncio's."""
        return self._handler

    def set_exception_handler(self, handler: Any) -> None:
        """As asyncio's; one for all processes."""
        self._handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Tell `on_unexpected`; without one, stderr."""
        process = None if self._running_process is self.main else self._running_process
        message, error = str(context.get("message", "unhandled exception")), context.get("exception")
        if self.on_unexpected is not None:
            self.on_unexpected(process, message, error)
        else:
            print(f"{self!r}: {message}: {error!r}", file=sys.stderr)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """As asyncio's. What the dead and a closed loop leave behind is nobody's fault."""
        if self._closed or self._running_process.dead:
            return
        if self._handler is None:
            self.default_exception_handler(context)
        else:
            self._handler(self, context)


def _is_cancelled(item: object) -> bool:
    return isinstance(item, asyncio.TimerHandle) and item.cancelled()
