"""What a rank process is told by its launcher, through its environment.

The names every launcher sets (RANK, WORLD_SIZE, …) are set too; ours begin with ZBMD_.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from zbmd.actors.hangs.progress import (
    PROGRESS_DEADLINE_NS_DEFAULT,
    PROGRESS_DEADLINE_NS_MIN,
    SECOND_NS,
)
from zbmd.transport.clock.deadlines import (
    RECOVERY_BUDGET_NS_DEFAULT,
    RECOVERY_BUDGET_VARIABLE,
    format_duration,
    parse_duration,
    parse_recovery_budget,
)
from zbmd.transport.errors import UserError

ARENA_BYTES_DEFAULT = 64 << 20
ARENA_BYTES_MIN = 1 << 20
ARENA_BYTES_MAX = 1 << 42
LINKS_VARIABLE = "ZBMD_LINKS"
"""`auto`, or `tcp` or `rdma`: have the ranks of one host speak as if each were on a host of its own, and to
those of other hosts by that alone."""
LINKS: Final = ("auto", "tcp", "rdma")
LISTEN_LOCAL = "127.0.0.1:0"
HOST_VARIABLE = "ZBMD_HOST"
LISTEN_VARIABLE = "ZBMD_LISTEN"
HOST_MEMORY_VARIABLE = "ZBMD_HOST_MEMORY"
"""Bytes that the host had available before any rank was started: once one has taken its part, the others
cannot tell any more whether all of them fit."""

PROGRESS_DEADLINE_VARIABLE = "ZBMD_PROGRESS_DEADLINE"
OFF = "off"
"""A progress deadline that watches nothing."""

DIGITS_MAX = 20
"""Of a number in the environment: a u64 has no more."""

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in a size such as `64MiB`, `1.5 GiB` or `4096`. Raises `UserError`."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise UserError(f"{text!r} is not a size. Write a number and a unit, such as 64MiB or 2GiB.")
    return int(float(found[1]) * unit)


def parse_arena(text: str) -> int:
    """Bytes of an arena, within its bounds. Raises `UserError`."""
    nbytes = parse_size(text)
    if not ARENA_BYTES_MIN <= nbytes <= ARENA_BYTES_MAX:
        raise UserError(f"an arena of {text} is out of range. Give 1MiB to 4TiB.")
    return nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """A rank's place in its job. `node_address`: the name its host listens on; `job`: u64.

    recovery_budget_ns: what its deadlines are derived from. host: which host this is, an opaque name that all
    ranks of it are given; empty if the job has but one. listen: where to accept members on other hosts,
    `host:port`, empty if there are none. progress_deadline_ns: what makes no progress for so long is told of,
    0: nothing is. local_world_size: ranks of each host, 0 if all of them are on one.
    """

    rank: int
    world_size: int
    incarnation: int
    job: int
    node_address: str
    arena_bytes: int = ARENA_BYTES_DEFAULT
    recovery_budget_ns: int = RECOVERY_BUDGET_NS_DEFAULT
    progress_deadline_ns: int = PROGRESS_DEADLINE_NS_DEFAULT
    host: str = ""
    listen: str = ""
    local_world_size: int = 0

    @property
    def ranks_per_host(self) -> int:
        """How many ranks its host has of the job when all are there."""
        return self.local_world_size or self.world_size

    @property
    def local_rank(self) -> int:
        """Its number among the ranks of its host."""
        return self.rank % self.ranks_per_host

    def variables(self) -> dict[str, str]:
        """The environment variables that say this, and what launchers usually say beside it."""
        rank, size = str(self.rank), str(self.world_size)
        return {
            "RANK": rank,
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "GROUP_RANK": str(self.rank // self.ranks_per_host),
            "GROUP_WORLD_SIZE": str(-(-self.world_size // self.ranks_per_host)),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": size,
            "TORCHELASTIC_RESTART_COUNT": str(self.incarnation - 1),
            "MASTER_ADDR": "127.0.0.1",
            "ZBMD_INCARNATION": str(self.incarnation),
            "ZBMD_JOB": str(self.job),
            "ZBMD_NODE": self.node_address,
            "ZBMD_ARENA": str(self.arena_bytes),
            RECOVERY_BUDGET_VARIABLE: f"{self.recovery_budget_ns}ns",
            PROGRESS_DEADLINE_VARIABLE: f"{self.progress_deadline_ns}ns"
            if self.progress_deadline_ns
            else OFF,
            HOST_VARIABLE: self.host,
            LISTEN_VARIABLE: self.listen,
        }

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> RankEnvironment | None:
        """What a launcher said; None if there was none. Raises `UserError` if only part of it is there."""
        node_address = environment.get("ZBMD_NODE")
        if node_address is None:
            return None
        return cls(
            rank=_number(environment, "RANK"),
            world_size=_number(environment, "WORLD_SIZE"),
            incarnation=_number(environment, "ZBMD_INCARNATION"),
            job=_number(environment, "ZBMD_JOB"),
            node_address=node_address,
            arena_bytes=arena_bytes(environment),
            recovery_budget_ns=recovery_budget_ns(environment),
            progress_deadline_ns=progress_deadline_ns(environment),
            **_whereabouts(environment),
            local_world_size=_ranks_of_each_host(environment),
        )


def _ranks_of_each_host(environment: Mapping[str, str]) -> int:
    """How many ranks each host has; 0 if it has all."""
    count = _number(environment, "LOCAL_WORLD_SIZE", absent=0)
    return 0 if count == _number(environment, "WORLD_SIZE") else count


def _whereabouts(environment: Mapping[str, str]) -> dict[str, str]:
    """On which host this rank is, and where it listens."""
    host, listen = environment.get(HOST_VARIABLE, ""), environment.get(LISTEN_VARIABLE, "")
    if links_wanted(environment) == "auto":
        return {"host": host, "listen": listen}
    return {"host": f"{host}/{environment['RANK']}", "listen": listen or LISTEN_LOCAL}


def links_wanted(environment: Mapping[str, str]) -> str:
    """One of `LINKS`. Raises `UserError`."""
    links = environment.get(LINKS_VARIABLE) or LINKS[0]
    if links not in LINKS:
        raise UserError(f"{LINKS_VARIABLE}={links!r} is none of {', '.join(LINKS)}.")
    return links


def arena_bytes(environment: Mapping[str, str]) -> int:
    """The arena's size from ZBMD_ARENA, or the default. Raises `UserError`."""
    text = environment.get("ZBMD_ARENA")
    return ARENA_BYTES_DEFAULT if text is None else parse_arena(text)


