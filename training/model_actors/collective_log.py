"""Collectives inside a computation that may be repeated on this rank alone.

Along `tp`, a unit communicates while it is computed. If an actor fails, its rank computes the unit again, and
the others do not: so the results of the collectives that were done are taken from a log, and only those
behind them are done. The computation is a function of its inputs and these results; its bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.training.autograd.array_module import Array
from zbmd.training.model.tensor_parallel import TensorCollectives, TensorGroup

Log = list[Array]
"""The results of a computation's collectives, in order: copies, since results are overwritten."""


class Recorder:
    """Keeps the results of collectives in the log of the computation under way."""

    def __init__(self) -> None:
        self._log: Log | None = None
        self._at = 0

    def recording(self, log: Log, *, again: bool) -> Recorder:
        """Go on with the log of a computation inside a `with` of the result; `again`: from its beginning."""
        self._log, self._at = log, 0 if again else len(log)
        return self

    def __enter__(self) -> None:
        """Do nothing: `recording` has begun."""

    def __exit__(self, *_: object) -> None:
        """The computation is over."""
        self._log = None

    def once(self, call: Callable[[], Array], into: Array | None = None) -> Array:
        """Return the result of `call`, or what the log has of it; `into`: where an operation in place
        writes it."""
        log = self._log
        if log is None:
            return call()
        self._at += 1
        if self._at > len(log):
            result = call()
            log.append(result.copy())
            return result
        if into is None:
            return log[self._at - 1].copy()
        into[...] = log[self._at - 1]
        return into


class RecordedGroup:
    """`group`, whose results `recorder` keeps."""

    def __init__(self, group: TensorGroup, recorder: Recorder) -> None:
        self._group, self._recorder = group, recorder
        self.rank, self.size = group.rank, group.size
        self.blocking: TensorCollectives = _RecordedCollectives(recorder, group.blocking)

    def deadline_ns(self) -> int:
        """See `Group`."""
        return self._group.deadline_ns()

    def submit(self, operation: Callable[[Communicator], Array]) -> Future[Array]:
        """See `Group`; this one waits for the result, an array."""
        done = Future[Array]()
        done.set_result(self._recorder.once(lambda: self._group.submit(operation).result()))
        return done


class _RecordedCollectives:
    def __init__(self, recorder: Recorder, collectives: TensorCollectives) -> None:
        self._recorder, self._collectives = recorder, collectives

    def all_gather(self, x: Any) -> Any:
        return self._recorder.once(lambda: self._collectives.all_gather(x))

    def reduce_scatter(self, x: Any) -> Any:
        return self._recorder.once(lambda: self._collectives.reduce_scatter(x))

    def all_reduce(self, x: Any, *, op: str = "sum") -> Any:
        return self._recorder.once(lambda: self._collectives.all_reduce(x, op=op), into=x)
