from typing import Final

LOGICAL_BITS: Final[int]
STAMP_MAX: Final[int]
MAX_DRIFT_NS: Final[int]
"""Most by which a peer's stamp may be ahead of our wall clock and still be followed."""

class HybridClock:
    """The clock of one process. Pure: wall-clock time is an argument.

    `last` is the last stamp given; every stamp is greater than all those given or merged before it, also
    when the wall clock stands still or goes back. A stamp more than `max_drift_ns` ahead of the wall clock
    is not followed, as in the paper: one broken clock must not carry all others away, nor end a job. Such
    stamps are counted in `refused`, and the furthest is kept in `refused_ahead_ns_max`: their causality is
    lost until the hosts' clocks are synchronised.
    """

    last: int
    max_drift_ns: int
    refused: int
    refused_ahead_ns_max: int
    def __init__(self, *, max_drift_ns: int = ...) -> None: ...
    def tick(self, wall_ns: int) -> int:
        """Stamp a local event or a send at `wall_ns` (ns since 1970): a 64-bit stamp.

        Raises `LocalProtocolError` if `wall_ns` is no such time.
        """
    def merge(self, remote: int, wall_ns: int) -> int:
        """Stamp the receipt at `wall_ns` of a message stamped `remote`: greater than all of ours before it,
        and than `remote` unless that is refused.

        Raises `LocalProtocolError` if `wall_ns` is no time or `remote` does not fit into 64 bits.
        """
