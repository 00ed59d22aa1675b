"""The environment variables by which a launcher configures a rank.

The names that every launcher sets (RANK, WORLD_SIZE, …) are set too; zbmd's own begin with ZBMD_.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count as count_from
from itertools import groupby
from typing import Any, Final

from zbmd.actors.hangs.progress import (
    PROGRESS_DEADLINE_NS_DEFAULT,
    PROGRESS_DEADLINE_NS_MIN,
    SECOND_NS,
)
from zbmd.actors.view import RANKS_MAX
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
"""`auto`; `tcp` or `rdma` treat each rank as if on a host of its own, and use only that transport."""
LINKS: Final = ("auto", "tcp", "rdma")
LISTEN_LOCAL = "127.0.0.1:0"
HOST_VARIABLE = "ZBMD_HOST"
DOMAINS_VARIABLE: Final = "ZBMD_DOMAINS"
"""The failure domains of the nodes that were here when the job was given, see `domains_text`."""
LAUNCH_VARIABLE: Final = "ZBMD_LAUNCH"
"""When a job over several nodes was launched, in µs: its launches have one number of the job."""
LISTEN_VARIABLE = "ZBMD_LISTEN"
RANKS_MIN_VARIABLE = "ZBMD_RANKS_MIN"
RESUMES_VARIABLE = "ZBMD_RESUMES"
LOST_DEVICES_VARIABLE: Final = "ZBMD_LOST_DEVICES"
"""Indices of devices of this host that failed in this job: ranks that start later take others."""
HOLDS_VARIABLE = "ZBMD_HOLDS_STATE"
FLIGHTS_VARIABLE: Final = "ZBMD_FLIGHT_DIR"
"""Names the directory of dumps of flight recorders."""
FLIGHTS_DIRECTORY: Final = "flights"
HOST_MEMORY_VARIABLE = "ZBMD_HOST_MEMORY"
"""Memory that the host had available before any rank started; later, ranks cannot tell whether all fit."""

SPARE_RANKS_VARIABLE: Final = "ZBMD_SPARE_RANKS"
SPARE_RANKS_MAX: Final = 64
"""Of a job, on each host."""

PROGRESS_DEADLINE_VARIABLE = "ZBMD_PROGRESS_DEADLINE"
OFF = "off"
"""The progress deadline that disables the watchdog."""

JOB_PORT_FIRST: Final = 20_000
JOB_PORTS: Final = 10_000
"""Range of MASTER_PORT for jobs whose launcher gives none, below Linux's ephemeral ports (32768 and up)."""

DIGITS_MAX = 20
"""Digits of a number in the environment, as many as a u64 has."""

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
    """Parse a size such as `64MiB`, `1.5 GiB` or `4096` into bytes. Raises `UserError`."""
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise UserError(f"{text!r} is not a size. Write a number and a unit, such as 64MiB or 2GiB.")
    return int(float(found[1]) * unit)


