"""An RDMA device as this process uses it on one event loop: one completion queue for all its links.

All receive into one shared queue of buffers, and all complete into one queue, whose channel the loop watches.
After a completion the queue is polled for a while, once a turn of the loop, before the channel is armed again
(`spin`). The protection domain of the links has no memory in it that a peer could read or write.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from ipaddress import IPv6Address
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import structlog

from zbmd.transport.errors import UserError
from zbmd.transport.host.link_choice import choose_address
from zbmd.transport.host.topology.devices import rdma_devices
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.link.spin import SpinPolicy
from zbmd.transport.native import _native
from zbmd.transport.native._native import now_ns
from zbmd.transport.rdma.credit import BUFFERS, CREDITS, MESSAGE_BYTES
from zbmd.transport.rdma.setup import QueuePairAt

# ---- the verbs that are used, by pyverbs: the one place that knows how its releases differ.
#
# pyverbs is imported when the first device is opened. Its release goes with the distribution's rdma-core; the
# constants have been in two modules so far, and its completion channel does not tell its descriptor.

INSTALL: Final = (
    "RDMA needs pyverbs: install the distribution's python3-pyverbs, for the distribution's own Python, or "
    "pip install 'zbmd[rdma]' where libibverbs and its headers are."
)
CHANNEL_NAME: Final = "infinibandevent"


_CLASSES: Final = {
    "device": ("Context",),
    "pd": ("PD",),
    "mr": ("MR",),
    "cq": ("CQ", "CompChannel"),
    "qp": ("QP", "QPCap", "QPInitAttr", "QPAttr"),
    "addr": ("AHAttr", "GID", "GlobalRoute"),
    "wr": ("SGE", "SendWR", "RecvWR"),
    "srq": ("SRQ", "SrqInitAttr", "SrqAttr"),
}
"""By the module of pyverbs that has them."""


class Verbs:
    """The classes of pyverbs by their own names, its error, and the constants `c`."""

    def __init__(self) -> None:
        try:
            self.c: Any = import_module("pyverbs.libibverbs_enums")
        except ImportError:
            self.c = import_module("pyverbs.enums")
        self.Error: type[Exception] = import_module("pyverbs.pyverbs_error").PyverbsError
        for module, names in _CLASSES.items():
            found = import_module(f"pyverbs.{module}")
            vars(self).update({name: getattr(found, name) for name in names})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@cache
def verbs() -> Verbs:
    """Raises `UserError` where pyverbs is not, or does not fit this Python."""
    try:
        return Verbs()
    except ImportError as error:
        raise UserError(f"{INSTALL} ({error})") from error


def open_channel(context: Any) -> tuple[Any, int]:
    """A completion channel that never blocks, and its descriptor."""
    before = _channels()
    channel = verbs().CompChannel(context)
    found = _channels() - before
    if len(found) != 1:
        channel.close()
        raise UserError(
            f"cannot find the descriptor of a completion channel: {len(found)} new descriptors, expected 1."
        )
    fd = found.pop()
    os.set_blocking(fd, False)
    return channel, fd


def _channels() -> set[int]:
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if CHANNEL_NAME in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


# ---- finding who has a peer's address, before a queue pair is connected to it
#
# Over Ethernet the kernel asks the network for it (ARP, neighbour discovery) and gives up after a second,
# which one lost packet is enough for: so it is asked again. And it is asked by a thread that holds no lock of
# Python: connecting a queue pair would ask as well, while the event loop stands still. Source:
# ib_resolve_eth_dmac of Linux (drivers/infiniband/core/verbs.c), whose time is 1000 ms.

LOOK_UPS: Final = 3
"""At most so many, each of up to a second."""
LOOK_UP_SHARE: Final = 2
"""None begins after this part of the time that is left: the peer may have to look us up then."""

LookUp = Callable[[QueuePairAt], int]
"""Blocks; 0, or an errno. See `_rdma_device.Device.look_up`."""


def looks_up(name: str, address: str) -> LookUp | None:
    """By the port of a device that has this address; None where zbmd was built without libibverbs: connecting
    asks once, then.

    Raises `UserError` if the device cannot be opened.
    """
    try:
        from zbmd.transport.rdma.native._rdma_device import Device
        from zbmd.transport.rdma.plane import choose_port
    except ImportError:
        return None
    device = Device(name)
    at = choose_port(device, address)
    return lambda peer: device.look_up(at.path_to(peer, 0))


async def reach(device: str, look_up: LookUp, peer: QueuePairAt, deadline_ns: int) -> None:
    """Return once it is known who has the peer's address, or something else is wrong, which connecting tells.

    Raises `UserError` if nobody has answered.
    """
    until_ns = now_ns() + (deadline_ns - now_ns()) // LOOK_UP_SHARE
    asked = 0
    while asked == 0 or (asked < LOOK_UPS and now_ns() < until_ns):
        if await asyncio.to_thread(look_up, peer) != errno.ETIMEDOUT:
            return
        asked += 1
    gid = ipaddress.IPv6Address(peer.gid)
    raise UserError(
        f"the RDMA device {device} cannot reach {gid.ipv4_mapped or gid}: the network was asked {asked} × "
        "who has that address, and nobody answered. Is the peer's port up, and in the same network?"
    )


QUEUE_PAIRS_MAX: Final = 96
"""Of a device: links that stand, or are about to end."""
CONTROL_SLOTS: Final = 4
SEND_SLOTS: Final = CREDITS + CONTROL_SLOTS
"""Messages of a link that have not arrived yet: what credit allows, and those without a frame's bytes."""
COMPLETIONS_MAX: Final = QUEUE_PAIRS_MAX * (BUFFERS + SEND_SLOTS)
GIDS_MAX: Final = 256
"""Addresses of a device, on all ports."""
POLL_MAX: Final = 64
"""Completions that are taken at once."""
DRAIN_S: Final = 5.0
"""Longest wait of `aclose` for acknowledgements of what the links have sent."""

