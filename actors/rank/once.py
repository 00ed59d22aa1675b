"""Make one thing for each process, for all callers to share: an actor of a fixed name, with its state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from zbmd.actors.rank.member import Worker

T = TypeVar("T")


class OncePerWorker(Generic[T]):
    """Makes a thing for a worker at the first call, by `make`, and returns it at every call.

    A call that is cancelled leaves the making to go on: it would end an actor that the next call counts on.
    """

    def __init__(self, make: Callable[[Worker], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[Worker, asyncio.Future[T]] = WeakKeyDictionary()

    async def of(self, worker: Worker) -> T:
        """Return that of `worker`, once it is there. Raises what making it raises; then the next call tries
        again."""
        making = self._made.get(worker)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._made[worker] = asyncio.ensure_future(self._make(worker))
            making.add_done_callback(lambda made: made.cancelled() or made.exception())
        return await asyncio.shield(making)
