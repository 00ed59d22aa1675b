"""What a part of a model needs of the group that it is divided over: a `zbmd.Group`, or a wrapper of one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from zbmd.collectives.communicator.communicator import Communicator


class TensorCollectives(Protocol):
    """The collectives of units, for a thread that may wait; see `zbmd.Group`."""

    def all_gather(self, x: Any, /) -> Any:
        """Return all members' arrays, in rank order."""
        ...

    def reduce_scatter(self, x: Any, /) -> Any:
        """Return this member's part of the sum."""
        ...

    def all_reduce(self, x: Any, /, *, op: str = "sum") -> Any:
        """Reduce in place, and return the array."""
        ...


class TensorGroup(Protocol):
    """The group along `tp`."""

    @property
    def rank(self) -> int:
        """Return this member's place."""
        ...

    @property
    def size(self) -> int:
        """Return the number of members."""
        ...

    @property
    def blocking(self) -> TensorCollectives:
        """Return the collectives."""
        ...

    def deadline_ns(self) -> int:
        """Return when an operation that begins now is to be over."""
        ...

    def submit(self, operation: Callable[[Communicator], Any], /) -> Future[Any]:
        """Run `operation` on the group's thread."""
        ...
