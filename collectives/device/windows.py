"""Operations of a group whose members' devices read each other's memory, by CUDA's IPC.

`connect` finds out whether they do: each member allocates a window, all open the windows of all, and if one
of them cannot, for whatever reason, none does. From then on operations whose arrays lie on devices go by
`phases`. A rank asks its stream for a phase, waits until the device has done it, and meets the others in
memory of the host. So nothing on a device ever waits for another process: one that dies ends the operation
as it does on the host, and leaves no stream behind that waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.device.arrays import DeviceArray
from zbmd.collectives.device.arrays_in import Placed, address
from zbmd.collectives.device.folds import SOURCES_MAX, fold_kernels, fold_name
from zbmd.collectives.device.phases import (
    OPERATIONS,
    Area,
    Fetch,
    Fold,
    Load,
    Step,
    blocks_in,
    phases_of,
    piece_elements,
    result_offset,
)
from zbmd.collectives.device.staged_calls import DeviceLate, wait_for_event
from zbmd.collectives.flight.device_clock import DeviceClock
from zbmd.collectives.programs.reductions import REDUCTIONS, itemsize
from zbmd.transport.cuda.api import (
    HANDLE_BYTES,
    UUID_BYTES,
    CopyRoute,
    CudaApi,
    CudaFault,
    DeviceBytes,
    DeviceFacts,
    choose_copy_route,
    why_no_ipc,
)
from zbmd.transport.cuda.array import DeviceUuid, OpaqueHandle
from zbmd.transport.errors import RemoteProtocolError

WINDOW_BYTES: Final = 128 << 20
"""Of a device's memory, for each group that is connected."""
OFFER_BYTES: Final = 4096
TEXT_MAX: Final = 160
SPIN_S: Final = 200e-6
"""Seconds in which a thread looks without a pause for the end of what a device does."""
_LENGTH_BYTES: Final = 2
_AVERAGE: Final = REDUCTIONS.index("avg")

_Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]


class WindowOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """A member's device and window. why: why others cannot read there; "" if they can."""

    why: _Text = ""
    uuid: DeviceUuid = bytes(UUID_BYTES)
    name: _Text = ""
    pci: _Text = ""
    memory: OpaqueHandle = bytes(HANDLE_BYTES)


@dataclass(frozen=True, slots=True)
class DevicePaths:
    """Whether devices of a group read each other's memory (`direct`), and why, or why not."""

    direct: bool
    reason: str


class Members(Protocol):
    """What `connect` asks of a communicator."""

    members: tuple[int, ...]
    place: int
    hosts: tuple[int, ...]

    def all_gather(self, x: NDArray[np.uint8], *, deadline_ns: int = 0) -> NDArray[np.uint8]:
        """Collect the `x` of all members."""
        ...


@dataclass(slots=True)
class _Window:
    """Memory of a device that other processes may have open. readers: their ranks in the job."""

    address: int
    readers: frozenset[int] = field(default_factory=frozenset[int])


class WindowPool:
    """The windows of closed groups. CUDA leaves undefined what becomes of memory that is freed while another
    process has it open, so none is freed: a later group takes it that has all who may have it open.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[CudaApi, _Window]] = []

    def take(self, api: CudaApi, readers: frozenset[int]) -> _Window:
        """Return a window for a group with these other members. Raises `CudaFault`."""
        for number, (of, window) in enumerate(self._idle):
            if of is api and window.readers <= readers:
                del self._idle[number]
                return window
        return _Window(api.malloc(WINDOW_BYTES))

    def give_back(self, api: CudaApi, window: _Window) -> None:
        """Nothing of this process uses it any more."""
        self._idle.append((api, window))


POOL: Final = WindowPool()


@dataclass(frozen=True, slots=True)
class _There:
    """A member's window as it is mapped here, and on which device it is."""

    address: int
    device: int


