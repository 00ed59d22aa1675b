"""Threads and processes of a bounded pool for handlers that compute: `@on(…, pool=…)`.

An actor still handles one message at a time: while the pool works for it, its mailbox waits and the loop does
not. A process gets the message as it would on the wire, and gives back an answer in the same way: nothing is
pickled, and only a function that was declared for it is called there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NoReturn

import msgspec

from zbmd.actors.contracts import Contract, ContractDecoder
from zbmd.actors.core.actor_base import ActorBase
from zbmd.actors.core.wire import Codec, encode_body
from zbmd.transport.errors import LocalProtocolError, ZbmdError
from zbmd.transport.frames import MAX_PAYLOAD_BYTES
from zbmd.transport.host.process import end_with_parent, set_process_name

POOL_WORKERS_MAX = 64
LENGTH_BYTES = 4
WORKER_PROGRAM = "from zbmd.actors.core.pools import worker_main; worker_main()"


class PoolFailed(ZbmdError):
    """The handler raised in its process, or the process ended."""


class _Worker:
    """A process of the pool, which does one thing at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def call(self, request: bytes) -> tuple[bool, bytes]:
        """Whether it worked, and the answer or the error's text. Raises `PoolFailed` if the process ends."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(len(request).to_bytes(LENGTH_BYTES) + request)
            await stdin.drain()
            size = int.from_bytes(await stdout.readexactly(LENGTH_BYTES))
            if size > MAX_PAYLOAD_BYTES:
                raise PoolFailed(f"an answer of {size} bytes; at most {MAX_PAYLOAD_BYTES}")
            answer: tuple[bool, bytes] = msgspec.msgpack.decode(
                await stdout.readexactly(size), type=tuple[bool, bytes]
            )
        except (OSError, asyncio.IncompleteReadError) as error:
            code = await self._process.wait()
            raise PoolFailed(f"the process of the pool ended with code {code}") from error
        except msgspec.MsgspecError as error:
            raise PoolFailed(f"the process of the pool gave no answer that can be read: {error}") from error
        return answer

    async def end(self) -> None:
        """Kill the process, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class Pools:
    """The threads and processes of one actor system; both are made when they are first needed.

    workers: of each kind at most; None for as many as there are CPUs.
    """

    def __init__(self, codec: Codec, workers: int | None = None) -> None:
        self._codec = codec
        self._workers_max = min(workers or os.cpu_count() or 1, POOL_WORKERS_MAX)
        self._threads: ThreadPoolExecutor | None = None
        self._room = asyncio.Semaphore(self._workers_max)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._closed = False

    async def in_thread(
        self, function: Callable[[Any, Any], Any], actor: ActorBase, message: Contract
    ) -> Any:
        """`function(actor, message)` in a thread. Cancelled, it is still waited for: it cannot be
        stopped, and the actor must not go on beside it."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._workers_max, thread_name_prefix="zbmd pool")
        call: Future[Any] = self._threads.submit(function, actor, message)
        done = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not call.cancel():
                await self._until(done, actor)
            raise

    async def _until(self, done: asyncio.Future[Any], actor: ActorBase) -> None:
        while not done.done() and actor.is_alive:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((done,))
        if done.done() and not done.cancelled():
            done.exception()  # nobody else asks for it

    async def in_process(self, function_id: str, message: Contract) -> Any:
        """Return the function of that name, called with the message in another process. Raises `PoolFailed`.

        Cancelled, its process is killed.
        """
        request = msgspec.msgpack.encode((function_id, bytes(encode_body(message))))
        async with self._room:
            worker = self._idle.pop() if self._idle else await self._start()
            self._busy.add(worker)
            fit = False
            try:
                worked, answer = await worker.call(request)
                fit = not self._closed
            finally:
                self._busy.discard(worker)
                if fit:
                    self._idle.append(worker)
                else:
                    await asyncio.shield(worker.end())
        if not worked:
            raise PoolFailed(answer.decode(errors="replace"))
        return self._codec.decode_reply(msgspec.Raw(answer))

    async def _start(self) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            WORKER_PROGRAM,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return _Worker(process)

    async def close(self) -> None:
        """End all processes; threads end with what they do."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        workers, self._idle = [*self._idle, *self._busy], []
        await asyncio.gather(*(worker.end() for worker in workers))


# --- the process of a pool ------------------------------------------------------------------------------


def _no_refs(wanted: type, _: Any) -> NoReturn:
    raise LocalProtocolError(f"a {wanted.__name__} cannot be used in a process of a pool")


_decoder = ContractDecoder(_no_refs)


def _find(function_id: str) -> Any:
    module_name, _, qualified = function_id.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in qualified.split("."):
        found = getattr(found, part)
    if getattr(found, "__zbmd_pool__", None) != "process":
        raise LocalProtocolError(f"{function_id} is not declared with pool='process'")
    return found


def _answer(request: bytes) -> tuple[bool, bytes]:
    try:
        function_id, body = msgspec.msgpack.decode(request, type=tuple[str, bytes])
        function = _find(function_id)
        return True, bytes(encode_body(function(_decoder.decode(body))))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the handler's own errors, told to its actor)
        return False, f"{type(error).__name__}: {error}".encode()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests."""
    while len(head := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
        size = int.from_bytes(head)
        if size > 2 * MAX_PAYLOAD_BYTES:
            return
        answer = msgspec.msgpack.encode(_answer(requests.read(size)))
        answers.write(len(answer).to_bytes(LENGTH_BYTES) + answer)
        answers.flush()


def worker_main() -> None:
    """Run a process of a pool until its input or its parent ends.

    Requests come on standard input, answers go to what was standard output: a length of 4 bytes, big endian,
    and MessagePack. The one argument is the parent's pid.
    """
    end_with_parent(int(sys.argv[1]))
    set_process_name("zbmd pool")
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a handler prints is not to be taken for an answer
        serve(sys.stdin.buffer, answers)
