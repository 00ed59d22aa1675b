"""Point-to-point messages of a process group: on the loop, beside the queue of its collectives."""

from __future__ import annotations

import asyncio

from zbmd.collectives.errors import Desynchronised
from zbmd.collectives.group.group import Group
from zbmd.collectives.p2p.differing import CALLS_DIFFER, message_differs
from zbmd.collectives.p2p.tagged import within
from zbmd.collectives.p2p.wire import TaggedMessage
from zbmd.collectives.torch.tensors import TensorBuffer


async def send(group: Group, buffer: TensorBuffer, to: int, tag: int, timeout_s: float) -> None:
    """Send a tensor to rank `to` of the group; see `Group.send`."""
    async with within(timeout_s, f"send({buffer.text}, dst={to}, tag={tag})"):
        await group.messages().send(buffer.array, group.members[to], tag, label=buffer.text)


async def receive(group: Group, buffer: TensorBuffer, source: int | None, tag: int, timeout_s: float) -> int:
    """Receive a tensor from a rank of the group, None from any; return the sender.

    Raises `Desynchronised` if the sender's tensor is of another dtype or size, after which the group is of no
    use: the sender's next call fails with that.
    """
    call = f"recv({buffer.text}, {'' if source is None else f'src={source}, '}tag={tag})"

    def check(message: TaggedMessage, member: int) -> None:
        sender, sent = group.members.index(member), message.label
        if not sent or (_dtype_of(sent) == _dtype_of(buffer.text) and message.nbytes == buffer.array.nbytes):
            return
        theirs = f"send({sent}, dst={group.rank}, tag={tag})"
        raise message_differs({group.rank: call, sender: theirs}, group.members)

    try:
        async with within(timeout_s, call):
            member = None if source is None else group.members[source]
            got = await group.messages().receive(member, tag, buffer.array, check)
    except Desynchronised as error:
        await asyncio.to_thread(group.give_up, f"{CALLS_DIFFER}{error}")
        raise
    buffer.bring_home()
    return group.members.index(got.source)


def _dtype_of(label: str) -> str:
    return label.partition("[")[0]
