"""A message between nodes that is larger than a frame goes in parts, and arrives whole or not at all."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.cluster.thread_nodes import node

from zbmd.actors.cluster.contracts import decode
from zbmd.actors.cluster.node.incarnations import NodeEvent, ViewEntered
from zbmd.actors.cluster.peer_links import MESSAGE_BYTES_MAX, PART_BYTES, Assembly, Part, frames_of
from zbmd.actors.cluster.state.job_table import COMMAND_BYTES_MAX, TABLE_BYTES_MAX, JobSpec, Submit
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.frames import MAX_PAYLOAD_BYTES

JOBS = TABLE_BYTES_MAX // COMMAND_BYTES_MAX


def parts_of(data: bytes) -> list[Part]:
    found = [decode(frame) for frame in frames_of(data)]
    return [part for part in found if isinstance(part, Part)]


@pytest.mark.parametrize("nbytes", [PART_BYTES + 1, 2 * PART_BYTES, MESSAGE_BYTES_MAX])
def test_what_is_cut_comes_together_again(nbytes: int) -> None:
    data = bytes(range(256)) * (nbytes // 256) + b"x" * (nbytes % 256)
    assembly, parts = Assembly(), parts_of(data)
    assert all(len(frame) <= MAX_PAYLOAD_BYTES for frame in frames_of(data))
    assert [assembly.take(part) for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert assembly.take(parts[-1]) == data
    assert frames_of(b"small") == [b"small"] and frames_of(b"x" * (MESSAGE_BYTES_MAX + 1)) == []


def test_parts_out_of_turn_end_the_link() -> None:
    first, second, third = parts_of(b"x" * (2 * PART_BYTES + 1))
    for turns in ((second,), (first, third), (first, second, third, third), (first, Part(1, 2, b"x"))):
        assembly = Assembly()
        with pytest.raises(RemoteProtocolError, match=r"part \d of \d where \d of \d is next"):
            for part in turns:
                assembly.take(part)
    assembly = Assembly()
    assert [assembly.take(part) for part in (first, second, first, second)] == [None] * 4, "begun again"
    assert assembly.take(third) is not None
    with pytest.raises(RemoteProtocolError):
        decode(msgspec.msgpack.encode(Part(index=0, count=1, data=b"x")))


async def test_a_joiner_gets_a_table_that_is_larger_than_a_frame(tmp_path: Path) -> None:
    def knows_all(event: NodeEvent) -> bool:
        return isinstance(event, ViewEntered) and len(event.view.jobs.jobs) == JOBS

    async with node(tmp_path, "n1") as (one, told):
        await told.acts_on(1)
        for number in range(JOBS):
            text = ("X", "x" * (COMMAND_BYTES_MAX - 300))
            spec = JobSpec(job=1 + number, target="t", environment=(text,), nodes_min=62, nodes_max=62)
            one.command(Submit(spec=spec))
        acting = await told.until(knows_all)
        assert isinstance(acting, ViewEntered)
        assert len(msgspec.msgpack.encode(acting.view)) > MAX_PAYLOAD_BYTES
        async with node(tmp_path, "n2", one.me.address) as (two, told_two):
            await told_two.acts_on(2)
            await told_two.until(knows_all)
            await told.acts_on(2)  # which of the two acts on a view first is not said
            assert two.view.jobs == one.view.jobs
