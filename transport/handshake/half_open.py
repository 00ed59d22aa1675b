"""Who may wait at the door: connections that have not proved themselves yet, and which of them goes first.

There are a bounded number of places. When all are taken and another connection knocks, the oldest connection
of the source that holds the most places loses its own: so a stranger who opens many and says nothing, or says
it slowly, drives out himself, and not a peer with one. A connection keeps its place for `fair_ns` in any
case, far longer than an honest hello takes; until then the next one waits in the kernel's queue. That keeps
a crowd of honest peers, all dialing at once, from driving each other out. Pure; time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit(Generic[KeyT]):
    """The next connection may be taken in, once `evict` has been closed, if it is given."""

    evict: KeyT | None = None
    source: str = ""
    """Of the evicted one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Take nobody in before `until_ns`, or before somebody has left."""

    until_ns: int


Decision: TypeAlias = Admit[KeyT] | Wait


class HalfOpen(Generic[KeyT]):
    """The connections under way, by key; each has a source, such as its address. places: how many at most."""

    def __init__(self, *, places: int, fair_ns: int) -> None:
        self._places = places
        self._fair_ns = fair_ns
        self._sources: dict[str, dict[KeyT, int]] = {}
        self._source_of: dict[KeyT, str] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._source_of

    @property
    def full(self) -> bool:
        """Whether the next one needs the place of another."""
        return len(self) >= self._places

    def decide(self, now_ns: int) -> Decision[KeyT]:
        """Whether one more can be taken in, and who goes for it; who goes has left by then."""
        if not self.full:
            return Admit()
        # Of equally crowded sources the one whose first connection is the oldest.
        source, keys = min(
            self._sources.items(), key=lambda item: (-len(item[1]), next(iter(item[1].values())))
        )
        key, since_ns = next(iter(keys.items()))
        if now_ns - since_ns < self._fair_ns:
            return Wait(until_ns=since_ns + self._fair_ns)
        self.leave(key)
        return Admit(evict=key, source=source)

    def enter(self, key: KeyT, source: str, now_ns: int) -> None:
        """A connection was taken in; after `decide` said so."""
        assert key not in self._source_of and not self.full
        self._source_of[key] = source
        self._sources.setdefault(source, {})[key] = now_ns

    def leave(self, key: KeyT) -> None:
        """Its hello is over, however. Idempotent."""
        source = self._source_of.pop(key, None)
        if source is not None:
            keys = self._sources[source]
            del keys[key]
            if not keys:
                del self._sources[source]

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the bound or the two views do not hold."""
        assert len(self) <= self._places
        by_source = {key: source for source, keys in self._sources.items() for key in keys}
        assert by_source == self._source_of
        assert all(self._sources.values()), "a source without a connection"
