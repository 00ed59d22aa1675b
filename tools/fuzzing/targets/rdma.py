"""Targets of RDMA links: what sets one up, and the messages on it."""

from __future__ import annotations

from zbmd.tools.fuzzing.target import Broken, Target
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.rdma.credit import (
    CREDITS,
    MESSAGE_BYTES,
    CreditFlow,
    Immediate,
    MessageKind,
    unpack_immediate,
)
from zbmd.transport.rdma.setup import (
    MemoryAt,
    Message,
    QueuePairAt,
    RdmaAnswer,
    RdmaOffer,
    RdmaReady,
    RdmaRefusal,
    decode_setup,
    encode_setup,
    require_fits,
)

_KINDS: tuple[type[Message], ...] = (RdmaOffer, RdmaAnswer, RdmaReady)
_FRAME_BYTES_MAX = 1 << 14
_WORD_BYTES = 4


def _setup_seeds() -> tuple[bytes, ...]:
    at = QueuePairAt(gid=bytes(range(16)), lid=0, number=17, first_psn=1 << 23, mtu=3)
    memory = MemoryAt(at=at, base=1 << 40, nbytes=1 << 20, arena_offset=1 << 18, inbox_key=1, arena_key=2)
    messages: tuple[Message, ...] = (
        RdmaOffer(at=at, memory=memory),
        RdmaAnswer(at=at),
        RdmaReady(),
        RdmaRefusal(why="full"),
    )
    return tuple(bytes([kind]) + encode_setup(message) for kind, message in enumerate(messages))


def _setup(data: bytes) -> None:
    """The first byte picks what is due."""
    message = decode_setup(data[1:], _KINDS[(data[:1] or b"\0")[0] % len(_KINDS)], "peer")
    if isinstance(message, RdmaOffer | RdmaAnswer) and len(require_fits(message.at, "peer").gid) != 16:
        raise Broken(f"a queue pair at {message.at.gid!r}")


def _messages_seeds() -> tuple[bytes, ...]:
    words = (
        (Immediate(kind=MessageKind.FRAME, more=True), 200),
        (Immediate(kind=MessageKind.FRAME), 3),
        (Immediate(kind=MessageKind.CREDITS), 0),
        (Immediate(kind=MessageKind.GOODBYE), 0),
    )
    return (b"".join(word.pack().to_bytes(_WORD_BYTES) + bytes([nbytes]) for word, nbytes in words),)


def _messages(data: bytes) -> None:
    """Each five bytes are a message: its word, and how many bytes come with it."""
    flow = CreditFlow(frame_bytes_max=_FRAME_BYTES_MAX)
    step = _WORD_BYTES + 1
    for start in range(0, len(data) - step + 1, step):
        word = unpack_immediate(int.from_bytes(data[start : start + _WORD_BYTES]))
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
