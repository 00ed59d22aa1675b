"""etcd as the store of doors: who founds a cluster, and where its living members let others in.

Whoever finds no door there founds the cluster, by one transaction that fails if a door appears meanwhile. A
member has its door there under a lease, which it keeps alive; when the lease has ended, because the member or
the way to etcd was gone for its time to live, the member puts its door there again, unless the name was
founded anew meanwhile: then its cluster is `superseded`, and has to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog

from zbmd.actors.bootstrap.etcd_client import (
    EtcdClient,
    EtcdError,
    compare_none,
    compare_revision,
    get,
    put,
)
from zbmd.actors.bootstrap.etcd_url import ClusterRecord, DoorRecord, read_record
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.tcp.address import TcpAddress, parse_address

log: Final = structlog.stdlib.get_logger("zbmd.actors.bootstrap")

LEASE_S: Final = 10
BEATS_A_LEASE: Final = 4
FOUNDINGS_MAX: Final = 16
"""Attempts to found that may fail because others found and vanish meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the store says. doors: of living members, none if we are to found; generation: of the founding."""

    founds: bool
    generation: int
    doors: tuple[TcpAddress, ...]


class Superseded(EtcdError):
    """The cluster was founded anew under the same name while nobody of ours could reach the store."""


class EtcdDoors:
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
        return f"{self._client.url.doors_prefix}{self._address}"

    async def enter(self) -> Standing:
        """Found the cluster if it has no door, else tell its doors. Raises `EtcdError`.

        Our own former door, if it is still there, is none: whoever had it is gone, since the address is ours.
        """
        for _ in range(FOUNDINGS_MAX):
            doors = await self.doors()
            record, revision = await self._cluster()
            if doors:
                return Standing(founds=False, generation=record.generation, doors=doors)
            await self._client.delete(self._key)
            founded = ClusterRecord(generation=record.generation + 1, founder=self._name)
            url = self._client.url
            outcome = await self._client.transaction(
                [compare_none(url.doors_prefix), compare_revision(url.cluster_key, revision)],
                [
                    put(url.cluster_key, msgspec.json.encode(founded)),
                    await self._own_door(founded.generation),
                ],
            )
            if outcome.succeeded:
                return Standing(founds=True, generation=founded.generation, doors=())
        raise EtcdError(
            f"{FOUNDINGS_MAX} times others founded {self._client.url} meanwhile, and were gone again"
        )

    async def doors(self) -> tuple[TcpAddress, ...]:
        """The doors of other living members. What nobody of ours can have put there is left out, and told."""
        found: list[TcpAddress] = []
        for pair in await self._client.range(self._client.url.doors_prefix):
            try:
                door = parse_address(read_record(pair.value, DoorRecord).address)
            except (RemoteProtocolError, UserError) as error:
                log.warning("door in the store refused", key=pair.key[:128], reason=str(error))
                continue
            if door != self._address:
                found.append(door)
        return tuple(found)

    @asynccontextmanager
    async def kept(self, standing: Standing) -> AsyncGenerator[None]:
        """Keep our door in the store, as a member of that founding. Raises `EtcdError` if it cannot be."""
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
        """Say it when it changes."""
        if trouble and not self._trouble:
            log.warning("the store cannot be reached: nobody new finds us there", reason=trouble)
        elif self._trouble and not trouble:
            log.info("the store answers again")
        self._trouble = trouble

    async def _register(self, generation: int) -> None:
        for _ in range(FOUNDINGS_MAX):
            record, revision = await self._cluster()
            if record.generation != generation:
                raise Superseded(
                    f"{self._client.url} was founded anew by {record.founder} (founding {record.generation}, "
                    f"ours is {generation}) while no member of this cluster could reach the store"
                )
            outcome = await self._client.transaction(
                [compare_revision(self._client.url.cluster_key, revision)], [await self._own_door(generation)]
            )
            if outcome.succeeded:
                return
        raise EtcdError(f"{self._client.url} was founded anew {FOUNDINGS_MAX} times meanwhile")

    async def _own_door(self, generation: int) -> dict[str, Any]:
        if self._lease == 0 or not await self._client.keep_alive(self._lease):
            self._lease = await self._client.grant(LEASE_S)
        record = DoorRecord(name=self._name, address=str(self._address), generation=generation)
        return put(self._key, msgspec.json.encode(record), self._lease)

    async def _cluster(self) -> tuple[ClusterRecord, int]:
        """The record of the last founding, and its revision: 0 if there was none."""
        outcome = await self._client.transaction([], [get(self._client.url.cluster_key)])
        for pair in outcome.found():
            return read_record(pair.value, ClusterRecord), pair.mod_revision
        return ClusterRecord(generation=0, founder="nobody"), 0
