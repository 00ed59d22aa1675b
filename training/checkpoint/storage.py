"""Storages of checkpoints: a directory that all ranks share, or a prefix of an object store (`objects`).

A storage holds named files. A file is written whole or not at all, and is durable when `put` returns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from zbmd.transport.errors import UserError
from zbmd.transport.host.files import remove_leftovers, write_atomically

Buffer = bytes | memoryview
URL_SCHEMES: Final = ("s3", "gs", "az")
_URL: Final = re.compile(rf"({'|'.join(URL_SCHEMES)}):/{{1,2}}(?=[^/])(.*)", re.DOTALL)
"""A URL, which has one slash where it has been a `Path`."""
_SECRETS: Final = re.compile(r"[a-z0-9+.-]+:/{1,2}(?:[^/]*(?::.*)?@|.*[?#])", re.IGNORECASE | re.DOTALL)
"""Those with a user before the bucket, or with more than a path after it. A password may have slashes."""


class StoredFile(Protocol):
    """An open file of a storage. It remains readable if the file is removed, where the storage has that."""

    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`. Raises `OSError`, and `ValueError` beyond the end."""
        ...

    def close(self) -> None:
        """Close it. Idempotent."""
        ...


class Storage(Protocol):
    """Named files in one place, for any thread. Names have no slashes."""

    def where(self, name: str = "") -> str:
        """Return the path or URL of a file, or of the storage, for messages and for `--resume`."""
        ...

    def put(self, name: str, fragments: Sequence[Buffer]) -> None:
        """Write a file: durable on return. Raises `UserError`; the file is then as it was."""
        ...

    def get(self, name: str, bytes_max: int) -> bytes:
        """Return a file, or its first `bytes_max` bytes. Raises `OSError`: `FileNotFoundError` if absent."""
        ...

    def open(self, name: str) -> StoredFile:
        """Open a file. Raises `OSError`: `FileNotFoundError` if it is absent."""
        ...

    def names(self) -> list[str]:
        """Return the names of all files, sorted. Raises `OSError`."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises `OSError`."""
        ...

    def tidy(self, name: str) -> None:
        """Remove what a writer of `name` that was killed has left."""
        ...


class Directory:
    """A directory as a storage. It is made when the first file is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def where(self, name: str = "") -> str:
        """See `Storage`."""
        return str(self.path / name)

    def put(self, name: str, fragments: Sequence[Buffer]) -> None:
        """See `Storage`."""
        write_atomically(self.path / name, lambda file: file.writelines(fragments))

    def get(self, name: str, bytes_max: int) -> bytes:
        """See `Storage`."""
        with (self.path / name).open("rb") as file:
            return file.read(bytes_max)

    def open(self, name: str) -> StoredFile:
        """See `Storage`."""
        return _LocalFile(self.path / name)

    def names(self) -> list[str]:
        """See `Storage`."""
        try:
            with os.scandir(self.path) as entries:
                return sorted(entry.name for entry in entries if entry.is_file())
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """See `Storage`."""
        (self.path / name).unlink(missing_ok=True)

    def tidy(self, name: str) -> None:
        """See `Storage`."""
        if self.path.is_dir():
            remove_leftovers(self.path / name)


class _LocalFile:
    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, size: int) -> bytes:
        """See `StoredFile`."""
        parts, left = list[bytes](), size
        while left:
            part = os.pread(self._file.fileno(), left, offset + size - left)
            if not part:
                raise ValueError(f"it ends at byte {self.size}, and byte {offset + size} was expected")
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """See `StoredFile`."""
        self._file.close()


def url_of(where: Path | str) -> str | None:
    """Return the URL of an object store that `where` is, also if it has been made a `Path`; else None."""
    found = _URL.fullmatch(str(where))
    return None if found is None else f"{found[1]}://{found[2].rstrip('/')}"


def storage_of(where: Path | str | Storage) -> Storage:
    """Return the storage at a path or URL. Raises `UserError` for a URL that cannot be used.

    One with credentials is such, and the error does not repeat them: URLs are written to recipes and logs.
    """
    if not isinstance(where, (Path, str)):
        return where
    url = url_of(where)
    if _SECRETS.match(str(where)):
        raise UserError(
            f"cannot use the {str(where).partition(':')[0]}:// URL: expected no user, password, query (?) or "
            "fragment (#). Credentials come only from the environment, such as AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY; revoke those that were in a command."
        )
    if url is None:
        if "://" in str(where):
            known = ", ".join(f"{scheme}://" for scheme in URL_SCHEMES)
            raise UserError(f"cannot use {where}: expected a directory, or a URL that begins with {known}")
        return Directory(Path(where))
    from zbmd.training.checkpoint.objects import ObjectStore  # needs obstore

    return ObjectStore(url)


def folder_of(resumed: Path) -> Path | None:
    """Return the run's directory of a checkpoint to go on from; None if that lies in an object store."""
    if url_of(resumed) is not None:
        return None
    return resumed if resumed.is_dir() else resumed.parent
