"""Targets of RDMA links: what sets one up, and the messages on it."""

from __future__ import annotations

from zbmd.tools.fuzzing.target import Broken, Target
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.rdma.credit import CREDITS, MESSAGE_BYTES, Flow, Kind, Word, unpack_word
from zbmd.transport.rdma.setup import (
    Answer,
    MemoryAt,
    Message,
    Offer,
    QueuePairAt,
    Ready,
    Refusal,
    decode,
    encode,
    require_fits,
)

_KINDS: tuple[type[Message], ...] = (Offer, Answer, Ready)
_FRAME_BYTES_MAX = 1 << 14
_WORD_BYTES = 4


def _setup_seeds() -> tuple[bytes, ...]:
    at = QueuePairAt(gid=bytes(range(16)), lid=0, number=17, first_psn=1 << 23, mtu=3)
    memory = MemoryAt(at=at, base=1 << 40, nbytes=1 << 20, arena_offset=1 << 18, inbox_key=1, arena_key=2)
    messages: tuple[Message, ...] = (
        Offer(at=at, memory=memory),
        Answer(at=at),
        Ready(),
        Refusal(why="full"),
    )
    return tuple(bytes([kind]) + encode(message) for kind, message in enumerate(messages))


def _setup(data: bytes) -> None:
    """The first byte picks what is due."""
    message = decode(data[1:], _KINDS[(data[:1] or b"\0")[0] % len(_KINDS)], "peer")
    if isinstance(message, Offer | Answer) and len(require_fits(message.at, "peer").gid) != 16:
        raise Broken(f"a queue pair at {message.at.gid!r}")


def _messages_seeds() -> tuple[bytes, ...]:
    words = (
        (Word(kind=Kind.FRAME, more=True), 200),
        (Word(kind=Kind.FRAME), 3),
        (Word(kind=Kind.CREDITS), 0),
        (Word(kind=Kind.GOODBYE), 0),
    )
    return (b"".join(word.pack().to_bytes(_WORD_BYTES) + bytes([nbytes]) for word, nbytes in words),)


def _messages(data: bytes) -> None:
    """Each five bytes are a message: its word, and how many bytes come with it."""
    flow = Flow(frame_bytes_max=_FRAME_BYTES_MAX)
    step = _WORD_BYTES + 1
    for start in range(0, len(data) - step + 1, step):
        word = unpack_word(int.from_bytes(data[start : start + _WORD_BYTES]))
        nbytes = data[start + _WORD_BYTES]
        flow.came(word, bytes(min(nbytes * 17, MESSAGE_BYTES)))
        if nbytes % 2:
            frame = flow.next_frame()
            if frame is not None and len(frame) > _FRAME_BYTES_MAX:
                raise Broken(f"a frame of {len(frame)} bytes")
            flow.credits_due()
        flow.check_invariants()
        if flow.unread > CREDITS:
            raise Broken(f"{flow.unread} messages wait")


TARGETS = (
    Target(
        name="rdma.setup",
        what="a message that sets up an RDMA link",
        allowed=(RemoteProtocolError,),
        seeds=_setup_seeds,
        run=_setup,
    ),
    Target(
        name="rdma.messages",
        what="messages on the queue pair of an RDMA link",
        allowed=(RemoteProtocolError,),
        seeds=_messages_seeds,
        run=_messages,
    ),
)
