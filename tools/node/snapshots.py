"""What a look into processes yields, from wherever it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from zbmd.actors.hangs.introspection import InsideReply

ASK_S: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look: what each process of a host told, and which did not answer. at_s: monotonic."""

    address: str
    target: str
    replies: tuple[InsideReply, ...]
    silent: tuple[str, ...]
    at_s: float


class Source(Protocol):
    """Where looks come from."""

    async def looks(self, *, busiest: bool) -> list[Look]:
        """One look at each host. Raises `ZbmdError` if nobody can be asked."""
        ...

    async def close(self) -> None:
        """Give the line back."""
        ...
