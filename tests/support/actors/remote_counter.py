"""A counter that processes serve to each other, and what it understands."""

from __future__ import annotations

import asyncio
import os

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import deadline_ns, trace_id
from zbmd.actors.core.ref import Ref
from zbmd.transport.identity import Identity
from zbmd.transport.shm.connect import Endpoint

TIMEOUT_S = 180.0


class Add(Contract, id="remote.add"):
    amount: int
    pad: str = ""


class Total(Contract, id="remote.total"):
    value: int
    deadline_ns: int = 0
    trace_id: int = 0


class Crash(Contract, id="remote.crash"):
    pass


class Hold(Contract, id="remote.hold"):
    pass


class Through(Contract, id="remote.through"):
    to: Ref


class Counter(Actor, remote=True):
    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError("negative")
        self.value = start
        self.gate = asyncio.Event()

    @on(Add)
    async def add(self, message: Add) -> Total:
        self.value += message.amount
        return Total(self.value, deadline_ns(), trace_id())

    @on(Crash)
    async def crash(self, _: Crash) -> None:
        raise ValueError("boom")

    @on(Hold)
    async def hold(self, _: Hold) -> None:
        await self.gate.wait()

    @on(Through)
    async def through(self, message: Through) -> Total:
        inner = await message.to.ask(Add(1), reply=Total)
        assert inner.trace_id == trace_id()
        assert abs(inner.deadline_ns - deadline_ns()) < TIMEOUT_S / 2 * 1e9
        return inner


def endpoint(name: str, contracts: dict[str, str], incarnation: int = 1) -> Endpoint:
    identity = Identity(
        name=name, pid=os.getpid(), uid=os.getuid(), incarnation=incarnation, contracts=contracts
    )
    return Endpoint(identity=identity, cookie=bytes(32))