log: Final = structlog.stdlib.get_logger("zbmd.transport.rdma")


class Completes(Protocol):
    """The owner of a queue pair."""

    def on_sent(self, number: int, status: int) -> None:
        """The send with this number is done, and all before it; or failed, unless status is 0."""
        ...

    def on_message(self, word: int, data: bytes) -> None:
        """A message has come."""
        ...


class MessageDevice:
    """One port of a device, opened by `open_rdma_device`. For its loop's thread."""

    def __init__(self, name: str, context: Any, at: _At, loop: asyncio.AbstractEventLoop) -> None:
        v = verbs()
        self.name = name
        self.context = context
        self.port = at.port
        self.gid_index = at.gid_index
        self.gid = at.gid.packed
        self._loop = loop
        self._owners: dict[int, Completes] = {}
        self._taken: deque[Any] = deque()
        """Completions that are off the queue; in their order."""
        self._slabs: list[mmap.mmap] = []
        self._regions: list[Any] = []
        self._closed = False
        self._policy = SpinPolicy(LinkLimits().spin_ns)
        self._spinning = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._look_up = looks_up(name, str(at.gid))
        attributes = context.query_port(at.port)
        self.mtu, self.lid = int(attributes.active_mtu), int(attributes.lid)
        self.domain = v.PD(context)
        self._channel, self._fd = open_channel(context)
        self.queue = v.CQ(context, COMPLETIONS_MAX, None, self._channel, 0)
        limit = v.SrqAttr(max_wr=QUEUE_PAIRS_MAX * BUFFERS, max_sge=1)
        self.receives = v.SRQ(self.domain, v.SrqInitAttr(limit))
        self._arm()
        loop.add_reader(self._fd, self._on_event)

    @property
    def links(self) -> int:
        """Return how many queue pairs stand, or are about to end."""
        return len(self._owners)

    async def reach(self, peer: QueuePairAt, deadline_ns: int) -> None:
        """Before a queue pair is connected to that one: see `reach`."""
        if self._look_up is not None:
            await reach(self.name, self._look_up, peer, deadline_ns)

    # -- queue pairs -------------------------------------------------------------------------------------

    def add(self, number: int, owner: Completes) -> None:
        """Deliver the completions of the queue pair to `owner`; post buffers for it."""
        self._owners[number] = owner
        self._idle.clear()
        if len(self._owners) > len(self._slabs):
            self._add_slab()

    def remove(self, number: int) -> None:
        """The queue pair is in its error state, or reset: what completes of it is of no interest."""
        self.poll()
        self._owners.pop(number, None)
        if not self._owners:
            self._idle.set()

    def require_room(self) -> None:
        """Raise `UserError` if no further queue pair can be had."""
        if self._closed or len(self._owners) >= QUEUE_PAIRS_MAX:
            raise UserError(f"the RDMA device {self.name} carries {len(self._owners)} links, its most.")

    def _add_slab(self) -> None:
        v = verbs()
        slab = mmap.mmap(-1, BUFFERS * MESSAGE_BYTES)
        region = v.MR(self.domain, len(slab), v.c.IBV_ACCESS_LOCAL_WRITE, address=address_of(slab))
        self._slabs.append(slab)
        self._regions.append(region)
        for buffer in range(BUFFERS):
            self._post(len(self._slabs) - 1, buffer)

    def _post(self, slab: int, buffer: int) -> None:
        v, region = verbs(), self._regions[slab]
        place = v.SGE(region.buf + buffer * MESSAGE_BYTES, MESSAGE_BYTES, region.lkey)
        self.receives.post_recv(v.RecvWR(wr_id=slab * BUFFERS + buffer, num_sge=1, sg=[place]))

    # -- completions -------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Take all completions that are there; whether there were any."""
        found = False
        while not self._closed:
            count, completions = self.queue.poll(POLL_MAX)
            self._taken.extend(completions[:count])
            while self._taken:  # one that ends a link polls again, and goes on with these
                self._take(self._taken.popleft())
            found |= count > 0
            if count < POLL_MAX:
                break
        return found

    def _take(self, completion: Any) -> None:
        c = verbs().c
        owner = self._owners.get(completion.qp_num)
        if completion.wr_id >= 1 << 32:  # a send's
            if owner is not None:
                owner.on_sent(completion.wr_id & 0xFFFFFFFF, int(completion.status))
            return
        slab, buffer = divmod(completion.wr_id, BUFFERS)
        if completion.status == c.IBV_WC_SUCCESS and owner is not None:
            start = buffer * MESSAGE_BYTES
            data = self._slabs[slab][start : start + completion.byte_len]
            owner.on_message(int(completion.imm_data), data)
        self._post(slab, buffer)

    def _arm(self) -> None:
        self.queue.req_notify()

    def _on_event(self) -> None:
        with contextlib.suppress(verbs().Error, BlockingIOError):
            self._channel.get_cq_event(self.queue)
            self.queue.ack_events(1)
        if self.poll():
            self._policy.came(_native.now_ns())
        self._look_again()

    def _look_again(self) -> None:
        """Poll on for a while, or arm; what has come before it was armed is not told."""
        if self._closed or self._spinning:
            return
        if self._policy.begins(_native.now_ns()):
            self._spinning = True
            self._loop.call_soon(self._spin)
        else:
            self._park()

    def _park(self) -> None:
        self._arm()
        if self.poll():
            self._loop.call_soon(self._look_again)

    def _spin(self) -> None:
        if self._closed:
            return
        if self.poll():
            self._policy.came(_native.now_ns())
            self._spinning = False
            self._look_again()
        elif self._policy.goes_on(_native.now_ns()):
            self._loop.call_soon(self._spin)
        else:
            self._spinning = False
            self._park()

    # -- the end -----------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Wait, for a bounded time, until what the links have sent has arrived; then close the device."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._idle.wait()
        self.close()

    def close(self) -> None:
        """Give everything back. Its links must have ended. Idempotent."""
        if self._closed:
            return
        if self._owners:
            log.warning("links are cut with their RDMA device", device=self.name, links=len(self._owners))
        self._closed = True
        self._look_up = None
        self._loop.remove_reader(self._fd)
        # Closes what is made on it too: queue pairs, queues, registrations.
        self.context.close()
        self._owners.clear()
        self._slabs.clear()


