"""A training loop that goes on over losses: how the process groups of this process behave meanwhile.

Outside of such a loop nothing differs: an operation with a lost rank raises. In the loop

- `Mode.TOGETHER` is a step: an operation that fails for a loss raises, and the loss is noted;
- `Mode.TAIL` is what follows the commit of a step, which is not repeated: an operation that fails there keeps
  the rank's own value, and warns;
- `Mode.ALONE` is what a replacement does until it has the state of the others: each operation is local. The
  results of the small ones that the others had before their loop are given again, in their order.

A thread of PyTorch that saves beside the loop (`dcp.async_save`) is in none of them: its operations are those
of all ranks. A replacement has no such thread, so after a loss those of survivors get no further.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from enum import Enum, IntEnum
from typing import Any, Final, NamedTuple
from weakref import ReferenceType, ref

import msgspec
import numpy as np

from zbmd.actors.view import RANKS_MAX
from zbmd.collectives.algorithms.shard_tree import whole_of
from zbmd.collectives.errors import MembersLost, OperationAborted
from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.tensors import bytes_over
from zbmd.transport.errors import LinkClosed, PeerLost, RemoteProtocolError, UserError, ZbmdError

torch: Any = importlib.import_module("torch")

RECORD_BYTES_MAX: Final = 1 << 20
"""The longest result that is kept; larger ones are state, which a replacement gets in other ways."""
RECORDS_BYTES_MAX: Final = 4 << 20
RECORDS_MAX: Final = 1_024
KEPT_BYTES_MAX: Final = 64 << 20
"""Of tensors that an operation in the tail may spoil, and that are copied before it."""

SAVERS: Final = "AsyncCheckpointExecutor"
"""The prefix of the names of PyTorch's threads that write a checkpoint beside a loop (`async_save`)."""

BESIDE: Final = "zbmd_beside"
"""The attribute of an error that a thread beside the loop got."""

LOSSES: Final = (PeerLost, OperationAborted, LinkClosed)
"""Errors of operations with a rank that is lost, or that has given up since another is."""


class Mode(Enum):
    """See the module."""

    TOGETHER = "together"
    TAIL = "tail"
    ALONE = "alone"


class Standing(IntEnum):
    """The part of a rank in a loop, as it says where ranks meet."""

    OUTSIDE = 0
    """It is in no loop: it has just been started, or its script initialises again by itself."""
    IN_LOOP = 1
    JOINING = 2
    """It replaces a rank of a loop, and has not its state yet."""


class Attending(NamedTuple):
    """The ranks of a view, by their places in it, that meet.

    parts: so many of them, the first ones, have a part afterwards. places: of those, and of the others that
    may have state. The rest are left over, and come to the next view.
    """

    parts: int
    places: tuple[int, ...]


class LoopLost(ZbmdError):
    """All ranks that had the state of the training loop are lost."""


class Recorded(msgspec.Struct, array_like=True, frozen=True):
    """The result of one operation: the group's name, the call's number there, its tensors."""

    group: str
    call: int
    tensors: list[bytes]


_records: Final = msgspec.msgpack.Decoder(list[Recorded])


def decode_records(data: bytes) -> list[Recorded]:
    """Decode what another rank has recorded. Raises `RemoteProtocolError`."""
    try:
        return _records.decode(data)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"the records of the operations before the loop: {error}") from None


