"""Two actor systems in one process, joined by a real shared-memory link."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable

import pytest
from support.rdma.rdma_harness import rdma_link_pair
from support.rdma.rdma_world import given_devices

from zbmd.actors.contracts import fingerprints
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import ZbmdError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.shm.connect import Endpoint, link_pair

Join = Callable[[ActorSystem, ActorSystem], None]


def _endpoint(system: ActorSystem, limits: LinkLimits) -> Endpoint:
    identity = Identity(
        name=system.name,
        pid=os.getpid(),
        uid=os.getuid(),
        incarnation=system.incarnation,
        contracts=fingerprints(),
    )
    return Endpoint(identity=identity, cookie=bytes(32), limits=limits)


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    """One system, "rank0"."""
    made = ActorSystem("rank0")
    yield made
    await made.stop(timeout=0.2)


@pytest.fixture
async def other() -> AsyncIterator[ActorSystem]:
    """Another system, "rank1", not yet joined to the first."""
    made = ActorSystem("rank1")
    yield made
    await made.stop(timeout=0.2)


@pytest.fixture
def join() -> Callable[..., None]:
    """Join two systems of this process by a link with the limits given."""

    def attach(a: ActorSystem, b: ActorSystem, limits: LinkLimits | None = None) -> None:
        limits = limits or LinkLimits()
        to_b, to_a = link_pair(_endpoint(a, limits), _endpoint(b, limits))
        try:
            a.attach(to_b)
            b.attach(to_a)
        except ZbmdError:
            to_b.close()
            to_a.close()
            raise

    return attach


@pytest.fixture
async def pair(
    system: ActorSystem, other: ActorSystem, join: Join
) -> AsyncIterator[tuple[ActorSystem, ActorSystem]]:
    """The two, joined; over RDMA in a machine whose devices are given."""
    if not given_devices():
        join(system, other)
        yield system, other
        return
    limits = LinkLimits()
    async with rdma_link_pair(_endpoint(system, limits), _endpoint(other, limits)) as (to_other, to_system):
        system.attach(to_other)
        other.attach(to_system)
        yield system, other
        await system.stop(timeout=0.2)
        await other.stop(timeout=0.2)
