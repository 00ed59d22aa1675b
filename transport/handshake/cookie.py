"""The cookie: the secret that processes of one user share, made once and kept in a file of mode 0600.

To join processes on several hosts into one cluster, copy the file: `scp -p` it to the same place there, or
point `ZBMD_COOKIE_FILE` at it.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from zbmd.transport.errors import UserError
from zbmd.transport.host.files import UserFiles, need_directory

COOKIE_BYTES_MIN = 32
COOKIE_BYTES_MAX = 1024
MADE_BYTES = 32
"""Random bytes in a cookie that we make; written in hexadecimal."""
_COOKIE = re.compile(rb"[!-~]{%d,%d}" % (COOKIE_BYTES_MIN, COOKIE_BYTES_MAX))


class CookieError(UserError):
    """The cookie file cannot be used as it is; the text says what to do."""


def cookie_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cookie's path: `$ZBMD_COOKIE_FILE`, else `zbmd/cookie` in `$XDG_CONFIG_HOME` or `~/.config`.

    Raises `CookieError` if there is no home directory to put it in.
    """
    if given := environ.get("ZBMD_COOKIE_FILE"):
        return Path(given)
    directory = need_directory(
        UserFiles.CONFIG, environ, what="the cookie", variable="ZBMD_COOKIE_FILE", error=CookieError
    )
    return directory / "cookie"


_of_the_job: bytes | None = None


def use_cookie(cookie: bytes | None) -> None:
    """Have this process use a cookie that was made for its job, whatever the file holds; None: the file's.

    Raises `CookieError` if it is none.
    """
    global _of_the_job
    if cookie is not None and not _COOKIE.fullmatch(cookie):
        raise CookieError("what came with the job is no cookie: all ranks of a job need the same release")
    _of_the_job = cookie


def load_or_create_cookie(path: Path | str | None = None) -> bytes:
    """The cookie, `COOKIE_BYTES_MIN` to `COOKIE_BYTES_MAX` bytes; made now if there is none.

    path: default `cookie_path()`. However many processes call this at once, and even if one of them is
    killed meanwhile, all get the same cookie. Raises `CookieError` if others may read the file, if it
    belongs to another user, if it holds no cookie, or if it can be neither read nor made.
    """
    if path is None and _of_the_job is not None:
        return _of_the_job
    file = cookie_path() if path is None else Path(path)
    return _load_or_create(file)


def store_cookie(cookie: bytes, path: Path | str | None = None) -> bytes:
    """Put a cookie that came from another host in its place, and return it; what is there stays.

    Raises `CookieError` if another cookie is there already, and as `load_or_create_cookie`.
    """
    file = cookie_path() if path is None else Path(path)
    if not _COOKIE.fullmatch(cookie):
        raise CookieError("what came is no cookie: run `zbmd-node token` on a member again")
    found = _load_or_create(file, cookie)
    if not hmac.compare_digest(found, cookie):
        raise CookieError(
            f"the cookie file {file} holds the cookie of another cluster. To join this one instead, remove "
            "it and try again; to be in both, set ZBMD_COOKIE_FILE to another path for this one."
        )
    return found


def _load_or_create(file: Path, cookie: bytes | None = None) -> bytes:
    try:
        return _load(file) or _create(file, cookie)
    except OSError as error:
        raise CookieError(
            f"the cookie file {file} can be neither read nor made ({error.strerror}): make its directory "
            "writable, or set ZBMD_COOKIE_FILE to a path that is"
        ) from error


def _load(file: Path) -> bytes:
    """The cookie in `file`; empty if there is none yet."""
    try:
        # Not to be held up by a FIFO that somebody put there.
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return b""
    try:
        return _read(fd, file)
    finally:
        os.close(fd)


def _create(file: Path, cookie: bytes | None = None) -> bytes:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
    try:
        # Of all who found no cookie one writes it; if it is killed before, the lock goes to the next.
        fcntl.flock(fd, fcntl.LOCK_EX)
        if known := _read(fd, file):
            return known
        cookie = cookie or secrets.token_hex(MADE_BYTES).encode()
        if os.write(fd, cookie + b"\n") <= len(cookie):
            os.ftruncate(fd, 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
        return cookie
    finally:
        os.close(fd)


def _read(fd: int, file: Path) -> bytes:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise CookieError(f"the cookie file {file} is no regular file: remove it; a new one will be made")
    if status.st_uid != os.geteuid():
        raise CookieError(
            f"the cookie file {file} belongs to uid {status.st_uid}, this process to uid {os.geteuid()}: "
            "set ZBMD_COOKIE_FILE to a file of your own, or run as its owner"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise CookieError(
            f"the cookie file {file} is open to other users (mode {stat.S_IMODE(status.st_mode):04o}): "
            f"if nobody can have read it, `chmod 600 {file}`; else delete it on every host"
        )
    cookie = os.pread(fd, COOKIE_BYTES_MAX + 2, 0).strip()
    if status.st_size and not _COOKIE.fullmatch(cookie):
        raise CookieError(
            f"the cookie file {file} holds no cookie ({COOKIE_BYTES_MIN} to {COOKIE_BYTES_MAX} printable "
            "characters): copy it again from where it was made, or delete it and a new one will be made"
        )
    return cookie
