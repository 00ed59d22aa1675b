"""The history of a run: what happened, in order, and a digest that tells two runs apart.

Recording appends one tuple and nothing else; records are made, and hashed in batches, when they are asked
for. What is recorded must therefore not change afterwards: messages are frozen.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, MutableSequence, Sequence
from typing import Any, TypeAlias, overload

import msgspec

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.sim.model import Kind, Record

BATCH_RECORDS = 4096
"""How many records are encoded at once for the digest."""

Raw: TypeAlias = tuple[int, str, int, Kind, object]
"""What a `Record` is made of: time, ns; process; incarnation; kind; detail."""


def _plain(value: object) -> Any:
    """What msgspec cannot encode by itself, in words. (It asks for no other types than those.)"""
    return repr(value)


class History(Sequence[Record]):
    """The records of one run. Append to `raw`; everything else reads."""

    def __init__(self) -> None:
        self.raw: MutableSequence[Raw] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._hashed = 0
        # Sets and dicts in a fixed order: the digest may not depend on PYTHONHASHSEED.
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic")

    def keep_last(self, records: int) -> None:
        """Remember no more than the last `records` from now on. There is no digest then."""
        self.raw = deque(self.raw, maxlen=records)

    def __len__(self) -> int:
        return len(self.raw)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [Record(*raw) for raw in list(self.raw)[index]]
        return Record(*self.raw[index])

    def __iter__(self) -> Iterator[Record]:
        return (Record(*raw) for raw in self.raw)

    def notes(self) -> Iterator[tuple[str, object]]:
        """The notes so far, as (process, value)."""
        return ((process, detail) for _, process, _, kind, detail in self.raw if kind is Kind.NOTE)

    def turns(self, numbers: list[int]) -> None:
        """Take the order of turns into the digest: (time, process) pairs, which no record tells of."""
        if numbers:
            self._digest.update(self._encoder.encode((len(self.raw), numbers)))

    def digest(self) -> str:
        """A digest (BLAKE2b) of every record so far: equal for equal seeds.

        That holds for details that msgspec encodes, dataclasses and sets of them included, and for others
        whose repr holds no id. Raises `LocalProtocolError` if not all is remembered.
        """
        if not isinstance(self.raw, list):
            raise LocalProtocolError("a history of which only the last records are kept has no digest")
        while self._hashed < len(self.raw):
            batch = self.raw[self._hashed : self._hashed + BATCH_RECORDS]
            self._digest.update(self._encode(batch))
            self._hashed += len(batch)
        return self._digest.hexdigest()

    def _encode(self, batch: list[Raw]) -> bytes:
        kinds = " ".join([type(raw[4]).__name__ for raw in batch]).encode()
        try:
            return kinds + self._encoder.encode(batch)
        except (OverflowError, TypeError, ValueError):  # an integer beyond 64 bits, a dict keyed by objects
            return kinds + repr(batch).encode()
