"""A rank's vote as bytes: its ballot, its part of the means, what is recorded, what it asks all ranks for,
what it has written of a checkpoint, and its own part of the state.

Every rank keeps the votes of the last commit: a replacement gets its predecessor's own state out of them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from zbmd.training.checkpoint.saving import Progress, Report
from zbmd.training.job.stragglers.samples import SAMPLE_NUMBERS
from zbmd.training.job.stragglers.scores import Floats
from zbmd.training.run.loop_steps import Drawn
from zbmd.training.torch.ballots import Ballot
from zbmd.training.torch.encoding import from_blob, to_blob
from zbmd.transport.errors import RemoteProtocolError, UserError

_HEAD: Final = struct.Struct("<qIIBBBQIII")
"""Version, means of each share, shares, whether it holds, wishes, the progress and the digest of its part of
a checkpoint, bytes noted, digests, copied"""
NOTHING_SAVED: Final = Report()
MEET: Final = 1 << 7
"""A wish of a loop, beside those of `Wish`: to take in ranks that wait, before the next step."""
MEANS_MAX: Final = 1_024
DIGESTS_MAX: Final = 1 << 20


class Noted(msgspec.Struct, array_like=True, frozen=True):
    """The step's number, names of means and the batch of each share, which are recorded, and a `Sample`.

    sample: of the step before; empty: that was not measured.
    """

    step: int
    names: tuple[str, ...]
    drawn: tuple[Drawn, ...]
    sample: tuple[float, ...] = ()


def note_for(
    step: int, means: Sequence[Mapping[str, float]], drawn: Sequence[Drawn], sample: tuple[float, ...]
) -> Noted:
    """Return what is noted of a step; 0: of a transaction that is none, which has no sample."""
    names = tuple(sorted(means[0])) if means else ()
    return Noted(step, names, tuple(drawn) or (Drawn(),), sample if step else ())


class _Sampled(msgspec.Struct, array_like=True, frozen=True):
    """The same bytes, with what this is about alone."""

    step: int
    names: msgspec.Raw
    drawn: msgspec.Raw
    sample: tuple[float, ...] = ()


_noted: Final = msgspec.msgpack.Decoder(Noted)
_sampled: Final = msgspec.msgpack.Decoder(_Sampled)


def pack(
    ballot: Ballot,
    means: Sequence[Mapping[str, float]],
    own: Any,
    noted: Noted | None = None,
    *,
    asks: int = 0,
    saves: Report = NOTHING_SAVED,
) -> bytes:
    """Return a vote. own: as `encoding.encode` takes it. noted: None: the loop is not recorded.

    means: of each share of the batch that this rank has. asks: the wishes of this rank. saves: its part of
    the checkpoint under way.
    """
    values = [each[name] for each in means for name in sorted(each)]
    blob = to_blob(own, "the state of this rank alone")
    told = b"" if noted is None else msgspec.msgpack.encode(noted)
    digests = (*ballot.digests, *ballot.copy)
    counts = (saves.progress, saves.header, len(told), len(ballot.digests), len(ballot.copy))
    widths = {len(each) for each in means} or {0}
    if len(widths) > 1:
        raise UserError("run.mean() gets other values in one share of a batch than in another: give the same")
    head = _HEAD.pack(ballot.version, *widths, max(1, len(means)), ballot.holds, asks, *counts)
    packed = struct.pack(f"<{len(values)}d{len(digests)}Q", *values, *digests)
    return head + packed + told + blob


def ballot_of(row: bytes) -> Ballot:
    """Return the ballot of a vote. Raises `RemoteProtocolError`."""
    head = _head(row)
    digests = struct.unpack_from(f"<{head.digests + head.copy}Q", row, _HEAD.size + 8 * head.values)
    return Ballot(
        version=head.version,
        holds=head.holds != 0,
        digests=digests[: head.digests],
        copy=digests[head.digests :],
    )


def means_of(rows: Sequence[bytes], names: Sequence[str]) -> dict[str, float]:
    """Return the means over all shares of what ranks gave under these names, in sorted order."""
    heads = [_head(row) for row in rows]
    counts, width = [head.means for head in heads], len(names)
    if set(counts) != {width}:
        raise RemoteProtocolError(
            f"ranks give {counts} values to run.mean() in one step, this one {width}: all give the same"
        )
    parts = [
        struct.unpack_from(f"<{head.values}d", row, _HEAD.size) for head, row in zip(heads, rows, strict=True)
    ]
    every = [value for part in parts for value in part]
    return {name: sum(every[at::width]) * width / len(every) for at, name in enumerate(names)}


def noted_of(row: bytes, ranks: int) -> Noted | None:
    """Return what is to be recorded of a vote of one of `ranks`. Raises `RemoteProtocolError`."""
    head = _head(row)
    if not head.noted:
        return None
    try:
        noted = _noted.decode(row[head.begin : head.begin + head.noted])
    except (msgspec.DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"what a vote says of its batch: {error}") from None
    if len(noted.names) != head.means or not noted.drawn:
        raise RemoteProtocolError(f"{len(noted.names)} names of {head.means} means came in a vote")
    for each in noted.drawn:
        each.check(ranks)
    return noted


def samples_of(rows: Sequence[bytes]) -> Floats:
    """Return the sample of each rank, (ranks, `SAMPLE_NUMBERS`): zeros of one without. Raises
    `RemoteProtocolError`.
    """
    found = np.zeros((len(rows), SAMPLE_NUMBERS))
    for place, row in enumerate(rows):
        head = _head(row)
        if not head.noted:
            continue
        try:
            sample = _sampled.decode(row[head.begin : head.begin + head.noted]).sample
        except (msgspec.DecodeError, ValueError) as error:
            raise RemoteProtocolError(f"the sample of a step in a vote: {error}") from None
        if len(sample) not in (0, SAMPLE_NUMBERS):
            raise RemoteProtocolError(f"expected {SAMPLE_NUMBERS} numbers of a step in a vote: {len(sample)}")
        if sample:
            found[place] = sample
    return found


def asked_in(rows: Sequence[bytes]) -> int:
    """Return the wishes of all ranks together. Raises `RemoteProtocolError`."""
    asked = 0
    for row in rows:
        asked |= _head(row).asks
    return asked


def without_wishes(row: bytes) -> bytes:
    """Return a vote of a run that has ended: nobody asks for anything any more."""
    head = _head(row)
    return _HEAD.pack(*head._replace(asks=0)) + row[_HEAD.size :]


def reports_in(rows: Sequence[bytes]) -> list[Report]:
    """Return the parts of all ranks in the checkpoint under way. Raises `RemoteProtocolError`."""
    heads = [_head(row) for row in rows]
    try:
        return [Report(Progress(head.progress), head.header) for head in heads]
    except ValueError as error:
        raise RemoteProtocolError(f"what a vote says of a checkpoint: {error}") from None


def own_of(row: bytes) -> Any:
    """Return what a rank has put into its vote as its own. Raises `RemoteProtocolError`."""
    head = _head(row)
    return from_blob(row[head.begin + head.noted :], "the own state of a rank in its vote")


class _Head(NamedTuple):
    version: int
    means: int
    shares: int
    holds: int
    asks: int
    progress: int
    header: int
    noted: int
    digests: int
    copy: int

    @property
    def values(self) -> int:
        """Return the number of means of all shares."""
        return self.means * self.shares

    @property
    def begin(self) -> int:
        """Return the offset of the noted bytes."""
        return _HEAD.size + 8 * (self.values + self.digests + self.copy)


def _head(row: bytes) -> _Head:
    if len(row) < _HEAD.size:
        raise RemoteProtocolError(f"a vote of {len(row)} bytes")
    head = _Head(*_HEAD.unpack_from(row))
    if (
        max(head.means, head.shares) > MEANS_MAX
        or max(head.digests, head.copy) > DIGESTS_MAX
        or len(row) < head.begin + head.noted
    ):
        raise RemoteProtocolError(f"a vote of {len(row)} bytes begins with {head}")
    return head
