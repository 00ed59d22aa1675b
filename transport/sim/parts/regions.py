"""`SimRegion`: registered memory of a simulated peer, reached by a delayed copy over the simulated network.

Operations and frames of one link share one order. Bytes are read from the sender's buffer when they arrive,
as a network card reads them while it sends: who reuses a buffer before its transfer is done sends something
else. When the sender dies, the put that was under way may land in part, and is not notified.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from zbmd.transport.errors import LinkFull, LocalProtocolError, PeerLost, RemoteProtocolError
from zbmd.transport.memory.checked_region import CheckedRegion
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.transfer import Transfer

if TYPE_CHECKING:
    from zbmd.transport.sim.links import SimLink

OPERATION_BYTES: Final = 64
"""What a put, a get or a notification takes on the wire beside its bytes."""
TRANSFERS_MAX: Final = 1024
"""Transfers of one link under way at once."""


class SimTransfer(Transfer):
    """A transfer that can only be awaited: a thread that blocks would stop all of virtual time."""

    __slots__ = ()

    def wait(self, deadline_ns: int = 0) -> None:
        """Raises `LocalProtocolError` unless done."""
        if not self.done:
            raise LocalProtocolError("a simulated process cannot block: await the transfer")
        super().wait()


class SimRegion(CheckedRegion):
    """See `zbmd.transport.memory.region.RemoteRegion`. Made by `SimLink.open_region`."""

    def __init__(self, link: SimLink, handle: RegionHandle) -> None:
        super().__init__(handle)
        self._link = link

    def _put(self, view: memoryview, offset: int, channel: int, value: int, owner: object) -> Transfer:
        transfer = self._link.transfer(view)
        arrive = partial(self._put_arrives, transfer, view, offset, channel, value)
        self._link.send_operation(OPERATION_BYTES + view.nbytes, arrive)
        return transfer

    def _get(self, view: memoryview, offset: int, owner: object) -> Transfer:
        transfer = self._link.transfer(view)
        self._link.send_operation(OPERATION_BYTES, partial(self._get_arrives, transfer, view, offset))
        return transfer

    def _notify(self, channel: int, value: int) -> None:
        self._link.send_operation(OPERATION_BYTES, partial(self._notify_arrives, channel, value))

    def _check_usable(self) -> None:
        super()._check_usable()
        self._link.require_peer()

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview | None:
        """None: simulated processes share no memory."""
        self._check_open()
        return super().view(offset, nbytes)

    # -- at the owner, when the network says so; `landed` is the part that made it, 1 if all did ---------

    def _put_arrives(
        self, transfer: Transfer, view: memoryview, offset: int, channel: int, value: int, landed: float
    ) -> None:
        if transfer.done:  # the sender's end of the link is closed, and its buffer may be another's
            return
        far = self._link.far
        try:
            target = far.own_memory.regions.resolve(self._handle, offset, view.nbytes, write=True)
        except RemoteProtocolError as error:
            far.answer(OPERATION_BYTES, partial(transfer.finish, error))
            return
        count = int(view.nbytes * landed)
        target[:count] = view[:count]
        if landed == 1.0:
            far.own_memory.notified(self._link.own_memory.slot, channel, value)
            far.answer(OPERATION_BYTES, transfer.finish)

    def _get_arrives(self, transfer: Transfer, view: memoryview, offset: int, landed: float) -> None:
        far = self._link.far
        if landed < 1.0:
            return
        try:
            data = bytes(far.own_memory.regions.resolve(self._handle, offset, view.nbytes, write=False))
        except RemoteProtocolError as error:
            far.answer(OPERATION_BYTES, partial(transfer.finish, error))
            return
        far.answer(OPERATION_BYTES + len(data), partial(_fill, transfer, view, data))

    def _notify_arrives(self, channel: int, value: int, landed: float) -> None:
        if landed == 1.0:
            self._link.far.own_memory.notified(self._link.own_memory.slot, channel, value)


def _fill(transfer: Transfer, view: memoryview, data: bytes) -> None:
    if not transfer.done:
        view[:] = data
        transfer.finish()


class Operations:
    """The transfers of one end of a link that are under way."""

    def __init__(self) -> None:
        self._under_way: dict[SimTransfer, None] = {}

    def begin(self, view: memoryview) -> SimTransfer:
        """Raises `LinkFull`."""
        self._under_way = {transfer: None for transfer in self._under_way if not transfer.done}
        if len(self._under_way) >= TRANSFERS_MAX:
            raise LinkFull(f"{TRANSFERS_MAX} transfers are under way; await one of them")
        transfer = SimTransfer(view)
        self._under_way[transfer] = None
        return transfer

    def fail(self, error: PeerLost) -> None:
        """The link has ended: whatever arrives now touches no buffer."""
        under_way, self._under_way = self._under_way, {}
        for transfer in under_way:
            transfer.finish(error)
