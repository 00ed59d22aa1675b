"""An RDMA device as this process uses it on one event loop: one completion queue for all its links.

All receive into one shared queue of buffers, and all complete into one queue, whose channel the loop watches.
After a completion the queue is polled for a while, once a turn of the loop, before the channel is armed again
(`spin`). The protection domain of the links has no memory in it that a peer could read or write.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import mmap
from collections import deque
from typing import Any, Final, Protocol

import structlog

from zbmd.transport import _native
from zbmd.transport.errors import UserError
from zbmd.transport.link import LinkLimits
from zbmd.transport.rdma_flow import BUFFERS, MESSAGE_BYTES
from zbmd.transport.rdma_verbs import open_channel, verbs
from zbmd.transport.spin import SpinPolicy
from zbmd.transport.topology.rdma import Gid, read_rdma_devices

QUEUE_PAIRS_MAX: Final = 128
"""Of a device: links that stand, or are about to end."""
SEND_SLOTS: Final = 32
"""Messages of a link that the device has not sent yet."""
COMPLETIONS_MAX: Final = QUEUE_PAIRS_MAX * (BUFFERS + SEND_SLOTS)
POLL_MAX: Final = 64
"""Completions that are taken at once."""
DRAIN_S: Final = 5.0
"""How long `aclose` waits for what the links have sent to be acknowledged."""

log: Final = structlog.stdlib.get_logger("zbmd.transport.rdma")


class Completes(Protocol):
    """Who has a queue pair."""

    def on_sent(self, number: int, status: int) -> None:
        """The send with this number is done, and all before it; or failed, unless status is 0."""
        ...

    def on_message(self, word: int, data: bytes) -> None:
        """A message has come."""
        ...


class RdmaDevice:
    """One port of a device, opened by `open_device`. For its loop's thread."""

    def __init__(self, name: str, port: int, gid: Gid, loop: asyncio.AbstractEventLoop) -> None:
        v = verbs()
        self.name = name
        self.port = port
        self.gid_index = gid.index
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
        try:
            self.context = v.Context(name=name)
            attributes = self.context.query_port(port)
            self.mtu, self.lid = int(attributes.active_mtu), int(attributes.lid)
            self.gid = _gid_bytes(str(self.context.query_gid(port, gid.index)))
            self.domain = v.PD(self.context)
            self._channel, self._fd = open_channel(self.context)
            self.queue = v.CQ(self.context, COMPLETIONS_MAX, None, self._channel, 0)
            limit = v.SrqAttr(max_wr=QUEUE_PAIRS_MAX * BUFFERS, max_sge=1)
            self.receives = v.SRQ(self.domain, v.SrqInitAttr(limit))
        except v.Error as error:
            raise UserError(
                f"the RDMA device {name} cannot be opened: {error}. Is it up, may this user lock memory "
                "(ulimit -l)?"
            ) from error
        self._arm()
        loop.add_reader(self._fd, self._on_event)

    @property
    def links(self) -> int:
        """How many queue pairs stand, or are about to end."""
        return len(self._owners)

    # -- queue pairs -------------------------------------------------------------------------------------

    def add(self, number: int, owner: Completes) -> None:
        """Whose completions those of the queue pair are; buffers for it are posted."""
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
        self.poll()
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
            self._policy.paid()
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
        self._loop.remove_reader(self._fd)
        # Closes what is made on it too: queue pairs, queues, registrations.
        self.context.close()
        self._owners.clear()
        self._slabs.clear()


def open_device(name: str, address: str | None = None) -> RdmaDevice:
    """Open the device on the running loop. address: of the interface to use, if the device has several.

    Raises `UserError` if it is not there, is down or has no such address, or pyverbs is missing.
    """
    known = {device.name: device for device in read_rdma_devices()}
    if name not in known:
        raise UserError(f"there is no RDMA device {name!r}. There are: {', '.join(known) or 'none'}.")
    verbs()
    wanted = None if address is None else ipaddress.ip_address(address).exploded
    for port in known[name].ports:
        gids = [gid for gid in port.gids if gid.kind is None or "v1" not in gid.kind] or list(port.gids)
        if wanted is not None:
            gids = [gid for gid in gids if _ip_of(gid) == wanted]
        if port.active and gids:
            best = min(gids, key=lambda gid: gid.gid.startswith("fe80"))
            return RdmaDevice(name, port.number, best, asyncio.get_running_loop())
    raise UserError(
        f"the RDMA device {name} has no active port" + (f" with the address {address}." if address else ".")
    )


def _ip_of(gid: Gid) -> str:
    address = ipaddress.IPv6Address(gid.gid)
    return (address.ipv4_mapped or address).exploded


def _gid_bytes(gid: str) -> bytes:
    return ipaddress.IPv6Address(gid).packed


def address_of(slab: mmap.mmap) -> int:
    """Of its first byte."""
    return _native.address_of(memoryview(slab))
