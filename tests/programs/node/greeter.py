"""An actor that says where it is, and asks others."""

from __future__ import annotations

from zbmd import Actor, Contract, Ref, on


class Where(Contract, id="run.where"):
    pass


class Here(Contract, id="run.here"):
    process: str


class Call(Contract, id="run.call"):
    ref: Ref


class Greeter(Actor):
    @on(Where)
    async def where(self, _: Where) -> Here:
        return Here(self.system.name)

    @on(Call)
    async def call(self, message: Call) -> Here:
        return await message.ref.ask(Where(), reply=Here, timeout=20)
