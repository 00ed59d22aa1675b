"""A kind of device for tests: a core that is healthy unless a file of its folder says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.process_pool.devices import CpuCore

SICK_VARIABLE = "DEVICE_KINDS_SICK"
"""Names the folder of the files `sick0`, `sick1`, ..."""
CORE = min(os.sched_getaffinity(0))


class Core(CpuCore):
    def __init__(self, index: int) -> None:
        super().__init__(CORE)
        self.sick = Path(os.environ[SICK_VARIABLE]) / f"sick{index}"

    def check(self) -> str:
        return "it is sick" if self.sick.exists() else super().check()


class Where(Contract, id="device_kinds.where"):
    pass


class Here(Contract, id="device_kinds.here"):
    pid: int
    cores: list[int]


class Teller(Actor):
    @on(Where)
    async def where(self, _: Where) -> Here:
        return Here(os.getpid(), sorted(os.sched_getaffinity(0)))
