"""A broken invariant ends the main coroutine of a loop; other errors of callbacks do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from zbmd.actors.process.exit import ending_at_broken_invariant


def broken() -> None:
    raise AssertionError("a round on another view")


def failed() -> None:
    raise ValueError("a frame that is cut")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_broken_invariant_in_a_callback_ends_what_would_hang(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    ended: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().call_soon(broken)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("closed")

    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.raises(AssertionError, match="another view"):
        runner.run(ending_at_broken_invariant(main()))
    assert ended == ["closed"]


async def test_other_errors_of_callbacks_and_cancellation_are_as_ever() -> None:
    async def main(*, hangs: bool) -> int:
        asyncio.get_running_loop().call_soon(failed)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if hangs:
            await asyncio.Event().wait()
        return 3

    assert await ending_at_broken_invariant(main(hangs=False)) == 3
    hanging = asyncio.ensure_future(ending_at_broken_invariant(main(hangs=True)))
    await asyncio.sleep(0)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
