"""etcd as the witness between two halves of a cluster: the driver of `WitnessMachine`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, assert_never

import msgspec

from zbmd.actors.bootstrap.etcd_client import EtcdClient, EtcdError, KeyValue, compare_revision, get, put
from zbmd.actors.bootstrap.etcd_url import WitnessRecord, read_record
from zbmd.actors.cluster.membership.witness import (
    EpochDecided,
    EpochWanted,
    Event,
    Read,
    RecordRead,
    RequestFailed,
    Swap,
    TieBreakerNamed,
    TieBreakRecord,
    WitnessMachine,
)
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

ASKING_MAX: Final = 4
"""Requests under way: one is, and those before it that were given up and not yet ended."""


class EtcdWitness:
    """Asks etcd who may go on. Use from the loop's thread, and `close` at the end.

    generation: of the cluster's founding, as `etcd_members` tells: a record of an earlier one counts as none.
    on_given: called with every answer.
    """

    def __init__(
        self,
        client: EtcdClient,
        me: NodeKey,
        *,
        generation: int,
        retry_ns: int,
        on_given: Callable[[TieBreakerNamed], None],
    ) -> None:
        self._client = client
        self._generation = generation
        self._machine = WitnessMachine(me, retry_ns=retry_ns)
        self._on_given = on_given
        self._asking: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def want(self, epoch: int) -> None:
        """Half of a view wants to agree on the view of `epoch`."""
        self._put(EpochWanted(epoch=epoch))

    def over(self, epoch: int) -> None:
        """The view of `epoch` is decided."""
        self._put(EpochDecided(epoch=epoch))

    async def close(self) -> None:
        """Ask nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)

    def _put(self, event: Event) -> None:
        for action in self._machine.handle(event, now_ns=time.monotonic_ns()):
            match action:
                case Read() | Swap():
                    self._begin(action)
                case SetTimer(at_ns=at_ns):
                    if self._timer is not None:
                        self._timer.cancel()
                    delay_s = max(0, at_ns - time.monotonic_ns()) / 1e9
                    self._timer = self._loop.call_later(delay_s, self._put, TimerFired())
                case TieBreakerNamed():
                    self._on_given(action)
                case _:
                    assert_never(action)
        self._machine.check_invariants()

    def _begin(self, request: Read | Swap) -> None:
        if len(self._asking) >= ASKING_MAX:
            self._loop.call_soon(
                self._put, RequestFailed(number=request.number, reason=f"{ASKING_MAX} requests are under way")
            )
            return
        task = self._loop.create_task(self._ask(request), name="etcd witness")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, request: Read | Swap) -> None:
        try:
            record = await (self._read() if isinstance(request, Read) else self._swap(request))
        except (EtcdError, RemoteProtocolError) as error:
            self._put(RequestFailed(number=request.number, reason=str(error)))
        else:
            self._put(RecordRead(number=request.number, record=record))

    async def _read(self) -> TieBreakRecord:
        key = self._client.url.witness_key
        return self._record((await self._client.transaction([], [get(key)])).found())

    async def _swap(self, swap: Swap) -> TieBreakRecord:
        key = self._client.url.witness_key
        record = WitnessRecord(
            generation=self._generation,
            epoch=swap.epoch,
            id=swap.holder.id,
            incarnation=swap.holder.incarnation,
        )
        written = put(key, msgspec.json.encode(record))
        outcome = await self._client.transaction(
            [compare_revision(key, swap.revision)], [written, get(key)], [get(key)]
        )
        return self._record(outcome.found())

    def _record(self, found: tuple[KeyValue, ...]) -> TieBreakRecord:
        for pair in found:
            record = read_record(pair.value, WitnessRecord)
            if record.generation > self._generation:
                raise EtcdError(
                    f"the witness serves founding {record.generation} of {self._client.url}, and no longer "
                    "ours"
                )
            if record.generation < self._generation:
                return TieBreakRecord(epoch=0, holder=None, revision=pair.mod_revision)
            return TieBreakRecord(
                epoch=record.epoch, holder=NodeKey(record.id, record.incarnation), revision=pair.mod_revision
            )
        return TieBreakRecord(epoch=0, holder=None, revision=0)
