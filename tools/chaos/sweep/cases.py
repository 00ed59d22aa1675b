"""The cases of `chaos.sweep`: which rank of which job dies where, and in which order that is tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from zbmd.tools.chaos.small_job import RANKS_DEFAULT
from zbmd.tools.chaos.sweep.passes import Passes
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

COLLECTIVE: Final = "collective.point"
RECOVERY_BOUNDARIES: Final = 30
"""Instruction boundaries of a replacement that are tried: its first barrier and its first step."""
ZERO_STAGES: Final = (1, 2, 3)
MESHES: Final = ("pp=2", "tp=2", "dp=2,pp=2", "dp=2,tp=2", "pp=2,tp=2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A job: with state that is shared out (`zero`, its stage), on a `mesh`, or neither; on `ranks` ranks."""

    zero: int = 0
    mesh: str = ""
    ranks: int = RANKS_DEFAULT
    optimizer: str = "adamw"

    @classmethod
    def of(
        cls, *, zero: int = 0, mesh: str = "", ranks: int | None = None, optimizer: str = "adamw"
    ) -> Setting:
        """The ranks of a mesh are those that it has. Raises `UserError` for what is no job."""
        if zero and mesh:
            raise UserError("a job has --zero or --mesh: not both.")
        if mesh:
            sizes = [size for _, _, size in (axis.partition("=") for axis in mesh.split(","))]
            if not all(size.isdecimal() and int(size) for size in sizes):
                raise UserError(f"--mesh {mesh}: say the size of each axis, such as dp=2,pp=2.")
            ranks = math.prod(map(int, sizes)) if ranks is None else ranks
        ranks = RANKS_DEFAULT if ranks is None else ranks
        return cls(zero=zero, mesh=mesh, ranks=ranks, optimizer=optimizer)

    def __str__(self) -> str:
        what = f"zero={self.zero}" if self.zero else self.mesh or "replicas"
        return f"{what} n={self.ranks}{'' if self.optimizer == 'adamw' else f' {self.optimizer}'}"

    @property
    def recovery(self) -> tuple[str, ...]:
        """The points that a replacement passes until it trains."""
        area = "zero" if self.zero else "mesh"
        restores = ("mirror.restore", "mirror.restore_middle", "mirror.restored")
        return (f"{area}.meet", *restores, f"{area}.met")


def every_setting() -> list[Setting]:
    """All that the sweep of training is about."""
    return [Setting.of(zero=stage) for stage in ZERO_STAGES] + [Setting.of(mesh=mesh) for mesh in MESHES]


def spread(count: int) -> list[int]:
    """1 to `count`, such that any beginning of it is spread over all: the first are far from each other."""
    bits = count.bit_length()
    return sorted(range(1, count + 1), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def single_kills(passes: Sequence[Passes]) -> list[list[str]]:
    """One kill, of each rank at each point that it passes: first passes, others, and inside collectives.

    Outside collectives a rank dies at its first, second and last pass; inside them at every one.
    """
    first: list[str] = []
    later: list[str] = []
    inside: list[list[str]] = []
    for rank, passed in enumerate(passes):
        for point, count in sorted(passed.items()):
            if point == COLLECTIVE:
                inside.append([f"rank{rank}:{point}:{number}" for number in spread(count)])
                continue
            first.append(f"rank{rank}:{point}:1")
            later += [
                f"rank{rank}:{point}:{number}" for number in sorted({2, count} - {1}) if number <= count
            ]
    return [first, later, merged(inside)]


def second_kills(setting: Setting) -> list[list[str]]:
    """A rank dies in its third step; then its replacement, or a survivor, dies in what follows.

    With state that one rank alone holds a survivor dies only where neither it nor the first one has the
    other's copy: else all copies of a shard may go, and the run ends. So it takes four ranks.
    """
    if not setting.zero and not setting.mesh:
        return _second_kills_of_replicas(setting.ranks)
    point = "zero.update:3" if setting.zero else "mesh.begin:3"
    named: list[str] = []
    inside: list[list[str]] = []
    for rank in sorted({0, 1, setting.ranks - 1}):
        before = f"rank{rank}:{point}"
        named += (f"{before},rank{rank}#2:{one}" for one in setting.recovery)
        inside.append(
            [f"{before},rank{rank}#2:{COLLECTIVE}:{number}" for number in spread(RECOVERY_BOUNDARIES)]
        )
    if setting.ranks >= 4:
        meet, *_, met = setting.recovery
        named += (f"rank1:{point},rank3:{one}:2" for one in (meet, met))
    return [named, merged(inside)]


def _second_kills_of_replicas(ranks: int) -> list[list[str]]:
    first = "rank1:step.reduce:3"
    points = ("commit.view", "commit.report", "fetch.begin", "fetch.middle", "fetch.end", "step.begin")
    named = [f"{first},rank1#2:{point}" for point in points]
    everybody = ",".join(f"rank{rank}:commit.finish" for rank in range(ranks))
    named.append(everybody)  # the last version is preserved, and nobody who holds it is left
    named.append(f"{everybody},rank1#2:recall.begin")
    for rank in (0, ranks - 1):
        for point, count in (("commit.view", 2), ("commit.report", 3), ("step.begin", 4)):
            named.append(f"{first},rank{rank}:{point}:{count}")
    return [named, [f"{first},rank1#2:{COLLECTIVE}:{count}" for count in spread(RECOVERY_BOUNDARIES)]]


def merged(lists: Sequence[Sequence[str]]) -> list[str]:
    """The members of all lists, one of each in turn."""
    return [one for turn in itertools.zip_longest(*lists) for one in turn if one is not None]


def in_order(found: Sequence[tuple[Setting, Sequence[Sequence[str]]]]) -> Iterator[tuple[Setting, str]]:
    """All cases: first those of the first list of each setting, one of each in turn, and so on."""
    for rank_of_lists in itertools.zip_longest(*(lists for _, lists in found), fillvalue=()):
        for turn in itertools.zip_longest(*rank_of_lists):
            for (setting, _), fault in zip(found, turn, strict=True):
                if fault is not None:
                    yield setting, fault


def name_of(fault: str) -> str:
    """The point of a case, with a word if it is a second kill."""
    entries = faults.parse(fault)
    return entries[-1].point + (" in a recovery" if len(entries) > 1 else "")
