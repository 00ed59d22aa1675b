import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.execution.plan import Run
from zbmd.collectives.native._program import NativeProgram
from zbmd.collectives.native._stepper import NativeGroup

class RemoteGroup(NativeGroup):
    """A group with members on other hosts, whose base is 0: the run of `NativeGroup`, a phase at a time.

    The caller transfers what a phase needs of such a member, by its `RemoteMemory`.
    """

    wide: bool
    """Whether the running operation's descriptors lie in slots, not in mirrors: their payload is large."""

    may_lag: bool
    """From now on an eager run waits for those alone whose input it reads; the same on all ranks.

    The next run waits first (`catch_up`) for those that this one did not wait for.
    """
    def widen(self, addresses: list[int], slot_bytes: int) -> None:
        """From now on an eager run may carry `slot_bytes` less its header of each rank.

        `addresses`: here, of the two slots of each rank, by place. A slot's memory is the caller's to keep.
        """
    def slots_of(self, rank: int) -> int:
        """Where `rank` says that its slots begin, bytes in its segment; 0 if it has none. After a `meet`."""
    def begin(
        self,
        program: NativeProgram,
        run: Run,
        addresses: NDArray[np.uint64],
        scratch: NDArray[np.uint8],
    ) -> None:
        """Publish the descriptor of the next operation in our segment. Arguments and errors: see `run`."""
    def resume(self, program: NativeProgram) -> None:
        """As `begin`, of a run that a fast path has filled in."""
    def own_extent(self, program: NativeProgram, buffer: int) -> tuple[int, int]:
        """Offset in our segment and bytes of one of our buffers, as our descriptor tells it."""
    def extent(self, program: NativeProgram, rank: int, buffer: int) -> tuple[int, int]:
        """The same of a peer, once `meet` has found it to be within its segment."""
    def descriptor(self, program: NativeProgram) -> bytes:
        """Our descriptor, for the others: its header, and behind it, but of a wide run, what it publishes."""
    def published_extent(self, program: NativeProgram, first: int, end: int) -> tuple[int, int]:
        """Offset and bytes of chunks first..end-1 in what the running operation publishes of us."""
    def input_part(self, at: int, nbytes: int) -> memoryview:
        """Bytes of what it publishes, where the caller has them. It keeps nothing alive."""
    def keep_input(self, at: int, nbytes: int) -> None:
        """Copy those bytes behind our descriptor, in our own slot, which holds them until the one after next.

        Of a wide run: no others are there, unless the run overwrites its own input. Twice is once.
        """
    @property
    def descriptor_offset(self) -> int:
        """Its offset in a mirror, or from the first of our slots."""
    @property
    def word(self) -> int:
        """The word that only the running operation has; it stands first in a descriptor."""
    @property
    def lost_mask(self) -> int:
        """The bits of the other members in a lost mask."""
    def tell(self, peer: int) -> int:
        """Notify `peer`, return 0; if it is on another host, count it and return what to set its cell to."""
    def all_are_here(self) -> bool:
        """Whether `meet` would not wait: all that it waits for have entered, or something has ended that."""
    def has_caught_up(self) -> bool:
        """The same of `catch_up`."""
    def catch_up(self, deadline_ns: int) -> int:
        """Wait until those have entered the last run that it did not wait for, and check that they called the
        same; returns a STATUS. Comes before `begin`, if the group `lags`.
        """
    def has_closed(self, rank: int) -> bool:
        """Whether the rank has given up or closed the group: it is owed nothing, and reads nothing more."""
    def has_told(self, peer: int, count: int) -> bool:
        """The same of `wait`."""
    @property
    def over(self) -> bool:
        """Whether a member is lost, or the group aborted."""
    def meet(self, program: NativeProgram, deadline_ns: int) -> int:
        """Wait until all that are needed have entered and check that they called the same; a STATUS."""
    def walk(self, program: NativeProgram, kill_point: int, deadline_ns: int) -> int:
        """Walk a program that neither tells nor reads anybody but by descriptors; returns a STATUS."""
    def wait(self, peer: int, count: int, deadline_ns: int) -> int:
        """Wait until `peer` has notified us `count` times in this operation; returns a STATUS."""
    def at(self, pc: int) -> None:
        """The walk has come to this instruction."""
    def place(self, program: NativeProgram, index: int) -> tuple[int, int, int, int]:
        """The operands of put, reduce or copy `index`: (dst, a, b or 0, elements).

        Addresses; but in a buffer of a member on another host, `pub` apart, bytes from its beginning.
        """
    def perform(self, program: NativeProgram, rows: NDArray[np.uint64], length: int) -> int:
        """Do the first `length` of `rows` (dst, a, b, elements, index of the instruction) without the GIL.

        Returns STATUS_ABORTED if the group is aborted meanwhile, else STATUS_DONE. The addresses are trusted.
        """
    def window(self, address: int, nbytes: int) -> memoryview:
        """Memory of ours that `place` has named, writable. It keeps nothing alive."""
    def finish(self, program: NativeProgram) -> int:
        """Count what the walked program has waited for, and have the last look at all descriptors."""
    def withdraw(self) -> None:
        """Tell those who share memory with us that we have given the operation up."""
    def die(self) -> None:
        """Fault injection: SIGKILL."""
