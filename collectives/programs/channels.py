"""The channels of sub-groups: which are free, how often each has been used, and what members agree on.

A channel has a cell for each pair of processes, and what a cell holds only grows. So a channel that is used
again is used with a higher *stamp*, in the place where the group of a view has its epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.native._native import CHANNELS, FAR_CHANNELS

SUBGROUP_CHANNEL_FIRST: Final = 8
"""Channels below it are for the groups of views, and their callers' to choose."""
SUBGROUPS_MAX: Final = CHANNELS - SUBGROUP_CHANNEL_FIRST
"""Sub-groups that a process can be in at once."""
FAR_SUBGROUPS_MAX: Final = FAR_CHANNELS - SUBGROUP_CHANNEL_FIRST
"""Sub-groups of a process with members on several hosts: they use the first channels."""
STAMP_MAX: Final = 2**32 - 2


class NoChannel(LocalProtocolError):
    """No channel is free on all members of a new sub-group. All of them get it, of the same call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a process can give a sub-group: bit i of `free` and `used[i]`, the last stamp, are of channel
    `SUBGROUP_CHANNEL_FIRST` + i."""

    free: int
    used: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The channel of a sub-group, and the stamp to use it with."""

    channel: int
    stamp: int


class Channels:
    """The channels of one process's sub-groups."""

    def __init__(self) -> None:
        self._free = (1 << SUBGROUPS_MAX) - 1
        self._used = [0] * SUBGROUPS_MAX
        self._left: dict[int, Callable[[], bool]] = {}
        """Places whose sub-group is closed here, and whether it is on all others."""

    def offer(self) -> Offer:
        """The channels that are free now."""
        for place in [place for place, all_have in self._left.items() if all_have()]:
            del self._left[place]
            self._free |= 1 << place
        return Offer(free=self._free, used=tuple(self._used))

    def take(self, agreed: Agreed) -> None:
        """Use a channel. Raises `LocalProtocolError` if it is in use, or was used with such a stamp."""
        place = agreed.channel - SUBGROUP_CHANNEL_FIRST
        if not self._free >> place & 1 or agreed.stamp <= self._used[place]:
            raise LocalProtocolError(f"{agreed} is in use, or has been used")
        self._free &= ~(1 << place)
        self._used[place] = agreed.stamp

    def give_back(self, channel: int, all_have: Callable[[], bool], last: int = 0) -> None:
        """A sub-group is closed here; the channel is free once `all_have` left it.

        Until then a member may still be in its last operation, and reads there what we say on the channel.
        last: the highest stamp that it was used with, if that is not the one that it was taken with.
        """
        place = channel - SUBGROUP_CHANNEL_FIRST
        self._used[place] = max(self._used[place], last)
        self._left[place] = all_have

    def reserve(self, channel: int) -> None:
        """Keep a channel out of what is offered from now on. Raises `LocalProtocolError` if it is in use."""
        place = channel - SUBGROUP_CHANNEL_FIRST
        if not self.offer().free >> place & 1:
            raise LocalProtocolError(f"channel {channel} is in use by a sub-group: make elastic groups first")
        self._free &= ~(1 << place)


def agree(offers: Sequence[Offer], *, one_host: bool) -> Agreed:
    """Return the choice that every member makes by itself from the offers of all of them.

    The lowest channel that is free everywhere; if all members are on one host, of those that groups over
    hosts cannot use, as long as there is one. Raises `LocalProtocolError`, on all members, if there is none.
    """
    places = [*range(FAR_SUBGROUPS_MAX)]
    if one_host:
        places = [*range(FAR_SUBGROUPS_MAX, SUBGROUPS_MAX), *places]
    free = (1 << SUBGROUPS_MAX) - 1
    for offer in offers:
        free &= offer.free
    for place in places:
        stamp = max(offer.used[place] for offer in offers) + 1
        if free >> place & 1 and stamp <= STAMP_MAX:
            return Agreed(channel=SUBGROUP_CHANNEL_FIRST + place, stamp=stamp)
    raise NoChannel(
        f"a process can be in {SUBGROUPS_MAX} sub-groups (in PyTorch: process groups) at once, "
        f"{FAR_SUBGROUPS_MAX} of them over several hosts, and a member of the new one is: close one that is "
        "not needed (destroy it), or use one of the same ranks again"
    )


def title(channel: int, epoch: int) -> str:
    """Return the name of a group in messages: its view's epoch, or, for a sub-group, channel and stamp."""
    if channel < SUBGROUP_CHANNEL_FIRST:
        return f"epoch {epoch}"
    return f"sub-group {channel}.{epoch}"
