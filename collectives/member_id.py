"""The identity of a group member: a rank in one of its incarnations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberId:
    """A rank in one of its incarnations: a replacement of the rank has a greater one."""

    rank: int
    incarnation: int
