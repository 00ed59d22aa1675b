"""Processes that are looked into through the one that they belong to."""

from __future__ import annotations

import pytest

from zbmd.actors.errors import NoReply
from zbmd.actors.hangs.introspection import INSIDE_ACTOR, Inside, InsideReply, InsideRequest
from zbmd.actors.system import ActorSystem


async def test_who_asks_for_a_process_that_has_ended_hears_so_and_others_are_answered() -> None:
    system = ActorSystem("node")
    inside = await system.spawn(Inside, name=INSIDE_ACTOR)
    with pytest.raises(NoReply, match="rank1 cannot be looked into: peer rank1 lost"):
        await inside.ask(InsideRequest("rank1", False), reply=InsideReply, timeout=60)
    found = await inside.ask(InsideRequest("node", False), reply=InsideReply, timeout=60)
    assert [row.name for row in found.rows if row.kind == "Inside"] == [INSIDE_ACTOR]
    await system.stop()