def recovery_budget_ns(environment: Mapping[str, str]) -> int:
    """The recovery budget from ZBMD_RECOVERY_BUDGET, or the default. Raises `UserError`."""
    text = environment.get(RECOVERY_BUDGET_VARIABLE)
    if text is None:
        return RECOVERY_BUDGET_NS_DEFAULT
    try:
        return parse_recovery_budget(text)
    except UserError as error:
        raise UserError(f"{RECOVERY_BUDGET_VARIABLE}: {error}") from None


def parse_progress_deadline(text: str) -> int:
    """The progress deadline in ns from text such as `60s`; 0 for `off`. Raises `UserError`."""
    if text.strip() == OFF:
        return 0
    deadline_ns = round(parse_duration(text) * SECOND_NS)
    if deadline_ns < PROGRESS_DEADLINE_NS_MIN:
        raise UserError(
            f"a progress deadline of {text} is too short: a busy machine would be taken for a hang. "
            f"Give {format_duration(PROGRESS_DEADLINE_NS_MIN)} or more, or {OFF}."
        )
    return deadline_ns


def progress_deadline_ns(environment: Mapping[str, str]) -> int:
    """The progress deadline from ZBMD_PROGRESS_DEADLINE, or the default. Raises `UserError`."""
    text = environment.get(PROGRESS_DEADLINE_VARIABLE)
    if text is None:
        return PROGRESS_DEADLINE_NS_DEFAULT
    try:
        return parse_progress_deadline(text)
    except UserError as error:
        raise UserError(f"{PROGRESS_DEADLINE_VARIABLE}: {error}") from None


def host_memory_bytes(environment: Mapping[str, str]) -> int | None:
    """What all ranks of this host may use together; None if no launcher has said. Raises `UserError`."""
    text = environment.get(HOST_MEMORY_VARIABLE)
    return None if text is None else parse_size(text)


def _number(environment: Mapping[str, str], name: str, *, absent: int | None = None) -> int:
    if absent is not None and name not in environment:
        return absent
    text = environment.get(name, "")
    if not text.isdecimal() or len(text) > DIGITS_MAX:
        raise UserError(
            f"ZBMD_NODE is set but {name} is {text!r}, not a number. Start the script with zbmd-node run, "
            "or unset ZBMD_NODE to run it alone."
        )
    return int(text)
