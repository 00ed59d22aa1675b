"""Parts that a process's elastic groups share: its views, their splits, and simulated meshes under kills."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

import zbmd
from zbmd.actors.view import MemberId
from zbmd.collectives.elastic import views_machine as vm
from zbmd.collectives.errors import Desynchronised, OperationAborted
from zbmd.collectives.programs.channels import (
    FAR_SUBGROUPS_MAX,
    SUBGROUP_CHANNEL_FIRST,
    SUBGROUPS_MAX,
    Channels,
    Offer,
)
from zbmd.collectives.repair.splits import (
    Split,
    SplitLedger,
    SplitRequest,
    SplitsReply,
    agree_on,
    check_repeated,
    row_of,
)
from zbmd.collectives.scenarios.hosted_job import JobOptions
from zbmd.collectives.scenarios.subgroups import SubgroupsScenario, build
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, UserError

FRESH = random.SystemRandom().randrange(2**32)
FREE = Offer(free=(1 << SUBGROUPS_MAX) - 1, used=(0,) * SUBGROUPS_MAX)


def members(*ranks: int, incarnation: int = 1) -> tuple[MemberId, ...]:
    return tuple(MemberId(rank=rank, incarnation=incarnation) for rank in ranks)


@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_meshes_under_seeded_kills(world_size: int) -> None:
    print(f"fresh seeds from {FRESH}")
    for index in range(12):
        options = JobOptions(world_size=world_size, steps=2, kills=index % 4, shrink=index % 5 == 0)
        mesh = SubgroupsScenario().run(FRESH + index, options)
        assert not mesh.state_lost or options.kills >= world_size
        assert mesh.state_lost or mesh.parts["all"].returned or mesh.parts["all"].raised


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_job_that_loses_all_of_its_ranks_is_over_only_if_nobody_is_brought_back(
    world_size: int, shrink: bool
) -> None:
    options = JobOptions(world_size=world_size, steps=2, shrink=shrink)
    simulation, mesh = build(79481152938509, options)
    simulation.run(until=lambda: bool(mesh.parts["all"].returned or mesh.parts["all"].raised))
    for rank in range(world_size):
        simulation.crash(f"rank{rank}")
    assert not SubgroupsScenario().is_over(simulation, mesh), "the node does not know yet"
    simulation.run()
    assert SubgroupsScenario().is_over(simulation, mesh)
    assert mesh.state_lost == shrink
    finished = mesh.parts["all"].finished
    assert finished == (set() if shrink else set(range(world_size)))


def test_a_view_is_entered_once_those_who_lose_a_member_have_drained() -> None:
    machine = vm.ViewsMachine()
    for group, ranks in enumerate(((0, 1, 2, 3), (0, 1), (0, 2))):
        entered = vm.GroupEntered(group=group, members=members(*ranks), ranks=ranks)
        assert machine.handle(entered, now_ns=0) == []
    back = members(1, incarnation=2)
    ready = vm.ViewReady(epoch=2, members=(*members(0), *back, *members(2, 3)), kept=members(0, 2, 3))
    assert machine.handle(ready, now_ns=0) == [vm.Cut(group=0), vm.Cut(group=1)]
    with pytest.raises(LocalProtocolError, match="cannot follow"):
        machine.handle(replace(ready, epoch=3), now_ns=0)
    assert machine.handle(vm.Drained(group=1), now_ns=0) == []
    # One that comes to be with the dead meanwhile is cut as well.
    late = vm.GroupEntered(group=3, members=members(0, 1, 3))
    assert machine.handle(late, now_ns=0) == [vm.Cut(group=3)]
    assert machine.handle(vm.GroupClosed(group=3), now_ns=0) == []
    machine.check_invariants()
    follows = [vm.Follow(group=group, epoch=2) for group in (0, 1)]
    assert machine.handle(vm.Drained(group=0), now_ns=0) == [vm.Enter(epoch=2), *follows]
    machine.check_invariants()


def test_a_single_group_follows_by_its_next_operation_and_others_a_rank_that_comes_back() -> None:
    machine = vm.ViewsMachine()
    machine.handle(vm.GroupEntered(group=1, members=members(0, 1)), now_ns=0)
    dropped = vm.ViewReady(epoch=2, members=members(0), kept=members(0))
    assert machine.handle(dropped, now_ns=0) == [vm.Cut(group=1)]
    assert machine.handle(vm.Drained(group=1), now_ns=0) == [vm.Enter(epoch=2)]
    machine.handle(vm.GroupEntered(group=1, members=members(0)), now_ns=0)
    machine.handle(vm.GroupEntered(group=2, members=members(0), ranks=(0, 5)), now_ns=0)
    grown = vm.ViewReady(epoch=3, members=members(0, 1, 4), kept=members(0))
    assert machine.handle(grown, now_ns=0) == [vm.Enter(epoch=3), vm.Follow(group=1, epoch=3)]
    more = vm.ViewReady(epoch=4, members=members(0, 4, 5), kept=members(0, 4))
    assert machine.handle(more, now_ns=0) == [vm.Enter(epoch=4), vm.Follow(group=2, epoch=4)]


def agreed(requests: dict[int, SplitRequest], offers: dict[int, Offer] | None = None) -> Split:
    rows = np.stack([row_of(request, (offers or {}).get(rank, FREE)) for rank, request in requests.items()])
    return agree_on(next(iter(requests.values())), rows, tuple(requests))


def test_members_agree_on_parts_their_order_and_channels() -> None:
    requests = {rank: SplitRequest(color=rank % 2, key=-rank) for rank in range(4)} | {
        4: SplitRequest(color=None)
    }
    used = [0] * SUBGROUPS_MAX
    used[1], used[2] = 7, 9
    busy = Offer(free=FREE.free & ~1, used=tuple(used))
    split = agreed(requests, {2: busy})
    assert (split.channel, split.mend, split.base) == (
        SUBGROUP_CHANNEL_FIRST + 1,
        SUBGROUP_CHANNEL_FIRST + 2,
        9,
    )
    assert [split.ranks_with(rank) for rank in range(5)] == [(2, 0), (3, 1), (2, 0), (3, 1), ()]
    some = agreed({0: SplitRequest(color=0, ranks=(3, 0)), 1: SplitRequest(color=None, ranks=(3, 0))})
    assert some.ranks_with(3) == (3, 0) and some.ranks_with(1) == ()
    with pytest.raises(Desynchronised, match="different ranks"):
        agreed({0: SplitRequest(color=0, ranks=(3, 0)), 1: SplitRequest(color=None, ranks=(0, 3))})
    with pytest.raises(LocalProtocolError, match="close one"):
        agreed(requests, {3: Offer(free=1, used=FREE.used)})
    with pytest.raises(UserError, match="out of bounds"):
        row_of(SplitRequest(color=2**70), FREE)


def test_who_comes_later_is_told_and_must_ask_for_the_same() -> None:
    split = agreed({rank: SplitRequest(color=rank % 2) for rank in range(4)})
    ledger = SplitLedger()
    closed = msgspec.structs.replace(split, closed=True)
    ledger.learn({0: SplitsReply(splits=(closed, split)), 3: SplitsReply(splits=(split, split))}, rank=1)
    assert ledger.splits == [split, split], "rank 0 has closed its part, which is not rank 1's"
    assert [ledger.call() for _ in range(3)] == [(0, split), (1, split), (2, None)]
    check_repeated(split, SplitRequest(color=1), 1)
    with pytest.raises(UserError, match="and had 1 when"):
        check_repeated(split, SplitRequest(color=0), 1)
    with pytest.raises(UserError, match="was missing"):
        check_repeated(split, SplitRequest(color=0), 7)
    with pytest.raises(OperationAborted, match="have closed"):
        check_repeated(closed, SplitRequest(color=1), 1)
    with pytest.raises(RemoteProtocolError, match="says rank 3"):
        other = msgspec.structs.replace(split, base=5)
        ledger.learn({0: SplitsReply(splits=(split,)), 3: SplitsReply(splits=(other,))}, rank=1)
    with pytest.raises(RemoteProtocolError, match="split 0 is"):
        twice = msgspec.structs.replace(split, places=((1, 0, 0), (1, 1, 0)))
        ledger.learn({0: SplitsReply(splits=(twice,))}, rank=1)
    ledger.learn({}, rank=1)
    with pytest.raises(OperationAborted, match="nobody is left"):
        ledger.call()


def test_a_channel_is_reserved_and_given_back_with_its_last_stamp() -> None:
    channels = Channels()
    channels.reserve(SUBGROUP_CHANNEL_FIRST)
    assert not channels.offer().free & 1
    with pytest.raises(LocalProtocolError, match="in use by a sub-group"):
        channels.reserve(SUBGROUP_CHANNEL_FIRST)
    channels.give_back(SUBGROUP_CHANNEL_FIRST, lambda: True, last=9)
    assert channels.offer().free & 1 and channels.offer().used[0] == 9


async def test_a_world_of_one_has_parts_of_parts_and_as_many_as_there_are_channels() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.elastic_group(worker)
        part = await group.split(3)
        assert part is not None and await group.split(None) is None
        inner = await part.subgroup([0])
        assert inner is not None and inner.ranks == (0,)
        assert (await inner.all_reduce(np.ones(3))).contributors == (0,)
        assert (await inner.all_to_all(np.ones((1, 2)))).value.shape == (1, 2)
        waits = asyncio.ensure_future(inner.recv(0, tag=3))
        await part.send(np.ones(1), 0, tag=3)
        await inner.send(np.full(2, 7.0), 0, tag=3)
        assert (await waits).array.sum() == 14, "each group has its own messages"
        with pytest.raises(UserError, match="to=1 is not a rank of this group: expected 0"):
            await inner.send(np.ones(1), 1)
        assert (await part.recv()).tag == 3
        late = asyncio.ensure_future(part.recv(0))
        await asyncio.sleep(0)
        for each in (inner, part):
            await each.close()
            await each.close()  # again, it does nothing
        with pytest.raises(OperationAborted, match="closed"):
            await late
        with pytest.raises(UserError, match="rank=1 is not a rank of this group: expected 0"):
            await group.subgroup([0, 1])
        with pytest.raises(UserError, match="expected ranks of this group, each once"):
            await group.subgroup([0, 0])
        # One of the 24 channels is for the repairs of the group itself.
        parts = [await group.split(0) for _ in range(FAR_SUBGROUPS_MAX // 2 - 1)]
        with pytest.raises(LocalProtocolError, match="close one"):
            await group.split(0)
        await group.barrier()
        for each in (*parts, group):
            assert each is not None
            await each.close()
