"""The tag of a bulk payload: one a chunk, and one over those, so that they are made beside the system calls.

A payload of up to `TAG_CHUNK_BYTES` has the tag of its bytes. A longer one is cut there; each chunk has a tag
with a nonce of its own, and the tag of the payload is that of all of these, joined. It is the only one that
is sent. (Two levels of universal hashing: Wegman, Carter, "New hash functions and their use in authentication
and set equality", 1981.)

A process has one `TagHelper`, a thread that makes tags without the GIL while the data-plane thread is in a
system call. Nobody waits for it: what it has not made when it is needed is made again by whoever needs it.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Final

from zbmd.transport.secure.record_mac import RecordMac, RunningTag

TAG_CHUNK_BYTES: Final = 1 << 20
"""What the tag of a chunk covers, about 50 us of work. Both sides of a lane must agree on it."""
# Kinds of the tags of one sequence number (see `record_mac`); those of chunks are the ones that follow.
_PAYLOAD: Final = 2
_FIRST_CHUNK: Final = 3


class TagHelper:
    """The thread; it starts with the first chunk. `submit` and `close` are for one other thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[LyingTag, int] | None] = SimpleQueue()
        """At most the chunks of what is under way: one payload a lane and direction, and those given up."""
        self._thread: threading.Thread | None = None

    def submit(self, payload: LyingTag, chunk: int) -> None:
        """Have chunk `chunk` tagged."""
        self._queue.put((payload, chunk))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zbmd-tags", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            payload, chunk = task
            payload.make(chunk)
            del task, payload  # whose memory is somebody's, and may be waited for


class LyingTag:
    """The tag of `payload`, flat bytes which come to be known from the first to the last and then lie still.

    helper: makes the tags of chunks meanwhile; None if nobody does.
    """

    __slots__ = ("_helper", "_mac", "_ready", "_sequence", "_tags", "payload")

    def __init__(self, mac: RecordMac, sequence: int, payload: memoryview, helper: TagHelper | None) -> None:
        self._mac = mac
        self._sequence = sequence
        self.payload = payload
        self._helper = helper
        self._tags: list[bytes | None] = [None] * -(-len(payload) // TAG_CHUNK_BYTES)
        self._ready = 0

    def apart(self) -> LyingTag:
        """The same over a copy: once this returns, `payload` may change."""
        copy = LyingTag(self._mac, self._sequence, memoryview(bytearray(self.payload)), None)
        # A tag that the helper is making now comes too late for it, and may be wrong.
        copy._tags = list(self._tags)
        copy._ready = self._ready
        return copy

    def reached(self, at: int) -> None:
        """The first `at` bytes are known."""
        # But for the last chunk: its tag is wanted at once.
        ready = min(at // TAG_CHUNK_BYTES, len(self._tags) - 1)
        for chunk in range(self._ready, ready):
            if self._helper is None:
                self.make(chunk)
            else:
                self._helper.submit(self, chunk)
        self._ready = max(self._ready, ready)

    def make(self, chunk: int) -> bytes:
        """The tag of a chunk, made unless it has been already. For any thread."""
        tag = self._tags[chunk]
        if tag is None:
            begin = chunk * TAG_CHUNK_BYTES
            body = self.payload[begin : begin + TAG_CHUNK_BYTES]
            tag = self._mac.tag(_kind_of(chunk, len(self._tags)), self._sequence, (body,))
            self._tags[chunk] = tag
        return tag

    def tag(self) -> bytes:
        """The tag of the payload, all of which is known."""
        # From the last chunk on: the helper comes from the first.
        tags = [self.make(chunk) for chunk in reversed(range(len(self._tags)))]
        return _joined(self._mac, self._sequence, tags[::-1])


class PassingTag:
    """The tag of a payload of `nbytes` whose parts are seen once and do not stay."""

    __slots__ = ("_at", "_chunks", "_mac", "_running", "_sequence", "_tags")

    def __init__(self, mac: RecordMac, sequence: int, nbytes: int) -> None:
        self._mac = mac
        self._sequence = sequence
        self._chunks = -(-nbytes // TAG_CHUNK_BYTES)
        self._tags: list[bytes] = []
        self._at = 0
        self._running = self._begin()

    def _begin(self) -> RunningTag:
        return self._mac.running(_kind_of(len(self._tags), self._chunks), self._sequence)

    def update(self, part: memoryview) -> None:
        """Go on with `part`."""
        while len(part):
            if self._at == TAG_CHUNK_BYTES:
                self._tags.append(self._running.tag())
                self._at, self._running = 0, self._begin()
            piece, part = part[: TAG_CHUNK_BYTES - self._at], part[TAG_CHUNK_BYTES - self._at :]
            self._running.update(piece)
            self._at += len(piece)

    def tag(self) -> bytes:
        """The tag of all parts. Called once, after the last."""
        return _joined(self._mac, self._sequence, [*self._tags, self._running.tag()])


def _kind_of(chunk: int, chunks: int) -> int:
    return _PAYLOAD if chunks == 1 else _FIRST_CHUNK + chunk


def _joined(mac: RecordMac, sequence: int, tags: list[bytes]) -> bytes:
    return tags[0] if len(tags) == 1 else mac.tag(_PAYLOAD, sequence, tags)