class Continuity:
    """The part of this process. Used by the thread that trains; `note` and `record` by any."""

    def __init__(self) -> None:
        self._groups: list[ReferenceType[Any]] = []
        self._answering: list[Any] | None = None
        self._forbidden: list[str] | None = None
        self.mode = Mode.TOGETHER
        self.standing = Standing.OUTSIDE
        self.updates = False
        """Whether an optimizer updates after the commit: an operation could then fail on this rank alone."""
        self.broken: ZbmdError | None = None
        """The first loss of the epoch under way that an operation has met."""
        self.epoch = 0
        """The epoch of the process groups; 0: any."""
        self.replica = 0
        """The ranks of a replica of the state, if a loop goes on with whole ones alone; 0: with any ranks."""
        self.meeting: Group | None = None
        """The group of all that have met, if some of them have no part in the default group."""
        self._recorded: list[Recorded] = []
        self._left_bytes = RECORDS_BYTES_MAX
        self._answers: dict[tuple[str, int], list[bytes]] = {}
        self._tail_alone = False
        self._left_behind: list[threading.Thread] = []
        """Threads beside the loop that began before a loss, while they run."""
        self._closers: list[Callable[[], None]] = []
        self.store: Any = None
        """That of the last meeting of the job's ranks, which all of them have; None elsewhere."""

    # The process groups, in the order in which they were made.

    def add(self, group: Any) -> None:
        """Know a process group."""
        self._groups = [each for each in self._groups if each() is not None]
        self._groups.append(ref(group))

    @property
    def groups(self) -> list[Any]:
        """The process groups that are open."""
        found = [each() for each in self._groups]
        return [each for each in found if each is not None and not each.is_closed]

    # Meeting.

    def meet(self, group: Group, end_ns: int) -> Attending:
        """Tell the members of `group`, which is all ranks, whether this one is in a loop; return who is.

        A rank that is not, where others are, replaces one of it, or is left over. Raises `LoopLost`.
        """
        own = np.array([self.standing, self.replica], np.int64)
        told = group.submit(lambda c: c.all_gather(own, deadline_ns=end_ns)).result().reshape(-1, 2)
        rows = told[:, 0]
        attending = _attending(told)
        if Standing.IN_LOOP not in rows:
            if Standing.JOINING in rows:
                raise LoopLost(
                    "all ranks that had the state of the training loop are lost: start the run again, "
                    "from its last checkpoint"
                )
            return attending
        if Standing.OUTSIDE not in rows:
            return attending
        source = int(np.flatnonzero(rows == Standing.IN_LOOP)[0])
        said = msgspec.msgpack.encode(self._recorded) if group.rank == source else b""
        size = np.array([len(said)], np.int64)
        group.submit(lambda c: c.broadcast(size, source, deadline_ns=end_ns)).result()
        if not 0 < size[0] <= 2 * RECORDS_BYTES_MAX:
            raise RemoteProtocolError(f"a record of {size[0]} bytes; {2 * RECORDS_BYTES_MAX:,} are the bound")
        data = np.frombuffer(said, np.uint8).copy() if said else np.zeros(size[0], np.uint8)
        group.submit(lambda c: c.broadcast(data, source, deadline_ns=end_ns)).result()
        if self.standing is Standing.OUTSIDE and group.rank in attending.places:
            records = decode_records(data.tobytes())
            self.mode, self.standing, self._recorded = Mode.ALONE, Standing.JOINING, records
            self._answers = {(each.group, each.call): each.tensors for each in records}
        return attending

    def enter(self) -> None:
        """Be in the loop: further groups are refused, and nothing more is recorded."""
        self.standing, self._left_bytes = Standing.IN_LOOP, 0

    def together(self, epoch: int) -> None:
        """Go on with all others in the groups of this epoch."""
        self.mode, self.broken, self.epoch = Mode.TOGETHER, None, epoch
        self._answers.clear()

    def leave_behind(self) -> None:
        """The groups are to be made again: threads beside the loop that are at work get no further."""
        self._left_behind = [thread for thread in threading.enumerate() if _is_beside(thread)]

    def rehearse(self) -> None:
        """Make operations local until `end_rehearsal`."""
        self.mode = Mode.ALONE

    def end_rehearsal(self) -> None:
        """Operations are those of all ranks again."""
        self.mode = Mode.TOGETHER

    def begin_tail(self, *, alone: bool) -> None:
        """A step is committed. alone: the others have ended it already."""
        self.mode, self._tail_alone = Mode.TAIL, alone

    def end_tail(self) -> None:
        """A step has ended; a loss that its tail has met is still to be dealt with."""
        self.updates = False
        if self.mode is Mode.TAIL:
            self.mode, self._tail_alone = Mode.TOGETHER, False

    def at_leave(self, close: Callable[[], None]) -> None:
        """Call `close` when the loop ends with its process groups."""
        self._closers.append(close)

    def leave(self) -> None:
        """The default process group has ended, and with it any loop: losses are those of any script."""
        self.mode, self.standing, self.broken, self.epoch = Mode.TOGETHER, Standing.OUTSIDE, None, 0
        self._recorded, self._left_bytes, self._tail_alone = [], RECORDS_BYTES_MAX, False
        self.replica, self.meeting = 0, None
        self._answers.clear()
        self._left_behind.clear()
        while self._closers:
            self._closers.pop()()

    def require_groups(self) -> None:
        """Raise `UserError` if no process group may be made now."""
        if self.standing is Standing.IN_LOOP:
            raise UserError(
                "a process group is made in a resilient loop, and a replacement would not make it: make all "
                "groups before zbmd.torch.resilient()"
            )

    # Operations.

    def note(self, error: ZbmdError, epoch: int = 0) -> None:
        """Note the error of an operation of a group of `epoch`, 0: of now, if it is a loss."""
        if (
            isinstance(error, LOSSES)
            and self.broken is None
            and (epoch == self.epoch or 0 in (epoch, self.epoch))
        ):
            self.broken = error

    def lost(self, rank: int, epoch: int) -> None:
        """A rank of the job has ended in an epoch: end what backends beside ours do in the groups with it.

        Blocks until they are aborted. Groups without such backends hear of it in their own operations.
        """
        for group in self.groups:
            made, companions = group.made, group.companions
            if made is None or companions is None or made.epoch != epoch or rank not in made.members:
                continue  # the rank of a later epoch is its replacement
            error = MembersLost(
                (rank,),
                f"and the communicators of {', '.join(companions.wanted.values())} of {group.title} are "
                "aborted; wait for the next view, or destroy the process groups and initialise again",
            )
            self.note(error, epoch)
            companions.lost(error, epoch)

    @property
    def is_beside(self) -> bool:
        """Whether the calling thread works beside the loop, and in no step of it."""
        return self.standing is Standing.IN_LOOP and _is_beside(threading.current_thread())

    def _require_current(self) -> None:
        """Raise `OperationAborted` in a thread beside the loop that began before a loss."""
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if self.is_beside and threading.current_thread() in self._left_behind:
            raise OperationAborted(
                "a rank was lost since this save beside the loop began, and its replacement has no part in "
                "it: the save is lost; save again"
            )

    def is_of_a_loss(self, error: BaseException) -> bool:
        """Return whether an error follows from a loss; out of `backward()` its type and cause are gone.

        One that a thread beside the loop got does so while the loop has not dealt with the loss.
        """
        if not isinstance(error, Exception):
            return False  # the script ends, perhaps since this rank has met a loss and no others afterwards
        seen: set[int] = set()
        cause: BaseException | None = error
        while cause is not None and id(cause) not in seen and not getattr(cause, BESIDE, False):
            if isinstance(cause, LOSSES):
                self.note(cause)
                return True
            seen.add(id(cause))
            cause = cause.__cause__ or cause.__context__
        return self.broken is not None

    @property
    def is_usual(self) -> bool:
        """Whether operations are made with all others now, and one that fails fails."""
        together = self.mode is Mode.TOGETHER and self._answering is None and self._forbidden is None
        return together and not self._left_behind

    @property
    def is_alone(self) -> bool:
        """Whether operations are local now.

        Raises `UserError` where none is expected, and `OperationAborted` in a thread that is left behind.
        """
        if self._left_behind:
            self._require_current()
        if self.is_beside:
            return False
        if self._forbidden is not None:
            self._forbidden.append("an operation of torch.distributed")
            raise UserError("an operation of torch.distributed where none may be")
        if self.mode is Mode.TAIL:
            if self.updates:
                raise UserError(
                    "an optimizer communicates in step(): its update cannot be repeated without the others, "
                    "so have updates mirrored, by zbmd.torch.resilient(…, mirror=True)"
                )
            require_no_backward()
            return self._tail_alone or self.broken is not None
        return self.mode is Mode.ALONE or self._answering is not None

    def answer(self, group: str, call: int, outputs: Sequence[Any]) -> None:
        """After a local operation: give its tensors what the others had, if that is known."""
        if self._answering is not None:
            for tensor in outputs:
                tensor.copy_(self._answering.pop(0))
            return
        found = self._answers.get((group, call)) if self.mode is Mode.ALONE else None
        if found is None or [_nbytes(tensor) for tensor in outputs] != [len(each) for each in found]:
            return
        for tensor, data in zip(outputs, found, strict=True):
            if data:
                _fill(tensor, data)

    @contextmanager
    def answering(self, tensors: Sequence[Any]) -> Generator[None]:
        """Meanwhile operations are local, and their outputs become these, one after the other."""
        self._answering = list(tensors)
        try:
            yield
        finally:
            self._answering = None

    @contextmanager
    def forbidding(self) -> Generator[list[str]]:
        """Meanwhile operations raise `UserError`, and are noted in the list."""
        self._forbidden = found = list[str]()
        try:
            yield found
        finally:
            self._forbidden = None

    def record(self, group: str, call: int, outputs: Sequence[Any]) -> None:
        """Keep the result of an operation for replacements, if it is small and comes before the loop."""
        if self._left_bytes <= 0 or not outputs or self.standing is not Standing.OUTSIDE:
            return
        if any(tensor.layout is not torch.strided for tensor in outputs):
            return
        size = sum(map(_nbytes, outputs))
        if size > min(RECORD_BYTES_MAX, self._left_bytes):
            return
        self._left_bytes -= size if len(self._recorded) < RECORDS_MAX - 1 else self._left_bytes
        self._recorded.append(Recorded(group, call, [_bytes_of(tensor) for tensor in outputs]))

    def keep(self, outputs: Sequence[Any]) -> Callable[[ZbmdError, int], bool] | None:
        """Before an operation in the tail: return what is to be called if it fails; None elsewhere.

        That restores the tensors, and returns whether the operation is to be local.
        """
        if self.mode is not Mode.TAIL or self.is_beside:
            return None
        whole = sum(map(_nbytes, outputs)) <= KEPT_BYTES_MAX
        before = [tensor.detach().clone() for tensor in outputs] if whole else []

        def forgive(error: ZbmdError, epoch: int) -> bool:
            self.note(error, epoch)
            if not whole or not isinstance(error, LOSSES):
                return False
            with torch.inference_mode():
                for tensor, old in zip(outputs, before, strict=True):
                    tensor.detach().copy_(old)
            warnings.warn(
                f"after the commit of a step an operation met a loss, and keeps this rank's value: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return True

        return forgive


def _attending(told: Any) -> Attending:
    """Return who meets. told: of each rank its standing, and the ranks of a replica of its loop."""
    size = len(told)
    replicas = {int(replica) for standing, replica in told if standing == Standing.IN_LOOP}
    if len(replicas) > 1 or not all(0 <= each <= RANKS_MAX for each in replicas):
        raise RemoteProtocolError(f"replicas of {sorted(replicas)} ranks in one loop: expected one number")
    parts = whole_of(size, next(iter(replicas), 0))
    places = (each for each in range(size) if each < parts or told[each, 0] == Standing.IN_LOOP)
    return Attending(parts, tuple(places))


def _is_beside(thread: threading.Thread) -> bool:
    return thread.name.startswith(SAVERS)


def require_no_backward() -> None:
    """Raise `UserError` in a backward pass: after the commit of a step, gradients belong to the next."""
    if torch._C._current_graph_task_id() != -1:
        raise UserError(
            "a backward pass between optimizer.step() and the end of run.step(): one step has one update; "
            "put the other into a step of its own"
        )


def _nbytes(tensor: Any) -> int:
    size: int = tensor.numel() * tensor.element_size()
    return size


def _bytes_of(tensor: Any) -> bytes:
    return bytes_over(tensor.detach().contiguous().cpu()).tobytes()


def _fill(tensor: Any, data: bytes) -> None:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype)
    with torch.inference_mode():
        tensor.detach().copy_(flat.view(tensor.shape))


CONTINUITY: Final = Continuity()
"""Of this process."""
