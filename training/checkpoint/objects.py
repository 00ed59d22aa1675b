"""A prefix of an object store as a storage: S3 and what speaks its protocol, Google Cloud Storage, Azure.

By `obstore`, which sends large files as the parts of a multipart upload, several at once, and each part again
if that fails. A file is visible once all of it is there. Credentials are those of the environment alone
(`AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`, …), or of the machine's
role; so are endpoints (`ENDPOINTS`).
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from zbmd.training.checkpoint.storage import Buffer, StoredFile
from zbmd.transport.errors import UserError

PART_BYTES: Final = 8 << 20
PARTS_AT_ONCE: Final = 8
REQUEST_S: Final = 60
"""Of one request, such as a part."""
CONNECT_S: Final = 5
RETRIES: Final = 3
RETRY_S: Final = 30
ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""By scheme, the variables of the environment that name another server than the vendor's."""


class ObjectStore:
    """The objects below `url`, such as `s3://bucket/prefix`. Raises `UserError` for an unusable one."""

    def __init__(self, url: str) -> None:
        self._url, self._library = url, _library()
        try:
            self._store = self._library.store.from_url(
                url,
                client_options={
                    "timeout": timedelta(seconds=REQUEST_S),
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    # An endpoint without TLS is the user's own: in the same cluster, or in a test.
                    "allow_http": any(
                        os.environ.get(name, "").startswith("http://")
                        for name in ENDPOINTS.get(url.partition("://")[0], ())
                    ),
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
            )
        except (self._library.exceptions.BaseError, ValueError) as error:
            raise UserError(
                f"cannot use {url}: {_short(error)}. Give s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or "
                "az://CONTAINER/PREFIX, and credentials in the environment."
            ) from error

    def where(self, name: str = "") -> str:
        """See `Storage`."""
        return f"{self._url}/{name}" if name else self._url

    def put(self, name: str, fragments: Sequence[Buffer]) -> None:
        """See `Storage`."""
        size = sum(len(part) for part in fragments)
        try:
            with self._errors():
                self._library.put(
                    self._store,
                    name,
                    b"".join(fragments) if size <= PART_BYTES else (part for part in fragments if len(part)),
                    use_multipart=size > PART_BYTES,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE,
                )
        except OSError as error:
            raise UserError(
                f"cannot write {self.where(name)}: {error}. Check the bucket or container, the "
                "credentials in the environment and the connection."
            ) from error

    def get(self, name: str, bytes_max: int) -> bytes:
        """See `Storage`."""
        with self._errors():
            found = self._library.get(self._store, name)
            return bytes(found.bytes())[:bytes_max]

    def open(self, name: str) -> StoredFile:
        """See `Storage`."""
        with self._errors():
            return _Object(self, name, int(self._library.head(self._store, name)["size"]))

    def names(self) -> list[str]:
        """See `Storage`."""
        with self._errors():
            found = self._library.list_with_delimiter(self._store)
        return sorted(str(each["path"]).rpartition("/")[2] for each in found["objects"])

    def remove(self, name: str) -> None:
        """See `Storage`."""
        try:
            with self._errors():
                self._library.delete(self._store, name)
        except FileNotFoundError:
            return

    def tidy(self, name: str) -> None:
        """Nothing: an upload that was not completed is no object. A rule of the bucket removes its parts."""

    def range(self, name: str, offset: int, size: int) -> bytes:
        """Return bytes of an object. Raises `OSError`."""
        with self._errors():
            return bytes(self._library.get_range(self._store, name, start=offset, length=size))

    @contextmanager
    def _errors(self) -> Generator[None]:
        """Raise what the library raises as `OSError`."""
        try:
            yield
        except FileNotFoundError as error:  # as what the library raises for an absent object or bucket
            raise FileNotFoundError(errno.ENOENT, _short(error)) from error
        except self._library.exceptions.BaseError as error:
            raise OSError(_short(error)) from error


class _Object:
    def __init__(self, store: ObjectStore, name: str, size: int) -> None:
        self._store, self._name, self.size = store, name, size

    def read(self, offset: int, size: int) -> bytes:
        """See `StoredFile`."""
        if offset + size > self.size:
            raise ValueError(f"it ends at byte {self.size}, and byte {offset + size} was expected")
        return self._store.range(self._name, offset, size) if size else b""

    def close(self) -> None:
        """See `StoredFile`."""


def _library() -> Any:
    try:
        for name in ("obstore.store", "obstore.exceptions"):
            importlib.import_module(name)
        return importlib.import_module("obstore")
    except ImportError as error:
        raise UserError('checkpoints in object stores need obstore: pip install "zbmd[objects]".') from error


def _short(error: BaseException) -> str:
    """Return the first line of an error of the library, which may have many, without a body in XML."""
    return str(error).strip().split("\n", 1)[0].partition(": <?xml")[0].rstrip(".")[:300]