class _At(NamedTuple):
    """A port of a device, and its address."""

    port: int
    gid_index: int
    gid: IPv6Address


def open_rdma_device(name: str, address: str | None = None) -> MessageDevice:
    """Open the device on the running loop. address: of the interface to use, if the device has several.

    Raises `UserError` if it is missing, is down or has no such address, or pyverbs is missing.
    """
    v = verbs()
    try:
        context = v.Context(name=name)
    except v.Error as error:
        known = ", ".join(rdma_devices()) or "none"
        raise UserError(f"there is no RDMA device {name!r} ({error}). There are: {known}.") from error
    try:
        at = choose_address(name, address, _usable(context))
        return MessageDevice(name, context, at, asyncio.get_running_loop())
    except v.Error as error:
        context.close()
        raise UserError(
            f"the RDMA device {name} cannot be used: {error}. May this user lock memory (ulimit -l)?"
        ) from error
    except BaseException:
        context.close()
        raise


def _usable(context: Any) -> Iterator[tuple[IPv6Address, _At]]:
    """By the device's table: sysfs has a file for every entry that there could be, a thousand of them."""
    c = verbs().c
    for entry in context.query_gid_table(GIDS_MAX):
        port, index = int(entry.port_num), int(entry.gid_index)
        if entry.gid_type == c.IBV_GID_TYPE_ROCE_V1 or context.query_port(port).state != c.IBV_PORT_ACTIVE:
            continue
        gid = IPv6Address(str(context.query_gid(port, index)))
        yield gid, _At(port, index, gid)


def address_of(slab: mmap.mmap) -> int:
    """Of its first byte."""
    return _native.address_of(memoryview(slab))
