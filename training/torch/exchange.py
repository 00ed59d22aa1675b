"""Calls of the ranks of a loop beside their votes: where they meet, and before the first step."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import numpy as np

from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.continuity import CONTINUITY
from zbmd.training.torch.fsdp.division import Report
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.native._native import now_ns

_FOUNDING: Final = struct.Struct("<Q32s32sq")
"""The seed, digests of the model and of the options, and the version that the loop begins with."""


class _Told(msgspec.Struct, array_like=True, frozen=True):
    """The message of a rank to a meeting."""

    report: Report
    divides: bool


_tolds: Final = msgspec.msgpack.Decoder(_Told)


class Exchange:
    """The calls of one rank, in the default group. Each raises as operations of `Group` do."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.with_all = False
        """Whether ranks without a part in the loop take part in calls: those of a meeting."""

    @property
    def group(self) -> Group:
        """The default group of the epoch, or that of all who meet."""
        group: Group = CONTINUITY.groups[0].made
        return CONTINUITY.meeting or group if self.with_all else group

    @property
    def end_ns(self) -> int:
        """The deadline of a call that begins now."""
        return now_ns() + round(self._timeout.total_seconds() * 1e9)

    def gather(self, data: bytes, called: str = "run.step()") -> tuple[bytes, ...]:
        """Return the bytes of all ranks. called: by the script, for the error of ranks whose calls differ."""
        group, end_ns, default = self.group, self.end_ns, CONTINUITY.groups[0]
        row = np.frombuffer(data, np.uint8).copy()
        number = (
            default._get_sequence_number_for_group() + 1
        )  # that of a collective of the script in its place

        def carry_out(c: Any) -> Any:
            c.label(lambda: f"{called} #{number} of {default.title}")
            return c.all_gather_rows(row, deadline_ns=end_ns)

        whole, counts = group.submit(carry_out).result()
        bounds = np.cumsum((0, *counts))
        return tuple(whole[begin:end].tobytes() for begin, end in itertools.pairwise(bounds))

    def reports(self, own: Report, *, divides: bool) -> tuple[tuple[Report, ...], bool]:
        """Return the reports of all, and whether any rank `divides`."""
        rows = [_told(each) for each in self.gather(msgspec.msgpack.encode(_Told(own, divides)))]
        return tuple(each.report for each in rows), any(each.divides for each in rows)

    def share(self, rows: Sequence[bytes], source: int) -> tuple[bytes, ...]:
        """Return the votes that rank `source` has. rows: of that, else empty."""
        sizes = self.gather(np.array([len(row) for row in rows], np.int64).tobytes())[source]
        whole = self.gather(b"".join(rows))[source]
        bounds = np.cumsum((0, *np.frombuffer(sizes, np.int64)))
        return tuple(whole[a:b] for a, b in itertools.pairwise(bounds))

    def found(self, tensors: Sequence[str], seed: int, *, options: str, version: int, refusal: str) -> int:
        """Agree on what all must have in common before the first step; return the seed of rank 0.

        tensors: descriptions of the model's. options: of `resilient`, which are the same on all ranks.
        refusal: why this rank cannot begin. Raises `UserError`.
        """
        text = "\n".join(tensors).encode()
        model, told = (hashlib.sha256(each).digest() for each in (text, options.encode()))
        own = _FOUNDING.pack(seed % (1 << 64), model, told, version) + refusal.encode()
        rows = self.gather(own, "zbmd.torch.resilient()")
        heads = [_FOUNDING.unpack_from(row) for row in rows]
        if len({found[1] for found in heads}) > 1:
            raise UserError(_difference([each.decode(errors="replace") for each in self.gather(text)]))
        if len({found[2] for found in heads}) > 1:
            others = [each.decode(errors="replace") for each in self.gather(options.encode())]
            raise UserError(
                f"zbmd.torch.resilient() has other options on some ranks: {', '.join(others)}, in the order "
                "of ranks: give the same on all"
            )
        refused = next((row[_FOUNDING.size :] for row in rows if len(row) > _FOUNDING.size), b"")
        if refused:
            raise UserError(refused.decode(errors="replace"))
        versions = [found[3] for found in heads]
        if len(set(versions)) > 1:
            raise UserError(
                f"ranks have read checkpoints of different versions, {versions}: out= has to be a directory "
                "that all of them share"
            )
        return int(heads[0][0])


def _told(data: bytes) -> _Told:
    try:
        return _tolds.decode(data)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"the report of a rank to a meeting: {error}") from None


def _difference(texts: Sequence[str]) -> str:
    """Return which tensor of the model differs between ranks."""
    lists = [[*text.split("\n"), "nothing"] for text in texts]
    for rank, names in enumerate(lists):
        for mine, theirs in zip(lists[0], names, strict=False):
            if mine != theirs:
                return f"the model differs between ranks: rank 0 has {mine}, rank {rank} has {theirs}"
    return "the models of ranks differ"
