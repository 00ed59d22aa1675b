"""Steps of collectives with one fault; argv: fault, step, rank, elements, and a word for messages."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import threading
from typing import Any

import numpy as np

import zbmd

FAULT, STEP, WHO, SIZE, WORD = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
STEPS = 24
if FAULT == "import" and int(os.environ["RANK"]) == WHO:
    importlib.import_module("absent_module")  # FAULT import


class Question(zbmd.Contract):
    """A question and its answer."""

    number: int


class Asker(zbmd.Actor):
    """Asks another actor, which asks it."""

    def __init__(self) -> None:
        self.other = ""

    @zbmd.on(Question)
    async def question(self, message: Question) -> Question:
        other = self.system.ref("rank0/first" if message.number == 2 else "rank1/second")
        return await other.ask(Question(3 - message.number), reply=Question, timeout=600.0)


def read_sample(index: int) -> float:
    """Read a sample; some are bad."""
    raise ValueError(f"{WORD}: sample {index} has 3 fields, expected 4")  # FAULT exception exception-all


def wait_for_pipe() -> None:
    """Read what nobody writes."""
    read, _ = os.pipe()
    os.read(read, 1)  # FAULT wait


def break_off(fault: str) -> None:
    """Do what ends or holds up this process."""
    match fault:
        case "exception" | "exception-all":
            read_sample(STEP)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crashed":
            ctypes.string_at(0)
        case "aborted":
            os.abort()
        case "memory":
            np.empty(1 << 52)  # FAULT memory
        case "oom":
            kept = [bytearray(os.urandom(1 << 20)) * 64 for _ in range(1 << 16)]
            print(len(kept))
        case "exited":
            os._exit(3 + SIZE % 70)
        case "busy":
            while True:  # FAULT busy
                sum(range(1000))  # FAULT busy
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # FAULT lock
        case "wait":
            wait_for_pipe()
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "disk":
            with open("/dev/full", "wb") as file:  # FAULT disk
                file.write(bytes(SIZE + 1))  # FAULT disk
                file.flush()  # FAULT disk
        case "ended":
            os.kill(os.getppid(), signal.SIGKILL)
        case _:
            raise ValueError(f"unknown fault {fault}")


async def main() -> None:
    """Run the steps."""
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        await one_group(worker, group)


async def one_group(worker: Any, group: Any) -> None:
    """Run the steps in `group`."""
    if FAULT == "deadlock":
        name = {0: "first", 1: "second"}.get(worker.rank, f"none{worker.rank}")
        await worker.system.spawn(Asker, name=name)
    for step in range(STEPS):
        data = np.ones(SIZE, np.float32)
        here = step == STEP and worker.rank == WHO
        if worker.rank == 0:
            worker.report({"kind": "step", "version": step})
        if FAULT == "deadlock" and step == STEP and worker.rank < 2:
            own = worker.system.ref("rank0/first" if worker.rank == 0 else "rank1/second")
            await own.ask(Question(1 if worker.rank == 0 else 2), reply=Question, timeout=600.0)
        elif FAULT == "exception-all" and step == STEP:
            break_off(FAULT)
        elif here and FAULT == "skipped":
            return
        elif here and FAULT == "shape":
            data = np.ones(SIZE + 1, np.float32)
        elif here and FAULT == "dtype":
            data = np.ones(SIZE, np.float64)
        elif here and FAULT == "order":
            await group.broadcast(data, root=0)  # FAULT order
        elif here and FAULT not in ("import", "none", "launcher", "deadlock"):
            break_off(FAULT)
        await group.all_reduce(data)  # FAULT shape dtype skipped
        if FAULT == "launcher" and step == STEP:
            print("at the step", flush=True)
            await asyncio_forever()


async def asyncio_forever() -> None:
    """Wait until this process is ended."""
    import asyncio

    await asyncio.get_running_loop().create_future()


zbmd.run(main())
