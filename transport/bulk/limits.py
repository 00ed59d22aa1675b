"""The bounds of a bulk connection."""

from __future__ import annotations

from dataclasses import dataclass

from zbmd.transport.bulk.records import STRIPE_BYTES_MAX
from zbmd.transport.errors import LocalProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkLimits:
    """The bounds of the bulk connection with one peer."""

    transfers_max: int = 1 << 14
    """Our transfers that are not done; past it a new one raises `LinkFull`."""
    lane_bytes_max: int = 1 << 20
    """With that much given to a lane and not sent, it gets no further record."""
    stripe_bytes: int = 1 << 22
    """The longest stripe, if there are several lanes; if there is one, it is `STRIPE_BYTES_MAX`."""
    stripe_bytes_min: int = 1 << 18
    """Not cut smaller than that to give every lane a part."""
    close_ns: int = 1_000_000_000
    """How long an orderly end may take."""
    silent_ms: int = 1_000
    """A host that acknowledges nothing for so long is lost. One whose process does not read is not."""

    def __post_init__(self) -> None:
        if min(self.transfers_max, self.lane_bytes_max, self.close_ns, self.silent_ms) < 1:
            raise LocalProtocolError("the bounds of a bulk connection must be positive")
        if not 0 < self.stripe_bytes_min <= self.stripe_bytes <= STRIPE_BYTES_MAX:
            raise LocalProtocolError(
                f"stripes of {self.stripe_bytes_min}..{self.stripe_bytes} bytes; {STRIPE_BYTES_MAX} at most"
            )
