"""End what a process does once one of its state machines has broken an invariant.

An event loop reports the exception of a callback and goes on. A node whose machine stopped half-way would
then hang, and be waited for. If it ends, the other nodes go on without it, as after any death.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def ending_at_broken_invariant(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of `work`, the main coroutine of its loop.

    Raises the `AssertionError` of a callback of this loop, after cancelling `work`.
    """
    loop, main = asyncio.get_running_loop(), asyncio.ensure_future(work)
    broken: list[AssertionError] = []

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, AssertionError) and not main.done():
            broken.append(error)
            main.cancel()

    loop.set_exception_handler(handle)
    try:
        return await main
    except asyncio.CancelledError:
        if broken:
            raise broken[0] from None
        raise
