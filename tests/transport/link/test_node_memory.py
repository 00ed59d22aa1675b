"""The memory that all links of a process hold is bounded, and they go on once there is room."""

from __future__ import annotations

import asyncio
import os

import pytest
from support.links.link_harness import COOKIE, Ear

from zbmd.transport.errors import LinkFull, LocalProtocolError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint, NodeMemory
from zbmd.transport.tcp.connect import dial, listen
from zbmd.transport.tcp.link import TcpLink

MIB = 1 << 20


def endpoint(name: str, send: NodeMemory, receive: NodeMemory) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, job=7)
    return Endpoint(identity=identity, cookie=COOKIE, send_memory=send, receive_memory=receive)


def test_who_waits_is_called_once_there_is_room() -> None:
    memory = NodeMemory(100)
    called: list[str] = []
    memory.change(100)
    assert memory.full
    memory.wait("a", lambda: called.append("a"))
    memory.wait("b", lambda: called.append("b"))
    memory.forget("b")
    memory.forget("b")
    memory.change(-24)
    assert not memory.full
    assert not called, "not for every byte"
    memory.change(-1)
    memory.change(-1)
    assert called == ["a"]
    with pytest.raises(LocalProtocolError):
        NodeMemory(0)


async def test_links_share_what_a_node_may_queue() -> None:
    ours, theirs = NodeMemory(4 * MIB), NodeMemory()
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    listener = await listen("127.0.0.1:0", links.put_nowait, endpoint("b", NodeMemory(), theirs))
    pairs = [
        (await dial(listener.address, endpoint("a", ours, NodeMemory())), await links.get()) for _ in range(4)
    ]
    sent = [0] * 4
    for number, (link, _) in enumerate(pairs):
        with pytest.raises(LinkFull):
            while True:
                link.send(bytes(100_000))
                sent[number] += 1
    assert ours.full
    assert ours.used_bytes <= 4 * MIB + MIB
    assert sum(sent) < 8 * MIB // 100_000, "one link's own queue would have taken that"
    waiting = [asyncio.ensure_future(link.writable()) for link, _ in pairs]
    ears = [Ear(other) for _, other in pairs]
    await asyncio.gather(*waiting)
    for number, ear in enumerate(ears):
        await ear.frames(sent[number])
    assert ours.used_bytes == theirs.used_bytes == 0
    for link, other in pairs:
        link.close()
        other.close()
    listener.close()
    await listener.wait_closed()


async def test_a_node_that_is_full_reads_on_later() -> None:
    ours, theirs = NodeMemory(), NodeMemory(MIB)
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    listener = await listen("127.0.0.1:0", links.put_nowait, endpoint("b", NodeMemory(), theirs))
    link = await dial(listener.address, endpoint("a", ours, NodeMemory()))
    other = await links.get()
    ear = Ear(other)
    theirs.change(MIB)  # others hold all of it
    for _ in range(20):
        link.send(bytes(100_000))
    await asyncio.wait([asyncio.ensure_future(link.flush())], timeout=0.02)
    assert not ear.payloads
    theirs.change(-MIB)
    assert await ear.frames(20) == [bytes(100_000)] * 20
    assert theirs.used_bytes == 0
    link.close()
    assert await ear.end() is None
    assert ours.used_bytes == 0
    listener.close()
    await listener.wait_closed()


async def test_two_nodes_full_of_what_the_other_should_read_go_on() -> None:
    memories = [NodeMemory(MIB) for _ in range(4)]
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    listener = await listen("127.0.0.1:0", links.put_nowait, endpoint("b", *memories[:2]))
    both = [await dial(listener.address, endpoint("a", *memories[2:])), await links.get()]
    sent = [0, 0]
    for number, link in enumerate(both):
        with pytest.raises(LinkFull):
            while True:
                link.send(bytes(100_000))
                sent[number] += 1
    ears = [Ear(link) for link in both]
    await ears[0].frames(sent[1])
    await ears[1].frames(sent[0])
    assert [memory.used_bytes for memory in memories] == [0] * 4
    for link in both:
        link.close()
    listener.close()
    await listener.wait_closed()
