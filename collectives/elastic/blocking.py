"""An elastic group's calls for threads that may wait, by way of the loop that its members are repaired on.

A plain group's `blocking` runs operations on the calling thread. Here the loop has a part in each of them: it
hears of deaths, and brings the group to the next view in the midst of an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from zbmd.collectives.communicator.blocking import OnLoop
from zbmd.collectives.device.arrays import called_here

if TYPE_CHECKING:
    from zbmd.collectives.elastic.group import ElasticGroup

P = ParamSpec("P")
T = TypeVar("T")


class ElasticBlocking:
    """`group.blocking`: the calls of `ElasticGroup` with the same arguments, results and errors.

    For any thread but the loop's, which must go on meanwhile; there they raise `LocalProtocolError`. They
    raise `OperationAborted` if the loop ends first.

    One thread's calls keep their order. Those of several threads, or of coroutines beside them, have no order
    among each other: who calls operations from more than one has all ranks make them in the same.
    """

    def __init__(self, group: ElasticGroup, on_loop: OnLoop) -> None:
        self.on_loop = on_loop
        self.all_reduce = self._waiting(group.all_reduce)
        self.all_reduce_many = self._waiting(group.all_reduce_many)
        self.reduce = self._waiting(group.reduce)
        self.reduce_scatter = self._waiting(group.reduce_scatter)
        self.reduce_scatter_v = self._waiting(group.reduce_scatter_v)
        self.all_gather = self._waiting(group.all_gather)
        self.all_gather_v = self._waiting(group.all_gather_v)
        self.gather = self._waiting(group.gather)
        self.scatter = self._waiting(group.scatter)
        self.all_to_all = self._waiting(group.all_to_all)
        self.all_to_all_v = self._waiting(group.all_to_all_v)
        self.broadcast = self._waiting(group.broadcast)
        self.barrier = self._waiting(group.barrier)
        self.refresh = self._waiting(group.refresh)
        self.split = self._waiting(group.split)
        self.subgroup = self._waiting(group.subgroup)
        self.send = self._waiting(group.send)
        self.recv = self._waiting(group.recv)

    def _waiting(self, call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        """`call`, begun on the loop, and waited for on the calling thread, whose arrays of devices it has."""

        @wraps(call)
        def blocking(*args: P.args, **kwargs: P.kwargs) -> T:
            there: Any = called_here(args, kwargs)
            return self.on_loop.wait_for(lambda: call(*there[0], **there[1]))

        return blocking
