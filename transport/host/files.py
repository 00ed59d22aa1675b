"""Files of this process: written atomically, locked directories, JSON lines, and the directories of a user.

Those are found by the XDG specification. A user of a container may have a number and neither a name nor a
home: then nothing says where.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import structlog

from zbmd.transport.errors import UserError

LineT = TypeVar("LineT")


log: Final = structlog.stdlib.get_logger("zbmd.files")

DAMAGED_NAMED_MAX = 5

RANDOM_BYTES: Final = 8
"""In the name of a file that is not finished."""


def read_json_lines(
    path: Path, decode: Callable[[bytes], LineT], *, bytes_max: int, what: str, advice: str
) -> Iterator[LineT]:
    """Yield each line, decoded by `decode`. A last line that was cut off by a kill is left out.

    Lines for which `decode` raises are left out, too, and reported to the log. `what`, `advice`: words for
    error messages: what such a file is, and what to do. Raises `UserError` if the file cannot be read, or is
    larger than `bytes_max`.
    """
    try:
        if path.stat().st_size > bytes_max:
            raise UserError(f"{path} is larger than any {what} written: {advice}.")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    yield from decode_json_lines(data, decode, source=str(path))


def decode_json_lines(data: bytes, decode: Callable[[bytes], LineT], *, source: str) -> Iterator[LineT]:
    """Yield each line of `data`; see `read_json_lines`. source: where it is from, for the log."""
    lines, damaged = data.split(b"\n"), list[int]()
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield decode(line)
        except (ValueError, RecursionError):  # text that is no UTF-8 is no MsgspecError
            if number < len(lines):
                damaged.append(number)
    if damaged:
        first = ", ".join(map(str, damaged[:DAMAGED_NAMED_MAX]))
        log.warning("left out lines that are damaged", path=source, count=len(damaged), first=first)


# What file systems without O_TMPFILE answer: overlay and 9p of older kernels, NFS, vfat.
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""A full disk, a full quota, and a limit on the size of a file (`ulimit -f`)."""


class DiskFull(UserError):
    """A file did not fit: the disk, a quota or a limit on file sizes is full."""


class DirectoryTaken(UserError):
    """The directory holds another run, or one is under way there."""


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file `path` by what `write(file)` writes: durable on return, or `path` is unchanged.

    The data goes to an unnamed file first, if the file system supports that, so that a kill during the write
    leaves nothing behind. Where it does not, and in the moment in which an existing file is replaced, a
    killed writer leaves `.<name>.<16 hex digits>`, which the next write of `path` removes. Raises `DiskFull`
    for a full disk, and `UserError` for a directory that cannot be created or written.
    """
    try:
        replace_file(path, write)
    except OSError as error:
        raise _explained(path, error) from error


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """`write_atomically`, for callers that explain an OSError themselves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove_leftovers(path)
        with _replacement(path, directory) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_leftovers(path: Path) -> None:
    """Remove the unfinished files of writers of `path` that were killed; a living writer holds its locked."""
    unfinished = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{{2 * RANDOM_BYTES}}}")
    with os.scandir(path.parent) as entries:
        found = [entry.path for entry in entries if unfinished.fullmatch(entry.name)]
    for name in found:
        with contextlib.suppress(OSError), open(name, "r+b") as file:  # another writer may be faster
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name)


def unusable(directory: Path, error: OSError) -> UserError:
    """Return the error of a directory that cannot be created or opened."""
    return UserError(
        f"cannot use {directory} for the run: {error.strerror}. Name a directory that you may write to with "
        "--out."
    )


@contextlib.contextmanager
def locked_directory(directory: Path) -> Generator[None]:
    """Create the directory if it is missing, and let one process of this host at a time into the block.

    Raises `UserError` if it cannot be created or opened.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise unusable(directory, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _replacement(path: Path, directory: int) -> Generator[BinaryIO]:
    """Yield a new file that replaces `path` at the end of the block, or is removed if the block raises."""
    name = path.parent / f".{path.name}.{secrets.token_hex(RANDOM_BYTES)}"
    unnamed = _unnamed(path.parent)
    with unnamed or _locked(name) as file:
        try:
            yield file
            if unnamed:
                _lock(file)
                source = f"/proc/self/fd/{file.fileno()}"
                # With a directory given, link() is linkat(AT_SYMLINK_FOLLOW), which this needs.
                try:
                    os.link(source, path.name, dst_dir_fd=directory)
                    return
                except FileExistsError:
                    os.link(source, name.name, dst_dir_fd=directory)
            os.replace(name, path)
        except BaseException:
            name.unlink(missing_ok=True)
            raise


def _locked(name: Path) -> BinaryIO:
    """Create a file and lock it, again if another writer took it for a leftover between the two."""
    while True:  # each time, another writer has removed it: bounded by their number
        file = name.open("xb")
        _lock(file)
        with contextlib.suppress(FileNotFoundError):
            if name.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()


def _lock(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # a file system without locks: there nobody removes leftovers
        fcntl.flock(file, fcntl.LOCK_EX)


def _unnamed(directory: Path) -> BinaryIO | None:
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in _NO_UNNAMED_FILES and directory.is_dir():
            return None
        raise
    return os.fdopen(descriptor, "wb")


def _explained(path: Path, error: OSError) -> UserError:
    if error.errno in DISK_FULL_ERRNOS:
        return DiskFull(
            f"cannot write {path}: the disk is full ({error.strerror}). Free some space, or "
            "choose another directory; an existing file is unchanged."
        )
    return UserError(f"cannot write {path}: {error.strerror}. Choose a directory that you may write to.")


class UserFiles(Enum):
    """A kind of files: the variable that says where they are, and where they are below a home otherwise."""

    CONFIG = "XDG_CONFIG_HOME", ".config"
    STATE = "XDG_STATE_HOME", ".local/state"
    CACHE = "XDG_CACHE_HOME", ".cache"


def user_directory(kind: UserFiles, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return our directory of a kind, which need not exist; None if the user has no home to put it in."""
    variable, below_home = kind.value
    given = (os.environ if environ is None else environ).get(variable, "")
    if os.path.isabs(given):  # the specification: ignore a relative one
        return Path(given) / "zbmd"
    home = os.path.expanduser("~")
    return Path(home) / below_home / "zbmd" if os.path.isabs(home) else None


def need_directory(
    kind: UserFiles,
    environ: Mapping[str, str],
    *,
    what: str,
    variable: str,
    error: type[UserError] = UserError,
) -> Path:
    """Return our directory of a kind. Raises `error`, which names the variable to set for `what`."""
    found = user_directory(kind, environ)
    if found is None:
        raise error(f"there is no home directory to keep {what} in: set {variable} to a path")
    return found
