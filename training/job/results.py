"""Results and records of the last steps: any member may have to log one whose writer did not live to do it.

A version is logged by the lowest rank once it is committed. A rank keeps the results of its last steps, and
the record of the last version that it saw committed. In a new epoch all members share that record before they
agree on a version: whoever knows a version to be committed has its record, or finds it in the log, and can
log it. Then they share the result of the version that they continue from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from zbmd.actors.view import RANKS_MAX
from zbmd.training.job.task import ResultRow, StepResult
from zbmd.training.redundancy.stamped import Note
from zbmd.training.run.ledger import CommitRecord

RESULTS_KEPT = 3
"""Last steps whose results a rank keeps; the next one to be logged is among them."""
NUMBER_MAX = 1 << 53
"""The integers below it are exact in a row."""
_BITS = 32
"""Bits of an integer that a number of a row holds."""
_DIGEST_NUMBERS = 128 // _BITS
_MEMBER_NUMBERS = -(-RANKS_MAX // _BITS)
_HEAD = 4 + _DIGEST_NUMBERS + _MEMBER_NUMBERS


@dataclass(frozen=True, slots=True)
class Committed:
    """The record of a committed version, and the result of its step."""

    record: CommitRecord
    done: StepResult


def _split(number: int, count: int) -> list[float]:
    return [float(number >> at * _BITS & (1 << _BITS) - 1) for at in range(count)]


def _joined(numbers: Sequence[float]) -> int:
    return sum(int(number) << at * _BITS for at, number in enumerate(numbers))


def state_digest(digests: Mapping[int, int]) -> str:
    """Return the digest of a state, from the digests of its shards by their keys."""
    return xxhash.xxh3_128_hexdigest(np.array([digests[key] for key in sorted(digests)], np.uint64).data)


def note_numbers(row: ResultRow) -> int:
    """Return the most numbers of what `StepResults` notes of a version."""
    return _HEAD + row.numbers


class StepResults:
    """The results of one rank's last steps, and the record of the last version that it saw committed.

    `row`: the layout of a result; `seed`: of the run.
    """

    def __init__(self, row: ResultRow, seed: int) -> None:
        self.logged = 0
        """The last version whose record this rank knows: one that is kept at once is voted for twice."""
        self._row, self._seed = row, seed
        self._results: dict[int, StepResult] = {}
        self._last: Committed | None = None

    # ---- results

    def result(self, version: int) -> StepResult | None:
        """Return the result of the step that led to `version`, if this rank knows it."""
        return self._results.get(version)

    def keep(self, done: StepResult) -> None:
        """Keep the result of a step that is done here, or that another rank has reported."""
        self._results[done.version] = done
        self._results.pop(done.version - RESULTS_KEPT, None)

    def go_on_from(self, version: int) -> Note:
        """Forget steps after `version`, which are done again; return its result, for all members to see."""
        for later in [one for one in self._results if one > version]:
            del self._results[later]
        return self._row.encoded(self._results.get(version))

    def learn(self, version: int, rows: Iterable[Sequence[float]]) -> None:
        """Take the result of `version` from the rows of all members, if this rank does not know it."""
        for done in map(self._row.decoded, rows):
            if done is not None and done.version == version and version not in self._results:
                self.keep(done)

    # ---- records

    def committed(
        self,
        version: int,
        digests: Sequence[int],
        *,
        epoch: int,
        members: Sequence[int],
        keys: Sequence[int],
        at_ns: int,
        held_out_loss: float | None = None,
    ) -> Committed | None:
        """Return the record of a version that is safe; None if there is nothing to log.

        keys: of the members' shards; empty: all differ. The digest is of one shard of each key, so that it
        does not depend on how many ranks hold the same.
        """
        done = self._results.get(version)
        if done is None or version <= self.logged:
            return None
        shards = dict(zip(reversed(keys or range(len(digests))), reversed(digests), strict=True))
        self.logged = version
        record = CommitRecord(
            version=version,
            epoch=epoch,
            members=tuple(members),
            shards=dict(enumerate(done.samples)),
            losses=dict(enumerate(done.losses)),
            rng_key=(self._seed, version - 1),
            digest=state_digest(shards),
            at_ns=at_ns,
            held_out_loss=held_out_loss,
        )
        self._last = Committed(record, done)
        return self._last

    @property
    def known(self) -> int:
        """The version of the last record, 0 for none: it is committed."""
        return 0 if self._last is None else self._last.record.version

    def missing(self, logged: int) -> Committed | None:
        """Return what a log up to version `logged` lacks, after `learn_records`: its writer was lost."""
        last = self._last
        return last if last is not None and last.record.version > logged else None

    def in_log(self, version: int) -> None:
        """Log no version up to this one again: its digest is another one if the state is recut."""
        self.logged = max(self.logged, version)

    def share(self) -> Note:
        """Return (numbers,) float64 of the last record, for all members to see; zeros if there is none."""
        row = np.zeros(_HEAD + self._row.numbers)
        if self._last is None:
            return row
        record = self._last.record
        held_out = math.inf if record.held_out_loss is None else record.held_out_loss
        members = sum(1 << member for member in record.members)
        row[:4] = record.version, record.epoch, record.at_ns, held_out
        row[4 : 4 + _DIGEST_NUMBERS] = _split(int(record.digest, 16), _DIGEST_NUMBERS)
        row[4 + _DIGEST_NUMBERS : _HEAD] = _split(members, _MEMBER_NUMBERS)
        row[_HEAD:] = self._row.encoded(self._last.done)
        return row

    def learn_records(self, rows: Iterable[Sequence[float]]) -> None:
        """Take the record of the highest version from the rows of all members."""
        for found in map(self._decoded, rows):
            if found is None or (self._last and self._last.record.version >= found.record.version):
                continue
            self._last, self.logged = found, max(self.logged, found.record.version)
            if found.record.version not in self._results:
                self.keep(found.done)

    def _decoded(self, row: Sequence[float]) -> Committed | None:
        """Return the record in a row; None for zeros, or a row of another shape."""
        done = self._row.decoded(row[_HEAD:])
        whole = (*row[:3], *row[4:_HEAD])
        if done is None or not all(0 <= one < NUMBER_MAX for one in whole):
            return None
        version, epoch, at_ns = (int(one) for one in row[:3])
        members = _joined(row[4 + _DIGEST_NUMBERS : _HEAD])
        record = CommitRecord(
            version=version,
            epoch=epoch,
            members=tuple(rank for rank in range(RANKS_MAX) if members >> rank & 1),
            shards=dict(enumerate(done.samples)),
            losses=dict(enumerate(done.losses)),
            rng_key=(self._seed, version - 1),
            digest=f"{_joined(row[4 : 4 + _DIGEST_NUMBERS]):032x}",
            at_ns=at_ns,
            held_out_loss=row[3] if math.isfinite(row[3]) else None,
        )
        return Committed(record, done) if version == done.version else None
