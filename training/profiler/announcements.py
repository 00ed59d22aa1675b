"""Announcements of runs that ranks begin, and of ranks that are lost: lines of a file of their launcher.

The file is a memfd of the launcher, which `VARIABLE` names by its path in /proc, so it is gone with it. Ranks
append the directories of their runs, the launcher the causes of deaths, and its dashboard reads both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec

from zbmd.actors.hangs.introspection import note_run

VARIABLE: Final = "ZBMD_RUNS_FILE"
JOB_VARIABLE: Final = "ZBMD_JOB"
FILE_BYTES_MAX: Final = 1 << 20
"""Lines that would make it longer are dropped."""
LINE_BYTES_MAX: Final = 8192


class RunBegun(msgspec.Struct, frozen=True, tag="run", tag_field="kind"):
    """A rank has begun a run, or gone on with it. directory: absolute; job: of the rank, 0 if it has none."""

    directory: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    job: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class RankLost(msgspec.Struct, frozen=True, tag="lost", tag_field="kind"):
    """A rank ended without being asked to. cause: a signal, "exit code 1", or "out of memory"."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    cause: Annotated[str, msgspec.Meta(max_length=64)]


Announcement = RunBegun | RankLost

_DECODER: Final[msgspec.json.Decoder[Announcement]] = msgspec.json.Decoder(Announcement)


def announce(what: Announcement, environ: Mapping[str, str] | None = None) -> None:
    """Append a line, if a launcher wants to know and there is room. Raises nothing: no run needs it."""
    path = (os.environ if environ is None else environ).get(VARIABLE)
    data = msgspec.json.encode(what) + b"\n"
    if not path or len(data) > LINE_BYTES_MAX:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return  # the launcher is gone, or of another host
    try:
        if os.fstat(file).st_size + len(data) <= FILE_BYTES_MAX:
            os.write(file, data)
    except OSError:
        pass
    finally:
        os.close(file)


def announce_run(directory: Path) -> None:
    """Announce that this rank takes part in the run in `directory`, unless that was announced already."""
    job = os.environ.get(JOB_VARIABLE, "0")
    begun = RunBegun(str(directory.absolute()), int(job) if job.isdecimal() else 0)
    note_run(begun.directory)
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        known = begun in read_announcements(Path(path).read_bytes())
    except OSError:
        return
    if not known:
        announce(begun)


def read_announcements(data: bytes) -> list[Announcement]:
    """Return what whole lines say; damaged ones are left out."""
    found: list[Announcement] = []
    for line in data[:FILE_BYTES_MAX].split(b"\n")[:-1]:
        try:
            found.append(_DECODER.decode(line))
        except (ValueError, RecursionError):
            continue
    return found
