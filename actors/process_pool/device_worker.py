"""The process of one worker of a device: binds the device, links with who has started it, and hosts actors.

    python -m zbmd.actors.process_pool.device_worker KIND INDEX NAME INCARNATION ADDRESS [MODULE …]
    python -m zbmd.actors.process_pool.device_worker KIND INDEX --probe

The cookie comes on standard input, in a line. It ends with the link, or its parent: whoever starts it has
seen to that, as a fork's template or by a leash.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from typing import Final, cast

import uvloop

from zbmd.actors.contracts import fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import allow_remote_modules
from zbmd.actors.process_pool.devices import CHECK, CheckDevice, Device, DeviceChecked
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.host.process import set_process_name
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.shm.connect import dial

COOKIE_LINE_BYTES_MAX: Final = 1024


class DeviceActor(Actor):
    """Checks the device when it is asked to."""

    captured = False

    def __init__(self, device: Device) -> None:
        self._device = device

    @on(CheckDevice)
    async def check(self, _: CheckDevice) -> DeviceChecked:
        """On a thread: the loop goes on."""
        return DeviceChecked(await asyncio.to_thread(self._device.check))


def open_device(kind: str, index: int) -> Device:
    """Make and bind a device. Raises `UserError`."""
    module_name, _, class_name = kind.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)(index)
    except (ImportError, AttributeError) as error:
        raise UserError(f"there is no kind of device {kind!r}: {error}") from error
    device = cast(Device, made)
    device.bind()
    return device


async def serve(device: Device, name: str, incarnation: int, address: str, cookie: bytes) -> None:
    """Host actors until the link ends, or the process receives SIGTERM."""
    ended = asyncio.Event()
    system = ActorSystem(name, incarnation)
    await system.spawn(DeviceActor, device, name=CHECK)
    identity = Identity(
        name=name, pid=os.getpid(), uid=os.getuid(), incarnation=incarnation, contracts=fingerprints()
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    link = await dial(address, Endpoint(identity=identity, cookie=cookie))
    system.attach(link, on_closed=lambda _: ended.set())
    await ended.wait()
    await system.stop()


def main() -> int:
    """See the module."""
    kind, index, name, *more = sys.argv[1:]
    try:
        device = open_device(kind, int(index))
        if name == "--probe":
            if problem := device.check():
                raise UserError(problem)
            return 0
        incarnation, address, *modules = more
        set_process_name(name)
        for module in modules:
            importlib.import_module(module)
        allow_remote_modules(*modules)
        cookie = bytes.fromhex(sys.stdin.readline(COOKIE_LINE_BYTES_MAX).strip())
        uvloop.run(serve(device, name, int(incarnation), address, cookie))
    except ZbmdError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
