"""The watch of a sampled step: it learns of each op that a tape records on its thread, and of its gradient.

A tape that is made while a watch is on is a `WatchedTape`; any other one has no part in it, so that a step
which is not sampled pays nothing for each op. Work outside tapes, such as the update, is watched by
`watched(…)`, which costs one read of a thread-local variable otherwise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zbmd.training.autograd.array_module import Array

if TYPE_CHECKING:
    from zbmd.training.autograd.tape import Parameter


@dataclass(frozen=True, slots=True)
class Kernel:
    """An op that no tape records: a node of a fused graph. unit: of the model; which: its pass."""

    op: str
    which: str
    unit: int
    shape: str
    dtype: str
    nbytes: int
    flops: int


class OpWatch(Protocol):
    """Receives the ops of a sampled step, on the thread that computes."""

    def begin(self) -> None:
        """An op may begin now: what lies before does not count for it."""

    def computed(
        self, unit: int, data: Array, backward: Callable[[Array], None], parameters: Sequence[Parameter]
    ) -> Callable[[Array], None]:
        """An op of `unit` has computed `data` since `begin`; return the rule to record for it."""
        ...

    def deferred(self, compute: Callable[[], None]) -> Callable[[], None]:
        """The rule that runs leaves `compute`, a parameter's gradient, for later; return what to call."""
        ...

    def work(self, op: str, arrays: Sequence[Array]) -> AbstractContextManager[None]:
        """Return the context of work outside a tape that reads or writes each of `arrays` once."""
        ...

    def kernel(self, one: Kernel) -> AbstractContextManager[None]:
        """Return the context of a call of an op that no tape records."""
        ...


class _OnThread(threading.local):
    watch: OpWatch | None = None


_on_thread = _OnThread()
_NO_WATCH = nullcontext()


def active_watch() -> OpWatch | None:
    """Return the watch that is on on this thread."""
    return _on_thread.watch


@contextlib.contextmanager
def watching(watch: OpWatch) -> Generator[None]:
    """Watch what this thread computes within the context."""
    with _watch_is(watch):
        yield


def unwatched() -> AbstractContextManager[None]:
    """Enter the result around what computes nothing, such as the trace of a graph."""
    return _watch_is(None)


@contextlib.contextmanager
def _watch_is(watch: OpWatch | None) -> Generator[None]:
    before, _on_thread.watch = _on_thread.watch, watch
    try:
        yield
    finally:
        _on_thread.watch = before


def watched(op: str, *arrays: Array) -> AbstractContextManager[None]:
    """Enter the result around work that reads or writes each of `arrays` once."""
    watch = _on_thread.watch
    return _NO_WATCH if watch is None else watch.work(op, arrays)
