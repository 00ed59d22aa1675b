"""etcd as the store of a cluster's members (who founded it, where it can be joined), and as its witness.

A node that finds no member there founds the cluster, by one transaction that fails if a member appears
meanwhile. A member keeps its record under a lease. When the lease ends, because the member or the network
path to etcd was down for longer than its time to live, the member writes its record again, unless the name
was founded again meanwhile: then its cluster is `superseded` and has to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, assert_never

import msgspec
import structlog

from zbmd.actors.bootstrap.etcd_client import (
    ClusterRecord,
    EtcdClient,
    EtcdError,
    KeyValue,
    MemberRecord,
    WitnessRecord,
    compare_none,
    compare_revision,
    get,
    put,
    read_record,
)
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
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.tcp.address import TcpAddress, parse_address

log: Final = structlog.stdlib.get_logger("zbmd.actors.bootstrap")

LEASE_S: Final = 10
BEATS_A_LEASE: Final = 4
FOUNDINGS_MAX: Final = 16
"""Attempts to found that may fail because others found and vanish meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundingResult:
    """The state of the store. join_addresses: of live members; generation: of the founding."""

    founds: bool
    generation: int
    join_addresses: tuple[TcpAddress, ...]


class Superseded(EtcdError):
    """The cluster was founded again under its name while none of its members could reach the store."""


class EtcdMembers:
    """One node's use of the store.

    name: what people call it; address: where its links are dialed; on_superseded: called, once, with the
    reason.
    """

    def __init__(
        self, client: EtcdClient, *, name: str, address: TcpAddress, on_superseded: Callable[[str], None]
    ) -> None:
        self._client = client
        self._name = name
        self._address = address
        self._on_superseded = on_superseded
        self._lease = 0
        self._trouble = ""

    @property
    def _key(self) -> str:
        # By address, not by name: two nodes may have one name, but not one address.
        return f"{self._client.url.members_prefix}{self._address}"

    async def enter(self) -> FoundingResult:
        """Found the cluster if it has no member, else return its members' addresses. Raises `EtcdError`.

        An old record at our own address is ignored: whoever wrote it is gone, since the address is ours.
        """
        for _ in range(FOUNDINGS_MAX):
            join_addresses = await self.join_addresses()
            record, revision = await self._cluster()
            if join_addresses:
                return FoundingResult(
                    founds=False, generation=record.generation, join_addresses=join_addresses
                )
            await self._client.delete(self._key)
            founded = ClusterRecord(generation=record.generation + 1, founder=self._name)
            url = self._client.url
            outcome = await self._client.transaction(
                [compare_none(url.members_prefix), compare_revision(url.cluster_key, revision)],
                [
                    put(url.cluster_key, msgspec.json.encode(founded)),
                    await self._own_record(founded.generation),
                ],
            )
            if outcome.succeeded:
                return FoundingResult(founds=True, generation=founded.generation, join_addresses=())
        raise EtcdError(
            f"{FOUNDINGS_MAX} times others founded {self._client.url} meanwhile, and were gone again"
        )

    async def join_addresses(self) -> tuple[TcpAddress, ...]:
        """Return the addresses of other live members. Invalid records are skipped and logged."""
        found: list[TcpAddress] = []
        for pair in await self._client.range(self._client.url.members_prefix):
            try:
                join_address = parse_address(read_record(pair.value, MemberRecord).address)
            except (RemoteProtocolError, UserError) as error:
                log.warning(
                    "ignored an invalid member record in the store", key=pair.key[:128], reason=str(error)
                )
                continue
            if join_address != self._address:
                found.append(join_address)
        return tuple(found)

    @asynccontextmanager
    async def kept(self, standing: FoundingResult) -> AsyncGenerator[None]:
        """Keep our record in the store while in this context. Raises `EtcdError` if it cannot be written."""
        await self._register(standing.generation)
        keeping = asyncio.get_running_loop().create_task(self._keep(standing.generation), name="etcd lease")
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            with contextlib.suppress(EtcdError):  # then it goes when its lease ends
                await self._client.revoke(self._lease)

    async def _keep(self, generation: int) -> None:
        while True:
            await asyncio.sleep(LEASE_S / BEATS_A_LEASE)
            try:
                if not await self._client.keep_alive(self._lease):
                    self._lease = 0
                    await self._register(generation)
                self._tell("")
            except Superseded as error:
                self._on_superseded(str(error))
                return
            except EtcdError as error:
                self._tell(str(error))

    def _tell(self, trouble: str) -> None:
        """Log the state of the store when it changes."""
        if trouble and not self._trouble:
            log.warning("the store cannot be reached: new nodes cannot find this member", reason=trouble)
        elif self._trouble and not trouble:
            log.info("the store answers again")
        self._trouble = trouble

    async def _register(self, generation: int) -> None:
        for _ in range(FOUNDINGS_MAX):
            record, revision = await self._cluster()
            if record.generation != generation:
                raise Superseded(
                    f"{self._client.url} was founded again by {record.founder} (founding "
                    f"{record.generation}, ours is {generation}) while no member of this cluster could reach "
                    "the store"
                )
            outcome = await self._client.transaction(
                [compare_revision(self._client.url.cluster_key, revision)],
                [await self._own_record(generation)],
            )
            if outcome.succeeded:
                return
        raise EtcdError(f"{self._client.url} was founded again {FOUNDINGS_MAX} times meanwhile")

    async def _own_record(self, generation: int) -> dict[str, Any]:
        if self._lease == 0 or not await self._client.keep_alive(self._lease):
            self._lease = await self._client.grant(LEASE_S)
        record = MemberRecord(name=self._name, address=str(self._address), generation=generation)
        return put(self._key, msgspec.json.encode(record), self._lease)

    async def _cluster(self) -> tuple[ClusterRecord, int]:
        """The record of the last founding, and its revision: 0 if there was none."""
        outcome = await self._client.transaction([], [get(self._client.url.cluster_key)])
        for pair in outcome.found():
            return read_record(pair.value, ClusterRecord), pair.mod_revision
        return ClusterRecord(generation=0, founder="nobody"), 0


# --- the witness between two halves of a cluster: the driver of `WitnessMachine` ------------------------


ASKING_MAX: Final = 4
"""Requests under way: one is, and those before it that were given up and not yet ended."""


class EtcdWitness:
    """Asks etcd who may go on. Use from the loop's thread, and `close` at the end.

    generation: of the cluster's founding, as `etcd_store` tells: a record of an earlier one counts as none.
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
