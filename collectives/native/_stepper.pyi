from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.execution.plan import Run
from zbmd.collectives.native._program import NativeProgram

PUB_BYTES_MAX: Final[int]
DESCRIPTOR_HEADER_BYTES: Final[int]
COUNTER_MAX: Final[int]
STATUS_DONE: Final[int]
STATUS_LOST: Final[int]
STATUS_ABORTED: Final[int]
STATUS_DEADLINE: Final[int]
STATUS_DESYNCHRONISED: Final[int]
STATUS_BAD_DESCRIPTOR: Final[int]
STATUS_UNREADABLE: Final[int]

def let_siblings_read() -> int:
    """Have the kernel's Yama make an exception for what descends from our parent. Returns 0 or errno."""

def read_memory(pid: int, address: int, nbytes: int) -> bytes:
    """Bytes of a process's memory, as the kernel copies them. Raises OSError where it does not."""

class NativeGroup:
    """This process's end of a group: peers' mappings, notification counters, descriptors.

    `ranges` holds for each rank (base address, slot, offset of the inbox's end, bytes in the segment).
    The mappings must outlive the object. Not to be used by two threads at once, but for `abort`.
    """

    pc: int
    """The instruction at which the last run stood, -1 in the entry."""
    culprit: int
    """The first rank that called another operation, sent a bad descriptor or did not enter in time, or -1."""
    reads: bool
    """Whether the last run was by the program's `other`."""
    lags: bool
    """Whether there are members that the last run did not wait for (`RemoteGroup.may_lag`)."""
    met_ns: int
    """When all members had first entered since `meet_anew`, CLOCK_MONOTONIC; 0 if they have not, or if the
    program reads nothing but what is published, and ends as they meet."""

    def __init__(
        self,
        ranges: list[tuple[int, int, int, int]],
        *,
        rank: int,
        channel: int,
        epoch: int,
        identity: int,
        spins: int,
        yields: int = 0,
        mirrors: dict[int, int] | None = None,
    ) -> None:
        """spins: looks before a wait parks. yields: how often it looks so before that, and then lets others
        have the core.

        mirrors: for ranks whose base is 0, the address here at which they put their descriptors."""
    @property
    def reads_peers(self) -> bool:
        """Whether `read_peers` has been called."""
    def read_peers(self, pids: list[int]) -> None:
        """From now on `in` and `out` of any rank may lie outside of its segment: peers read them there.

        `pids`: the process of each rank. Once, and with all ranks on this host.
        """
    @property
    def sequence_number(self) -> int:
        """Operations begun in this epoch."""
    def meet_anew(self) -> None:
        """Forget `met_ns`."""
    def lost(self) -> list[int]:
        """The ranks that are known to be dead, and had not given up or closed the group before."""
    def abort(self) -> None:
        """End the running operation and all later ones; from any thread."""
    def give_up(self) -> None:
        """`abort`, and have every peer that waits for us, now or later, end its operation as aborted.

        Call it while no operation runs.
        """
    def let_go(self) -> None:
        """Forget the addresses of the peers' mappings, which may end now. A later run raises ValueError.

        Call it while no operation runs. `abort`, `give_up` and `lost` remain of use.
        """
    def header(self, rank: int) -> bytes:
        """The descriptor that `rank` entered the last operation with."""
    def always(self, way: int) -> None:
        """As the chooser, say this way whatever has been timed, -1: no longer. For tests and benchmarks."""
    def capacity_left(self, program: NativeProgram) -> int:
        """The runs of the program that fit before a counter of the epoch is used up."""
    def run(
        self,
        program: NativeProgram,
        run: Run,
        addresses: NDArray[np.uint64],
        scratch: NDArray[np.uint8],
        *,
        deadline_ns: int,
        kill_point: int,
    ) -> int:
        """Enter and run one operation without the GIL; returns a STATUS.

        `addresses`, 32 entries: where our buffers begin (`pub`: the input to publish, or 0), each as long as
        the program needs. Those that peers read must lie in our segment, but for `in` and `out` after
        `read_peers`. `scratch` holds the program's slots. `kill_point` k >= 0 ends this process by SIGKILL:
        0 before the entry, k in 1..n-1 before the k-th entry notification, n + i before instruction i,
        n + length after the last. An average is divided, and a 16-bit float rounded, when a reduction writes
        `out`. Raises ValueError on arguments out of bounds.
        """
