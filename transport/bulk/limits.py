"""The parameters of a bulk connection: its bounds, its peer, and the callback for its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zbmd.transport.bulk.records import FRAGMENT_BYTES_MAX
from zbmd.transport.errors import LocalProtocolError, ZbmdError

OnEnded = Callable[[ZbmdError | None], None]
"""Called once when a connection has ended, with the error, or None after an orderly end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkLimits:
    """The bounds of the bulk connection with one peer."""

    transfers_max: int = 1 << 14
    """Our transfers that are not done; past it a new one raises `LinkFull`."""
    stripe_bytes_max: int = 1 << 20
    """With that much given to a stripe and not sent, it gets no further record."""
    fragment_bytes: int = 1 << 22
    """The longest fragment, if there are several stripes; if there is one, it is `FRAGMENT_BYTES_MAX`."""
    fragment_bytes_min: int = 1 << 18
    """Not cut smaller than that to give every stripe a part."""
    close_ns: int = 1_000_000_000
    """Longest time for an orderly end."""
    silent_ms: int = 1_000
    """A host that acknowledges nothing for so long is lost. One whose process does not read is not."""

    def __post_init__(self) -> None:
        if min(self.transfers_max, self.stripe_bytes_max, self.close_ns, self.silent_ms) < 1:
            raise LocalProtocolError("the bounds of a bulk connection must be positive")
        if not 0 < self.fragment_bytes_min <= self.fragment_bytes <= FRAGMENT_BYTES_MAX:
            raise LocalProtocolError(
                f"fragments of {self.fragment_bytes_min}..{self.fragment_bytes} bytes: must be positive, "
                f"in order and at most {FRAGMENT_BYTES_MAX}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkPeerInfo:
    """The peer of a bulk connection."""

    name: int | str
    """Names the peer in errors."""
    slot: int
    """Of the peer's cells and its bit of the lost mask in our segment."""
    incarnation: int