def parse_arena(text: str) -> int:
    """Parse an arena's size and check its bounds. Raises `UserError`."""
    nbytes = parse_size(text)
    if not ARENA_BYTES_MIN <= nbytes <= ARENA_BYTES_MAX:
        raise UserError(f"an arena of {text} is out of range. Give 1MiB to 4TiB.")
    return nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvironment:
    """Settings that all ranks of a job share, known to spares before they have a rank. `job`: u64.

    local_world_size: ranks of each host, 0 if all of them are on one. ranks_min: so few may be left while the
    job goes on, 0: all are always replaced, or the job ends. resumes: whether the job goes on from memory
    that an earlier run of it has left. holds: whether memory of ranks outlives the launcher (`--snapshots`).
    launch: see `LAUNCH_VARIABLE`; 0: the number of the job is that of one launch.
    """

    job: int
    world_size: int
    local_world_size: int = 0
    ranks_min: int = 0
    resumes: bool = False
    holds: bool = False
    launch: int = 0

    @classmethod
    def read_job(cls, environment: Mapping[str, str]) -> JobEnvironment | None:
        """Read what a launcher set; None without a launcher. Raises `UserError` if variables are missing."""
        if environment.get("ZBMD_NODE") is None:
            return None
        return JobEnvironment(**_of_job(environment))

    @property
    def ranks_per_host(self) -> int:
        """The number of the job's ranks on each host."""
        return self.local_world_size or self.world_size

    @property
    def hosts(self) -> int:
        """The number of hosts that the job's ranks are on."""
        return -(-self.world_size // self.ranks_per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment(JobEnvironment):
    """A rank's place in its job. `node_address`: the name its host listens on.

    recovery_budget_ns: what its deadlines are derived from. host: which host this is, an opaque name that all
    ranks of it are given; empty if the job has but one. listen: where to accept members on other hosts,
    `host:port`, empty if there are none. progress_deadline_ns: what makes no progress for so long is
    reported, 0: nothing is.
    """

    rank: int
    incarnation: int
    node_address: str
    arena_bytes: int = ARENA_BYTES_DEFAULT
    recovery_budget_ns: int = RECOVERY_BUDGET_NS_DEFAULT
    progress_deadline_ns: int = PROGRESS_DEADLINE_NS_DEFAULT
    host: str = ""
    listen: str = ""

    @property
    def is_again(self) -> bool:
        """Whether an earlier process was this rank of this job."""
        return self.incarnation > 1 or self.resumes

    @property
    def local_rank(self) -> int:
        """The rank's number on its host."""
        return self.rank % self.ranks_per_host

    def variables(self) -> dict[str, str]:
        """Return the environment variables for this rank, including those that launchers usually set."""
        rank, size = str(self.rank), str(self.world_size)
        return {
            "RANK": rank,
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "GROUP_RANK": str(self.rank // self.ranks_per_host),
            "GROUP_WORLD_SIZE": str(self.hosts),
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
            RANKS_MIN_VARIABLE: str(self.ranks_min),
            **({RESUMES_VARIABLE: "1"} if self.resumes else {}),
            **({HOLDS_VARIABLE: "1"} if self.holds else {}),
        }

    @classmethod
    def alone(cls, environment: Mapping[str, str]) -> RankEnvironment:
        """Return that of a process without a launcher, a world of one. Raises `UserError`."""
        return cls(
            rank=0,
            world_size=1,
            incarnation=1,
            job=0,
            node_address="",
            arena_bytes=arena_bytes(environment),
            recovery_budget_ns=recovery_budget_ns(environment),
            progress_deadline_ns=progress_deadline_ns(environment),
        )

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> RankEnvironment | None:
        """Read what a launcher set; None without a launcher. Raises `UserError` if variables are missing."""
        node_address = environment.get("ZBMD_NODE")
        if node_address is None:
            return None
        host, listen = _whereabouts(environment)
        return cls(
            **_of_job(environment),
            rank=_number(environment, "RANK"),
            incarnation=_number(environment, "ZBMD_INCARNATION"),
            node_address=node_address,
            arena_bytes=arena_bytes(environment),
            recovery_budget_ns=recovery_budget_ns(environment),
            progress_deadline_ns=progress_deadline_ns(environment),
            host=host,
            listen=listen,
        )


def _of_job(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        "job": _number(environment, "ZBMD_JOB"),
        "world_size": _number(environment, "WORLD_SIZE"),
        "local_world_size": _ranks_of_each_host(environment),
        "ranks_min": _number(environment, RANKS_MIN_VARIABLE, absent=0),
        "resumes": _number(environment, RESUMES_VARIABLE, absent=0) > 0,
        "holds": _number(environment, HOLDS_VARIABLE, absent=0) > 0,
        "launch": _number(environment, LAUNCH_VARIABLE, absent=0),
    }


def _ranks_of_each_host(environment: Mapping[str, str]) -> int:
    """Return how many ranks each host has; 0 if one host has all."""
    count = _number(environment, "LOCAL_WORLD_SIZE", absent=0)
    return 0 if count == _number(environment, "WORLD_SIZE") else count


def _whereabouts(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the host that this rank is on, and where it listens."""
    host, listen = environment.get(HOST_VARIABLE, ""), environment.get(LISTEN_VARIABLE, "")
    if links_wanted(environment) == "auto":
        return host, listen
    return f"{host}/{environment['RANK']}", listen or LISTEN_LOCAL


def domains_text(names: Iterable[str]) -> str:
    """Return the failure domains of some nodes as `NAME=NODES,...`, in order. names: "": it has no name."""
    return ",".join(f"{name}={len([*alike])}" for name, alike in groupby(names))


def domains_in(text: str) -> tuple[str, ...]:
    """Return the failure domain of each node, in order, from `domains_text`. Raises `UserError`.

    A node whose domain has no name is one by itself, `alone N`.
    """
    names, alone = list[str](), count_from(0)
    for one in filter(None, text.split(",")):
        name, _, count = one.partition("=")
        if not count.isdecimal() or not 0 < int(count) <= RANKS_MAX:
            raise UserError(f"{DOMAINS_VARIABLE}: expected NAME=NODES, got {one[:80]!r}: unset it.")
        names += [name or f"alone {next(alone)}" for _ in range(int(count))]
    return tuple(names)


def links_wanted(environment: Mapping[str, str]) -> str:
    """Return the value of ZBMD_LINKS. Raises `UserError`."""
    links = environment.get(LINKS_VARIABLE) or LINKS[0]
    if links not in LINKS:
        raise UserError(f"{LINKS_VARIABLE}: expected one of {', '.join(LINKS)}, got {links!r}.")
    return links


def arena_bytes(environment: Mapping[str, str]) -> int:
    """Return the arena's size from ZBMD_ARENA, or the default. Raises `UserError`."""
    text = environment.get("ZBMD_ARENA")
    return ARENA_BYTES_DEFAULT if text is None else parse_arena(text)


def recovery_budget_ns(environment: Mapping[str, str]) -> int:
    """Return the recovery budget from ZBMD_RECOVERY_BUDGET, or the default. Raises `UserError`."""
    text = environment.get(RECOVERY_BUDGET_VARIABLE)
    if text is None:
        return RECOVERY_BUDGET_NS_DEFAULT
    try:
        return parse_recovery_budget(text)
    except UserError as error:
        raise UserError(f"{RECOVERY_BUDGET_VARIABLE}: {error}") from None


def parse_progress_deadline(text: str) -> int:
    """Parse a progress deadline such as `60s` into ns; 0 for `off`. Raises `UserError`."""
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
    """Return the progress deadline from ZBMD_PROGRESS_DEADLINE, or the default. Raises `UserError`."""
    text = environment.get(PROGRESS_DEADLINE_VARIABLE)
    if text is None:
        return PROGRESS_DEADLINE_NS_DEFAULT
    try:
        return parse_progress_deadline(text)
    except UserError as error:
        raise UserError(f"{PROGRESS_DEADLINE_VARIABLE}: {error}") from None


def host_memory_bytes(environment: Mapping[str, str]) -> int | None:
    """Return the memory that all ranks of this host may use; None without a launcher. Raises `UserError`."""
    text = environment.get(HOST_MEMORY_VARIABLE)
    return None if text is None else parse_size(text)


def parse_spare_ranks(text: str) -> int:
    """Parse the number of spare ranks of each host. Raises `UserError`."""
    if not text.isdecimal() or len(text) > DIGITS_MAX or int(text) > SPARE_RANKS_MAX:
        raise UserError(f"expected 0 to {SPARE_RANKS_MAX} spare ranks of each host, got {text[:64]!r}")
    return int(text)


def spare_ranks(environment: Mapping[str, str]) -> int:
    """Return the number of spare ranks of each host, from ZBMD_SPARE_RANKS. Raises `UserError`."""
    try:
        return parse_spare_ranks(environment.get(SPARE_RANKS_VARIABLE, "0"))
    except UserError as error:
        raise UserError(f"{SPARE_RANKS_VARIABLE}: {error}") from None


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


def port_of_job(job: str) -> int:
    """Return the port that all nodes derive from a job's id; two jobs on one host rarely share it."""
    return JOB_PORT_FIRST + zlib.crc32(job.encode()) % JOB_PORTS
