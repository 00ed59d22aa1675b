"""An actor that computes in threads and processes of its system's pool."""

from __future__ import annotations

import os
import threading

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on


class Square(Contract, id="pools.square"):
    number: int


class Cube(Contract, id="pools.cube"):
    number: int


class Result(Contract, id="pools.result"):
    number: int
    pid: int
    thread: int


class Hang(Contract, id="pools.hang"):
    pass


class Count(Contract, id="pools.count"):
    pass


class Double(Contract, id="pools.double"):
    number: int


class Calculator(Actor):
    def __init__(self) -> None:
        self.count = 0

    @on(Square, pool="thread")
    def square(self, message: Square) -> Result:
        self.count += 1
        if message.number < 0:
            raise ValueError("negative")
        return Result(message.number**2, 0, threading.get_ident())

    @on(Double, pool="thread")
    def double(self, message: Double) -> Result:
        self.count += 1
        return Result(message.number * 2 + self.count, 0, 0)

    @staticmethod
    @on(Cube, pool="process")
    def cube(message: Cube) -> Result:
        print("nobody takes this for an answer")
        if message.number < 0:
            raise ValueError("negative")
        if message.number == 0:
            os._exit(3)
        return Result(message.number**3, os.getpid(), 0)

    @staticmethod
    @on(Hang, pool="process")
    def hang(_: Hang) -> None:
        threading.Event().wait()

    @on(Count)
    async def counted(self, _: Count) -> Result:
        return Result(self.count, 0, 0)
