"""Sans-I/O: who has which shard. No two shards of a stripe are in one failure domain.

Ranks are divided into groups of ranks in different domains. The state of each member of a group is cut into
blocks, as many as a stripe has data shards. In a group of n = k + m members there are n stripes. Stripe c
has a block of each of k members, c, c + 1, …, c + k - 1 (mod n), and its parities are at the m members after
these. So each member has k blocks in k stripes and m parities of the m others: what any m members had is
rebuilt from the rest, and the memory beside the state is m / k of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zbmd.transport.errors import LocalProtocolError

ALIGNMENT = 64
"""Bytes that a block is a multiple of."""
NAMED_MAX = 8
"""Failure domains that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """One stripe of a group. data: member and block of each data shard; parity: members, in order."""

    data: tuple[tuple[int, int], ...]
    parity: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedGroup:
    """Ranks that protect each other, by their places, and the number of parity shards."""

    members: tuple[int, ...]
    parity: int

    @property
    def data(self) -> int:
        """The number of data shards."""
        return len(self.members) - self.parity

    def stripe(self, number: int) -> Stripe:
        """Return stripe `number`, of as many as there are members."""
        size, data = len(self.members), self.data
        places = [self.members[(number + at) % size] for at in range(size)]
        return Stripe(
            data=tuple((place, at) for at, place in enumerate(places[:data])), parity=tuple(places[data:])
        )

    def stripe_of(self, place: int, block: int) -> int:
        """Return the stripe that a block of the member at `place` is in."""
        return (self.members.index(place) - block) % len(self.members)

    def parities_of(self, place: int) -> tuple[int, ...]:
        """Return the stripes whose parities the member at `place` has, in the order of its memory."""
        at, size = self.members.index(place), len(self.members)
        return tuple((at - self.data - number) % size for number in range(self.parity))

    def block_bytes(self, nbytes: int) -> int:
        """Return the bytes of a block, if the largest state of the group has `nbytes`."""
        return -(-nbytes // self.data // ALIGNMENT) * ALIGNMENT


def grouped(domains: Sequence[int], *, data: int, parity: int) -> tuple[CodedGroup, ...]:
    """Return groups of at most `data` + `parity` ranks, given the failure domain of each, by place.

    A group that cannot be as large has fewer data shards, and one of too few domains fewer parities as well;
    a rank that no other domain can protect is in a group alone. The fewest groups are made that keep ranks of
    one domain apart. The result depends on the domains alone, and is the same on all ranks.
    """
    if data < 1 or parity < 1:
        raise LocalProtocolError(f"{data} data and {parity} parity shards: expected 1 or more of both")
    if not domains:
        return ()
    fullest = max(Counter(domains).values())
    count = max(fullest, -(-len(domains) // (data + parity)))
    order = sorted(range(len(domains)), key=lambda place: (domains[place], place))
    members = [tuple(sorted(order[at::count])) for at in range(count)]
    return tuple(CodedGroup(members=one, parity=min(parity, len(one) - 1)) for one in members)


def shortage(names: Sequence[str], *, data: int, parity: int) -> str:
    """Return why ranks in failure domains of these names, by place, cannot all be protected; or "".

    A group needs ranks in more domains than it has parities, and at most one in each.
    """
    if all(group.parity == parity for group in grouped(_numbers(names), data=data, parity=parity)):
        return ""
    needed, counts, most = parity + 1, Counter(names), len(names) // (parity + 1)
    found = f"ec:{data}+{parity} needs {needed} to {data + parity} failure domains"
    if len(counts) < needed:
        return f"{found}, there {'is' if len(counts) == 1 else 'are'} {len(counts)}: {_in_words(counts)}"
    return f"{found} of at most {most} of these {len(names)} ranks each, got {_in_words(counts)}"


def described(names: Sequence[str], *, data: int, parity: int) -> str:
    """Return how ranks in failure domains of these names, by place, are grouped, for people."""
    sizes = Counter(
        f"{group.data}+{group.parity}"
        for group in grouped(_numbers(names), data=data, parity=parity)
        if group.parity
    )
    groups = ", ".join(f"{count} of {size}" for size, count in sizes.items())
    counts = Counter(names)
    return f"groups of ranks: {groups}, none with two in one of {len(counts)} domains: {_in_words(counts)}"


def _numbers(names: Sequence[str]) -> list[int]:
    order = tuple(dict.fromkeys(names))
    return [order.index(name) for name in names]


def _in_words(counts: Counter[str]) -> str:
    shown = [f"{name} ({count})" for name, count in sorted(counts.items())[:NAMED_MAX]]
    more = len(counts) - NAMED_MAX
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def fitted(groups: Sequence[CodedGroup], *, nbytes: int, room: int) -> tuple[CodedGroup, ...]:
    """Return the groups with as many parities as fit into `room` bytes of each rank."""
    return tuple(
        next(
            one
            for one in (
                CodedGroup(members=group.members, parity=count) for count in range(group.parity, -1, -1)
            )
            if one.parity * one.block_bytes(nbytes) <= room
        )
        for group in groups
    )


def room_bytes(groups: Sequence[CodedGroup], nbytes: int) -> int:
    """Return the most memory that a rank needs for the parities of one version of states of `nbytes`."""
    return max((group.parity * group.block_bytes(nbytes) for group in groups), default=0)
