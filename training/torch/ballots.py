"""The votes of ranks, and what they say of each other's states. Imports nothing of PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from zbmd.training.torch.fsdp.division import ward_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """A vote. holds: whether the rank can make its ward's update as well; only of a sharded state.

    digests: of the parts of the state before the transaction; of a sharded one, of each parameter with its
    moments. copy: the same, of the copy of the ward's shard. Empty: they are not compared.
    """

    version: int
    holds: bool = False
    digests: tuple[int, ...] = ()
    copy: tuple[int, ...] = ()


DIGEST_EVERY: Final = 64
"""Versions from one whose copies are compared to the next: to read them costs a fraction of one step."""


_DIFFERS_AT_FIRST: Final = (
    "the model differs between ranks before its first step; seed all ranks alike before they make it, or "
    "wrap it in DistributedDataParallel, which sends the model of rank 0 to all"
)
_DIFFERS_LATER: Final = (
    "memory or a processor has erred, the script changes parameters on some ranks alone, or nothing reduces "
    "the gradients of a model that is not in DistributedDataParallel; start the run again, from its last "
    "checkpoint"
)


class Difference(NamedTuple):
    """States that are not what they have to be. parameter: the first one, in the order of digests."""

    reason: str
    parameter: int | None


def difference_of(version: int, ballots: Sequence[Ballot], *, sharded: bool) -> Difference | None:
    """Return what forbids a commit of votes for the version after this one; None: nothing."""
    versions = [ballot.version for ballot in ballots]
    if set(versions) != {version}:
        return Difference(f"ranks vote for versions {versions}: their scripts take different steps", None)
    for place, ballot in enumerate(ballots):
        if ballot.holds != sharded:
            why = f"rank {place} votes without its ward's gradients: others run other code"
            return Difference(why, None)
    return other_copy(version, ballots) if sharded else other_state(version, ballots)


def other_state(version: int, ballots: Sequence[Ballot]) -> Difference | None:
    """Return which ranks' state is not that of most others; None: all have the same."""
    rows = [ballot.digests for ballot in ballots]
    if len(set(rows)) <= 1:
        return None
    usual, count = Counter(rows).most_common(1)[0]
    odd = [place for place, row in enumerate(rows) if row != usual]
    pairs = enumerate(zip(rows[odd[0]], usual, strict=False))
    first = next((at for at, pair in pairs if pair[0] != pair[1]), min(len(rows[odd[0]]), len(usual)))
    told = ", ".join(f"{row[first]:016x}" if first < len(row) else "none" for row in rows)
    most = f"; most have those of rank {rows.index(usual)}, not of {odd}" if 2 * count > len(rows) else ""
    why = _DIFFERS_LATER if version else _DIFFERS_AT_FIRST
    return Difference(
        f"the state of version {version} is not the same on all ranks (digests {told}){most}: {why}", first
    )


def other_copy(version: int, ballots: Sequence[Ballot]) -> Difference | None:
    """Return the first rank whose copy is not its ward's shard; None: all are the same."""
    for place, ballot in enumerate(ballots):
        ward = ward_of(place, len(ballots))
        shard = ballots[ward].digests
        if not ballot.copy or ballot.copy == shard:
            continue
        pairs = enumerate(zip(ballot.copy, shard, strict=False))
        return Difference(
            f"the shard of rank {ward} and its copy on rank {place} are not the same in version "
            f"{version}: memory or a processor of one of them has erred, or the script changes parameters "
            "outside of optimizer.step(); start the run again, from its last checkpoint",
            next((at for at, pair in pairs if pair[0] != pair[1]), None),
        )
    return None