class DeviceWindows:
    """The windows of one group. For the thread that has the communicator's turn.

    others: those of the other members, by place.
    """

    def __init__(self, api: CudaApi, window: _Window, place: int, others: dict[int, _There]) -> None:
        self._api = api
        self._window = window
        self._place = place
        own = _There(window.address, api.device)
        self._members = [others.get(each, own) for each in range(len(others) + 1)]
        self._stream = api.stream_create()
        self._event = api.event_create()
        self._pieces = 0
        self._late: tuple[Placed | None, ...] = ()
        """Arrays that the device may touch at any time: an operation with them was late."""
        self._closed = False

    def takes(self, operation: Operation, count: int, dtype: int, lengths: Sequence[int]) -> bool:
        """Whether an operation goes this way; the same on all ranks.

        lengths: of the blocks, if they do not lie one stride apart.
        """
        if operation not in OPERATIONS or not count or any(length != count for length in lengths):
            return False
        return self._piece(operation, dtype) > 0

    def run(
        self,
        operation: Operation,
        *,
        count: int,
        dtype: int,
        reduction: int,
        root: int,
        source: Placed | None,
        target: Placed | None,
        meet: Callable[[], None],
        clock: DeviceClock,
        deadline_ns: int,
    ) -> None:
        """Carry an operation out and return when its result is there. `count`: elements of a block.

        source: what this rank gives, flat, None if nothing; target: where its result goes. `meet` returns
        once all members have called it. Raises what `meet` does, `CudaFault`, and `DeviceLate`, after which
        the device may still touch the arrays.
        """
        run = _Run(self, operation, count, dtype, reduction, root, source, target, clock)
        for array in (source, target):
            if isinstance(array, DeviceArray):
                self._api.event_record(self._event, array.stream)
                self._api.stream_wait_event(self._stream, self._event)
        piece = self._piece(operation, dtype)
        try:
            for begin in range(0, count, piece):
                self._carry_out(run, begin, min(piece, count - begin), meet, deadline_ns)
            self._settle(clock, deadline_ns)
        except DeviceLate:
            self._late = (source, target)
            raise
        except BaseException:
            self._api.stream_synchronize(self._stream)
            raise

    def close(self) -> None:
        """Let go of the others' windows, and of all but the memory of the own. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._late:
            return
        with contextlib.suppress(CudaFault):  # a device that has failed keeps nothing
            self._api.stream_synchronize(self._stream)
            for place, member in enumerate(self._members):
                if place != self._place:
                    self._api.ipc_close_mem_handle(member.address)
            self._api.event_destroy(self._event)
            self._api.stream_destroy(self._stream)
            POOL.give_back(self._api, self._window)

    def _piece(self, operation: Operation, dtype: int) -> int:
        return piece_elements(operation, len(self._members), itemsize(dtype), WINDOW_BYTES // 2)

    def _carry_out(
        self, run: _Run, begin: int, length: int, meet: Callable[[], None], deadline_ns: int
    ) -> None:
        half = self._pieces % 2 * (WINDOW_BYTES // 2)
        self._pieces += 1
        phases = phases_of(
            run.operation, n=len(self._members), place=self._place, root=run.root, length=length
        )
        for number, phase in enumerate(phases):
            if number:
                self._settle(run.clock, deadline_ns)
                meet()
            with run.clock.timed(self._api, self._stream):
                for step in phase:
                    run.ask(step, half, begin, length)

    def _settle(self, clock: DeviceClock, deadline_ns: int) -> None:
        """Wait until all that the stream was asked for is done."""
        self._api.event_record(self._event, self._stream)
        wait_for_event(self._api, self._event, deadline_ns, spin_s=SPIN_S)
        clock.read()

    # -- for `_Run` --------------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """Of this rank."""
        return self._place

    @property
    def members(self) -> int:
        """Their number."""
        return len(self._members)

    def at(self, place: int) -> int:
        """Return where the window of a member begins here."""
        return self._members[place].address

    def copy(self, into: int, src: int, nbytes: int, *, of: int | None = None) -> None:
        """Ask for a copy; of: the member whose window is read, if it is one."""
        api, device = self._api, self._api.device if of is None else self._members[of].device
        if device == api.device:
            api.memcpy_async(into, src, nbytes, self._stream)
        else:
            api.memcpy_peer_async(into, api.device, src, device, nbytes, self._stream)

    def fold(self, dtype: int, reduction: int, into: int, sources: Sequence[int], elements: int) -> None:
        """Ask for the reduction of an array of each member."""
        nbytes = elements * itemsize(dtype)
        by = len(sources) if reduction == _AVERAGE else 0
        none = [0] * (SOURCES_MAX - len(sources))
        self._api.launch(
            fold_kernels(dtype),
            fold_name(dtype, reduction),
            elements,
            (
                DeviceBytes(into, nbytes, written=True),
                elements,
                len(sources),
                by,
                *(DeviceBytes(source, nbytes) for source in sources),
                *none,
            ),
            self._stream,
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """One operation: what its steps mean in memory."""

    windows: DeviceWindows
    operation: Operation
    count: int
    dtype: int
    reduction: int
    root: int
    source: Placed | None
    target: Placed | None
    clock: DeviceClock

    def ask(self, step: Step, half: int, begin: int, length: int) -> None:
        """Ask for a step of the piece of elements begin..begin+length of each block."""
        windows, item = self.windows, itemsize(self.dtype)
        result = result_offset(self.operation, windows.members, length, item)
        match step:
            case Load():
                into = windows.at(windows.place) + half
                for block in range(blocks_in(self.operation, windows.members)):
                    src = self._in(self.source, block, begin)
                    windows.copy(into + block * length * item, src, length * item)
            case Fold(block=block, begin=first, end=end, keep=keep):
                where = half + (block * length + first) * item
                sources = [windows.at(place) + where for place in range(windows.members)]
                own = windows.at(windows.place) + half + result + first * item
                into = own if keep else self._in(self.target, 0, begin + first)
                windows.fold(self.dtype, self.reduction, into, sources, end - first)
            case Fetch(rank=rank, area=area, block=block, begin=first, end=end, into=row):
                offset = result if area is Area.RESULT else block * length * item
                src = windows.at(rank) + half + offset + first * item
                into = self._in(self.target, row, begin + first)
                windows.copy(into, src, (end - first) * item, of=rank)

    def _in(self, array: Placed | None, block: int, element: int) -> int:
        assert array is not None, "a rank with this step has it"
        return address(array) + (block * self.count + element) * itemsize(self.dtype)


def connect(
    c: Members, api: CudaApi | None, *, deadline_ns: int = 0
) -> tuple[DeviceWindows | None, DevicePaths]:
    """Have the members of a group, all of whom call this, open each other's windows if all of them can.

    api: of this rank's device; None if it has none. The outcome is the same on all. Raises as the
    communicator's operations do.
    """
    others = frozenset(rank for place, rank in enumerate(c.members) if place != c.place)
    window: _Window | None = None
    offer = WindowOffer(why=_why_not(c, api))
    if api is not None and not offer.why:
        try:
            window = POOL.take(api, others)
            offer = _offer_of(api, window)
        except CudaFault as error:
            offer = WindowOffer(why=f"its window cannot be offered: {error}"[:TEXT_MAX])
    offers = _exchanged(c, offer, deadline_ns)
    opened, failed = dict[int, _There](), _first(offers)
    if not failed and api is not None:
        opened, why = _open(api, offers, c.place)
        failed = _first(_exchanged(c, WindowOffer(why=why[:TEXT_MAX]), deadline_ns))
    if api is None or window is None:
        return None, DevicePaths(False, failed)
    window.readers |= others
    if failed:
        _let_go(api, opened)
        POOL.give_back(api, window)
        return None, DevicePaths(False, failed)
    devices = len({each.uuid for each in offers})
    reason = f"{len(offers)} ranks on {devices} device{'s' * (devices > 1)} read each other's memory"
    return DeviceWindows(api, window, c.place, opened), DevicePaths(True, reason)


def _why_not(c: Members, api: CudaApi | None) -> str:
    n = len(c.members)
    if api is None:
        return "it has passed an array of the host"
    if n < 2:
        return "the group has one member"
    if n > SOURCES_MAX:
        return f"the group has {n} members, and {SOURCES_MAX} at most read each other's devices"
    if len(set(c.hosts)) > 1:
        return "the group has members on several hosts"
    return why_no_ipc(api.facts())[:TEXT_MAX]


def _offer_of(api: CudaApi, window: _Window) -> WindowOffer:
    facts = api.facts()
    return WindowOffer(
        uuid=facts.uuid,
        name=facts.name[:TEXT_MAX],
        pci=facts.pci[:TEXT_MAX],
        memory=api.ipc_get_mem_handle(window.address),
    )


def _exchanged(c: Members, offer: WindowOffer, deadline_ns: int) -> list[WindowOffer]:
    """Return what all members offer; a malformed offer is one of nothing."""
    found: list[WindowOffer] = []
    for row in c.all_gather(encode_offer(offer), deadline_ns=deadline_ns):
        try:
            found.append(decode_offer(row.tobytes()))
        except RemoteProtocolError as error:
            found.append(WindowOffer(why=str(error)[:TEXT_MAX]))
    return found


def _first(offers: Sequence[WindowOffer]) -> str:
    """Why the first member that cannot do it cannot; "" if all can."""
    found = next(((place, each.why) for place, each in enumerate(offers) if each.why), None)
    return "" if found is None else f"rank {found[0]}: {found[1]}"


def _open(api: CudaApi, offers: Sequence[WindowOffer], place: int) -> tuple[dict[int, _There], str]:
    """Open the windows of the others; return them, and why one cannot be opened, "" if all are."""
    opened, facts = dict[int, _There](), api.facts()
    for other, offer in enumerate(offers):
        if other == place:
            continue
        theirs = DeviceFacts(
            index=0,
            uuid=offer.uuid,
            name=offer.name,
            memory_bytes=0,
            pci=offer.pci,
            unified_addressing=True,
            ipc_events=True,
            dma_buf=False,
        )
        device = api.device_of(offer.uuid)
        reaches = device is not None and (device == api.device or api.can_access_peer(device))
        choice = choose_copy_route(
            facts, theirs, same_host=True, visible=device is not None, can_access_peer=reaches
        )
        if choice.route not in (CopyRoute.SAME_DEVICE, CopyRoute.PEER) or device is None:
            return opened, f"rank {other} is out of its reach: {choice.reason}"
        try:
            base = api.ipc_open_mem_handle(offer.memory, device)
            opened[other] = _There(base, device)
            if api.address_range(base)[1] < WINDOW_BYTES:
                return opened, f"the window that rank {other} offers is too small"
        except CudaFault as error:
            return opened, f"the window of rank {other} cannot be opened: {error}"
    return opened, ""


def _let_go(api: CudaApi, opened: dict[int, _There]) -> None:
    with contextlib.suppress(CudaFault):
        for member in opened.values():
            api.ipc_close_mem_handle(member.address)


def encode_offer(offer: WindowOffer) -> NDArray[np.uint8]:
    """Return an offer as `OFFER_BYTES` bytes: its length, its encoding and zeros."""
    data = msgspec.msgpack.encode(offer)
    padded = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    return np.frombuffer(padded.ljust(OFFER_BYTES, b"\0"), np.uint8)


def decode_offer(data: bytes) -> WindowOffer:
    """Decode what a member of the group has sent. Raises `RemoteProtocolError`."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        return msgspec.msgpack.decode(data[_LENGTH_BYTES:][:length], type=WindowOffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"a member offers no window of its device: {error}") from None
