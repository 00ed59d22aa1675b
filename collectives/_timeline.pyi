from typing import Final

import numpy as np
from numpy.typing import NDArray

class Timeline:
    """The programs of `n` ranks, walked in time by the stepper that native groups use too.

    codes: programs as `program.encode` makes them, with neighbours for ranks: int32 of shape
        (instructions, 12) with the columns peer, a rank and b rank as numbers of neighbours, -1 the own rank.
    which: int32 (n,): which of the codes a rank walks.
    peers: int32 (n, width): the ranks that a rank's neighbours are; -1 for none.
    back: int32 (n, width): the number that a rank has among the neighbours of its neighbour.
    host, port: int32 (n,): the host of a rank, and its port to the network among `ports`.

    A chunk of `chunk_bytes` takes `near_ns_per_byte` within a host; between hosts it occupies the sender's
    port and then the receiver's for `far_ns_per_byte` each, `far_ns` apart. A notification comes after
    `near_ns` or `far_ns`; to post one, or a read, takes `post_ns`. Bytes read in own memory, or reduced,
    take `own_ns_per_byte`. Raises ValueError on tables that do not fit.
    """

    steps: Final[int]
    """Instructions performed."""
    def __init__(
        self,
        codes: list[NDArray[np.int32]],
        which: NDArray[np.int32],
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
    ) -> None: ...
    def run(
        self, begin: NDArray[np.float64], dies: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """When each rank ends, ns (nan: never), and the bytes that left each port.

        A rank sets out at `begin` and does nothing after `dies` (inf: it lives). Once for each timeline.
        """
