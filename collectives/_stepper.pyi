from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCKED: Final[int]
DONE: Final[int]
PUB_BYTES_MAX: Final[int]
DESCRIPTOR_HEADER_BYTES: Final[int]
COUNTER_MAX: Final[int]
STATUS_DONE: Final[int]
STATUS_LOST: Final[int]
STATUS_ABORTED: Final[int]
STATUS_DEADLINE: Final[int]
STATUS_DESYNCHRONISED: Final[int]
STATUS_BAD_DESCRIPTOR: Final[int]

class Stepper:
    """Walks one encoded program (`program.encode`). Raises ValueError on a malformed encoding."""

    pc: int
    def __init__(self, encoding: NDArray[np.int32]) -> None: ...
    def next(self, received: NDArray[np.uint64]) -> int:
        """The index of the instruction that may fire, or BLOCKED (at a wait), or DONE.

        `received`, 64 entries: the notifications of each rank since the program began.
        """
    def advance(self) -> None:
        """The instruction has been performed."""

class NativeProgram:
    """One rank's program, every operand checked once. Raises ValueError on one that is out of bounds."""

    def __init__(
        self,
        encoding: NDArray[np.int32],
        *,
        n: int,
        rank: int,
        blocks: int,
        chunks: int,
        scratch_slots: int,
        inbox_slots: int,
        eager: bool,
        plan: int,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def kill_points(self) -> int:
        """How many points of an operation `NativeGroup.run` can be killed at: 0..kill_points-1."""

class NativeGroup:
    """This process's end of a group: peers' mappings, notification counters, descriptors.

    `ranges` holds for each rank (base address, slot, offset of the inbox's end, bytes in the segment).
    The mappings must outlive the object. Not to be used by two threads at once, but for `abort`.
    """

    pc: int
    """The instruction at which the last run stood, -1 in the entry."""
    culprit: int
    """The first rank that called another operation or sent a bad descriptor, or -1."""

    def __init__(
        self,
        ranges: list[tuple[int, int, int, int]],
        *,
        rank: int,
        channel: int,
        epoch: int,
        identity: int,
        spins: int,
        mirrors: dict[int, int] | None = None,
    ) -> None:
        """mirrors: for ranks whose base is 0, the address here at which they put their descriptors."""
    @property
    def sequence_number(self) -> int:
        """Operations begun in this epoch."""
    def lost(self) -> list[int]:
        """The ranks that are known to be dead."""
    def abort(self) -> None:
        """End the running operation and all later ones; from any thread."""
    def give_up(self) -> None:
        """`abort`, and have every peer that waits for us, now or later, end its operation as aborted.

        Call it while no operation runs.
        """
    def header(self, rank: int) -> bytes:
        """The descriptor that `rank` entered the last operation with."""
    def capacity_left(self, program: NativeProgram) -> int:
        """How often the program can run before a counter of the epoch is used up."""
    def run(
        self,
        program: NativeProgram,
        addresses: NDArray[np.uint64],
        *,
        operation: int,
        dtype: int,
        reduction: int,
        root: int,
        count: int,
        total: int,
        piece: int,
        in_stride: int,
        out_stride: int,
        scratch: int,
        scratch_bytes: int,
        deadline_ns: int,
        kill_point: int,
    ) -> int:
        """Enter and run one operation without the GIL; returns a STATUS.

        `addresses`, 32 entries: where our buffers begin (`pub`: the input to publish, or 0), each as
        long as the program needs. Those that peers read must lie in our segment. `count` and the strides
        are in elements. `kill_point` k >= 0 ends this process by SIGKILL: 0 before the entry, k in
        1..n-1 before the k-th entry notification, n + i before instruction i, n + length after the
        last. Raises ValueError on arguments out of bounds.
        """

class RemoteGroup(NativeGroup):
    """A group with members on other hosts, whose base is 0: the run of `NativeGroup`, a phase at a time.

    What a phase needs of such a member goes through its `RemoteMemory`, which is its caller's to do.
    """

    def begin(
        self,
        program: NativeProgram,
        addresses: NDArray[np.uint64],
        *,
        operation: int,
        dtype: int,
        reduction: int,
        root: int,
        count: int,
        total: int,
        piece: int,
        in_stride: int,
        out_stride: int,
        scratch: int,
        scratch_bytes: int,
    ) -> None:
        """Publish the descriptor of the next operation in our segment. Arguments and errors: see `run`."""
    def own_extent(self, program: NativeProgram, buffer: int) -> tuple[int, int]:
        """Offset in our segment and bytes of one of our buffers, as our descriptor tells it."""
    def extent(self, program: NativeProgram, rank: int, buffer: int) -> tuple[int, int]:
        """The same of a peer, once `meet` has found it to be within its segment."""
    def descriptor(self, program: NativeProgram) -> bytes:
        """Our descriptor, for the mirrors of others."""
    @property
    def descriptor_offset(self) -> int:
        """Where it belongs in a mirror."""
    @property
    def word(self) -> int:
        """What tells the running operation from all others; it stands first in a descriptor."""
    @property
    def lost_mask(self) -> int:
        """The bits of the other members in a lost mask."""
    def tell(self, peer: int) -> int:
        """Notify `peer` and return 0; if it is on another host, count it and return what to set its cell to."""
    def meet(self, program: NativeProgram, deadline_ns: int) -> int:
        """Wait until all have entered and check that all called the same; returns a STATUS."""
    def walk(self, program: NativeProgram, kill_point: int, deadline_ns: int) -> int:
        """Walk a program that neither tells nor reads anybody but by descriptors; returns a STATUS."""
    def wait(self, peer: int, count: int, deadline_ns: int) -> int:
        """Wait until `peer` has notified us `count` times in this operation; returns a STATUS."""
    def at(self, pc: int) -> None:
        """The walk has come to this instruction."""
    def place(self, program: NativeProgram, index: int) -> tuple[int, int, int, int]:
        """Where put, reduce or copy `index` has its operands: (dst, a, b or 0, elements).

        Addresses; but in a buffer of a member on another host, `pub` apart, bytes from its beginning.
        """
    def perform(self, rows: NDArray[np.uint64], length: int) -> int:
        """Do the first `length` of `rows` (dst, a, b or 0 for a copy, elements) without the GIL.

        Returns STATUS_ABORTED if the group is aborted meanwhile, else STATUS_DONE. The addresses are trusted.
        """
    def window(self, address: int, nbytes: int) -> memoryview:
        """Memory of ours that `place` has named, writable. It keeps nothing alive."""
    def finish(self, program: NativeProgram) -> int:
        """Count what the walked program has waited for, and have the last look at all descriptors."""
    def check(self) -> int:
        """STATUS_ABORTED if a member has given the operation up, else STATUS_DONE."""
    def withdraw(self) -> None:
        """Tell those who share memory with us that we have given the operation up."""
    def die(self) -> None:
        """Fault injection: SIGKILL."""
