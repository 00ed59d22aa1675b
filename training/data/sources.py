"""Files that training data is made of: listed once for a run, in a record that all of its processes read.

Without the record a rank that starts later, or a run that is resumed, would list other files: the run's own,
or others that have come. A directory is listed without the run's own directory in it.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from zbmd.transport.errors import UserError
from zbmd.transport.host.files import locked_directory, write_atomically

SOURCES_MAX = 100_000
# Third-party packages differ from machine to machine, and tests are mostly tables of cases.
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
RECORD_NAME: Final = "data.json"
RECORD_FORMAT: Final = 1
RECORD_BYTES_MAX: Final = 1 << 28

log: Final = structlog.stdlib.get_logger("zbmd.data")


class Source(msgspec.Struct, frozen=True):
    """One input file, with what identifies its content without reading it."""

    path: str
    nbytes: int
    modified_ns: int


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of a run. data: as it was given; job: of the ranks that listed them, 0 for none."""

    format: int
    data: str
    job: int
    sources: list[Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The run whose data is prepared. job: of its ranks, 0 for none; begun: whether a run has begun in the
    directory; resumed: the checkpoint that it goes on from.
    """

    job: int = 0
    begun: bool = False
    resumed: Path | None = None


NEW_RUN: Final = RunData()


def sources_for(data: str | None, directory: Path, run: RunData) -> list[Source]:
    """Return the sources of a run in `directory`: those in its record, or in that of the run it goes on from.

    data: a file, a directory, a glob, or None for the standard library. Raises `UserError` as
    `find_sources`.
    """
    if data is None:
        return _stdlib_sources()
    found = _recorded_for(data, directory, run)
    if found is None and run.resumed is not None:
        found = _recorded(data, run.resumed if run.resumed.is_dir() else run.resumed.parent)
    return find_sources(data, beside=directory) if found is None else found.sources


@contextmanager
def settled_sources(
    data: str | None, directory: Path, sources: list[Source], run: RunData
) -> Generator[list[Source]]:
    """Let one process of this host at a time make data of `sources`, which are recorded at the end.

    Yields what is recorded, if another process of the run has listed them first. Raises `UserError` as
    `locked_directory`.
    """
    with locked_directory(directory):
        found = None if data is None else _recorded_for(data, directory, run)
        yield sources if found is None else found.sources
        if data is not None and found is None:
            _record(data, directory, sources, run)


def _record(data: str, directory: Path, sources: list[Source], run: RunData) -> None:
    record = SourceRecord(format=RECORD_FORMAT, data=data, job=run.job, sources=sources)
    text = json.dumps(msgspec.to_builtins(record))  # which can write names that are no UTF-8
    write_atomically(directory / RECORD_NAME, lambda file: file.write(text.encode()))


def changed(sources: Sequence[Source]) -> str:
    """Return what has happened to the first of the sources that is not as it was listed; empty if all are."""
    for source in sources:
        try:
            status = os.stat(source.path)
        except OSError as error:
            return f"{source.path} is gone ({error.strerror})"
        if (status.st_size, status.st_mtime_ns) != (source.nbytes, source.modified_ns):
            return f"{source.path} has changed: {source.nbytes:,} bytes then, {status.st_size:,} now"
    return ""


def require_unchanged(sources: Sequence[Source]) -> None:
    """Raise `UserError` that names a source which has changed since it was listed: it has to be read."""
    what = changed(sources)
    if what:
        raise UserError(
            f"{what}, and the run needs it as it was: put the file back, or begin a run with another --out."
        )


def report_changed(sources: Sequence[Source]) -> None:
    """Say which source has changed, where the run has a copy of its own."""
    what = changed(sources)
    if what:
        log.warning("the run goes on with its copy of the data", changed=what)


def _recorded_for(data: str, directory: Path, run: RunData) -> SourceRecord | None:
    """Return the record in `directory`, if it is of this run: of its job, or of one that has begun there.

    A record that a refused run has left is not followed.
    """
    found = _recorded(data, directory)
    is_ours = found is not None and (run.begun or 0 < found.job == run.job)
    return found if is_ours else None


def _recorded(data: str, directory: Path) -> SourceRecord | None:
    path = directory / RECORD_NAME
    try:
        if path.stat().st_size > RECORD_BYTES_MAX:
            return None
        found = msgspec.convert(json.loads(path.read_bytes()), SourceRecord)
    except (OSError, ValueError, RecursionError):  # text that is no UTF-8 is no MsgspecError
        return None
    fits = (found.format, found.data) == (RECORD_FORMAT, data) and 0 < len(found.sources) <= SOURCES_MAX
    return found if fits and all(source.nbytes >= 0 for source in found.sources) else None


def find_sources(data: str, *, beside: Path | None = None) -> list[Source]:
    """Return the files that `data` (a file, a directory or a glob) names, in the order of their paths.

    beside: a directory in it that is left out. Raises `UserError` if there is none, if there are more than
    `SOURCES_MAX`, or if one cannot be read.
    """
    given, own = Path(data), None if beside is None else beside.resolve()
    if given.is_file():
        return [_source(given)]
    if given.is_dir():
        is_own = own is not None and own == given.resolve()
        paths = _files_below(given, frozenset({"__pycache__"}), suffix="", own=None if is_own else own)
        if is_own and paths:
            raise UserError(f"{data} is the directory of the run, and of its data: give another --out.")
    elif glob.has_magic(data):
        paths = _matching(data, own)
    else:
        raise UserError(f'--data "{data}" does not exist: check the path.')
    if not paths:
        raise UserError(
            f'no file matches "{data}": check the path or pattern given to --data, and quote a pattern so '
            "that it reaches us."
        )
    if len(paths) > SOURCES_MAX:
        raise UserError(f'"{data}" matches {len(paths)} files, more than {SOURCES_MAX}: narrow it.')
    return [_source(path) for path in sorted(paths, key=os.fsencode)]


def _matching(pattern: str, own: Path | None) -> list[Path]:
    """Return the files that match, without those below `own`, unless the pattern says a place there."""
    paths = [path for match in glob.iglob(pattern, recursive=True) if (path := Path(match)).is_file()]
    parts = Path(pattern).parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    if own is None or Path(*parts[:fixed]).resolve().is_relative_to(own):
        return paths
    return [path for path in paths if not path.resolve().is_relative_to(own)]


def _stdlib_sources() -> list[Source]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = _files_below(root, STDLIB_SKIPPED, suffix=".py")
    if not paths:
        raise UserError(
            f"this Python has no source files in {root} to train on: give text of your own with --data."
        )
    return [_source(path) for path in sorted(paths, key=os.fsencode)]


def _files_below(root: Path, skipped: frozenset[str], *, suffix: str, own: Path | None = None) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error.strerror)

    paths: list[Path] = []
    for directory, names, files in os.walk(root, onerror=refuse):
        if own is not None and Path(directory).resolve() == own:
            names[:] = []
            continue
        names[:] = [name for name in names if name not in skipped]
        found = (Path(directory, name) for name in files if name.endswith(suffix))
        paths += [path for path in found if path.is_file()]
    return paths


def _source(path: Path) -> Source:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error.strerror) from error
    if not os.access(path, os.R_OK):
        raise unreadable(path, os.strerror(errno.EACCES))
    return Source(str(path.absolute()), status.st_size, status.st_mtime_ns)


def unreadable(path: object, why: str | None) -> UserError:
    """Return the error for a source that cannot be read."""
    return UserError(f"cannot read {path}: {why}. Give --data files that exist and that you may read.")


def inputs_digest(sources: Sequence[Source], *asked: int | str) -> str:
    """Return the digest that identifies data made of `sources` with the options `asked`."""
    rows = [(os.fsencode(source.path), source.nbytes, source.modified_ns) for source in sources]
    return hashlib.sha256(msgspec.msgpack.encode((*asked, rows))).hexdigest()
