from typing import Final

import numpy as np
from numpy.typing import NDArray

class Timeline:
    """The programs of `n` ranks, walked in time by the stepper that native groups use too.

    codes: programs as `program.encode` makes them, with neighbours for ranks: int32 of shape
        (instructions, 12) with the columns peer, a rank and b rank as numbers of neighbours, -1 the own rank.
    which: int32 (n,): which of the codes a rank walks.
    first: int64 (n + 1,): where a rank's neighbours begin in `peers` and `back`, and where the last's end.
    peers: int32: the ranks that the neighbours are.
    back: int32: the number that a rank has among the neighbours of its neighbour.
    host, port: int32 (n,): the host of a rank, and its port to the network among `ports`.

    A chunk of `chunk_bytes` takes `near_ns_per_byte` within a host; between hosts it occupies the sender's
    port and then the receiver's for `far_ns_per_byte` each, `far_ns` apart. A notification comes after
    `near_ns` or `far_ns`; to post one, or a read, takes `post_ns`. Bytes read in own memory, or reduced,
    take `own_ns_per_byte`.

    As between hosts in production (`remote_walk.py`), what a program reads of other hosts up to its next wait
    is asked for at once, of what is to be reduced `reads_ahead` chunks; a put or notification waits until
    all that was asked for is here, and a copy needs nobody to be waited for. Raises ValueError on
    tables that do not fit.
    """

    steps: Final[int]
    """Instructions performed."""
    def __init__(
        self,
        codes: list[NDArray[np.int32]],
        which: NDArray[np.int32],
        first: NDArray[np.int64],
        peers: NDArray[np.int32],
        back: NDArray[np.int32],
        host: NDArray[np.int32],
        port: NDArray[np.int32],
        *,
        ports: int,
        near_ns: float,
        far_ns: float,
        post_ns: float,
        near_ns_per_byte: float,
        far_ns_per_byte: float,
        own_ns_per_byte: float,
        chunk_bytes: float,
        reads_ahead: int,
    ) -> None: ...
    def run(
        self, begin: NDArray[np.float64], dies: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """When each rank ends, ns (nan: never), and the bytes that left each port.

        A rank sets out at `begin` and does nothing after `dies` (inf: it lives). Once for each timeline.
        """
