"""The facts that a diagnosis follows from: frozen, in ns since 1970, and without a file or a process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

LIBRARIES: Final = re.compile(
    r"^<|\.pyx$|(^|/)(site-packages|dist-packages)/|/lib(64)?/python3[^/]*/"
    r"|(^|/)(src/)?zbmd/(transport|actors|collectives|training|tools|__init__|\w+\.py$)|/bin/(zbmd|zbmd-node|python)"
)
"""Files that are not the user's, by their paths on whatever host."""
_FRAME: Final = re.compile(r'^[\s|+-]*File "(.+)", line (\d{1,9})(?:, in (.+))?$')
_ERROR: Final = re.compile(r"^[\s|+-]*((?:[A-Za-z_]\w*\.)*_*[A-Z]\w*)(?:: (.*))?$")
_PLACE: Final = re.compile(r"^(.+):(\d{1,9})(?: in (.+))?$")
_CAUSE: Final = re.compile(r"^(\w+)(?: at (.+):(\d{1,9}))?$")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code."""

    file: str
    line: int
    function: str = ""

    @property
    def is_users(self) -> bool:
        """Whether it is none of Python's, of an installed package or of zbmd."""
        return LIBRARIES.search(self.file) is None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception: the name of its type without its module, its message, and where the user's code was.

    starting: it was raised while the script was being imported.
    """

    kind: str
    message: str
    place: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A rank's process ended. code: exit code, or minus the signal; next_step: what followed, in words.

    failure: the exception that ended it; batch: deaths between two views have the same number, that of the
    view before them; met: whether a
    view with it had been entered; unusual: its last operation was unlike all that it had made before.
    """

    rank: int
    incarnation: int
    at_ns: int
    code: int
    reason: str
    next_step: str
    normal: bool = False
    expected: bool = False
    no_memory: bool = False
    failure: Failure | None = None
    words: tuple[str, ...] = ()
    step: int | None = None
    batch: int = 0
    met: bool = True
    unusual: bool = False
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A hang that was reported. See `zbmd.tools.runs.launches.HangFound`. over: that it has ended."""

    at_ns: int
    text: str
    ranks: tuple[int, ...]
    stack: tuple[Place, ...]
    process: str = ""
    over: bool = False
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """An operation that began and that these ranks never entered, by flight recorders."""

    operation: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """A hang by a capture: the processes to look at first, and what the captures say."""

    first: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A rank that was named as slow. last_ns: when it was as fast as others again; None: never."""

    rank: int
    cause: str
    step: int
    at_ns: int
    text: str
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """The first value of a metric that is no finite number."""

    metric: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A launcher. alive: its process is there; None: unknown, as on another host. rebooted: since then.

    outcome: done, failed, stopped or refused; empty without an end; job: of a cluster, whose node it is.
    """

    host: str
    pid: int
    command: str
    began_ns: int
    last_ns: int
    ranks: int = 0
    nodes: int = 1
    job: str = ""
    outcome: str = ""
    reason: str = ""
    cause: str = ""
    exit_code: int = 0
    records: str = ""
    restarts: int = 0
    step: int | None = None
    alive: bool | None = None
    rebooted: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of a run; ordered by time. sources: the files that were read.

    begins: when each process of a rank began, its rank, and its host.
    """

    launchers: tuple[Launcher, ...] = ()
    deaths: tuple[Death, ...] = ()
    hangs: tuple[Hang, ...] = ()
    begins: tuple[tuple[int, int, str], ...] = ()
    missing: tuple[Missing, ...] = ()
    waits: Waits | None = None
    slow: tuple[Slow, ...] = ()
    not_finite: NotFinite | None = None
    sources: tuple[str, ...] = ()

    def host_of(self, rank: int, at_ns: int) -> str:
        """Return where a rank ran at that time, 0 for the end; empty if that is not known."""
        hosts = [host for began_ns, one, host in self.begins if one == rank and not 0 < at_ns < began_ns]
        return hosts[-1] if hosts else ""


def place_of(text: str) -> Place | None:
    """Parse `train.py:12 in main`; None if it is something else."""
    found = _PLACE.match(text.strip())
    return None if found is None else Place(found[1], int(found[2]), found[3] or "")


def users_place(places: Sequence[Place]) -> Place | None:
    """Return the innermost line of the user's own, or else the innermost; None without one."""
    users = [place for place in places if place.is_users]
    return users[-1] if users else places[-1] if places else None


def failure_of(words: Iterable[str], cause: str = "") -> Failure | None:
    """Return the exception in the exit reason of a process; None if there is none.

    cause: its type and place, as `zbmd.actors.process.exit.cause_of` has them, if they are known.
    """
    places, kind, message = list[Place](), "", ""
    traced = False
    for line in words:
        if "Traceback (most recent call last)" in line:
            places, kind, message, traced = [], "", "", True
        elif (frame := _FRAME.match(line)) is not None:
            places.append(Place(frame[1], int(frame[2]), frame[3] or ""))
        elif traced and (error := _ERROR.match(line)) is not None and not kind:
            kind, message = error[1].rpartition(".")[2], error[2] or ""
        elif kind and traced:
            message = f"{message}\n{line}" if len(message) < 2000 else message
    known = _CAUSE.match(cause)
    if known is not None:
        kind = known[1]
        message = message or " ".join(words if not traced else ())
        place = None if known[2] is None else Place(known[2], int(known[3]))
        if place is not None and place.is_users and not any(one.is_users for one in places):
            places.append(place)
    return Failure(kind, message, users_place(places)) if kind else None
