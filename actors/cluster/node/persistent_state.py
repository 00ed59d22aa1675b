"""The state that a node keeps between incarnations: its id, its last incarnation, addresses of members.

It is stored in the state directory, mode 0700: `$ZBMD_STATE_DIR`, else `zbmd/HOSTNAME` in `$XDG_STATE_HOME`
or `~/.local/state`, so that hosts that share a home directory have one each. One node at a time uses it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Protocol, Self, TypeVar

import msgspec

from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import UserFiles, need_directory, replace_file

STATE_VARIABLE: Final = "ZBMD_STATE_DIR"
STATE_BYTES_MAX: Final = 1 << 16
ADDRESSES_KEPT_MAX: Final = 16
"""Addresses of members that are remembered."""
ID_BITS: Final = 48
"""Of a node's id: a thousand random ones are all different but once in 10^8 clusters."""
INCARNATION_MAX: Final = (1 << 63) - 1

_Address = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]


class StateError(UserError):
    """The state directory is unusable; the message says what to do."""


class StateBusy(StateError):
    """Another running node uses this state directory."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file `node.json`. join_addresses: of other members; empty once the node has left its cluster."""

    id: Annotated[int, msgspec.Meta(ge=1, lt=1 << ID_BITS)]
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=INCARNATION_MAX - 1)]
    join_addresses: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=ADDRESSES_KEPT_MAX)] = (
        msgspec.field(default=(), name="doors")
    )


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """The file `running.json`: the running node, for commands on this host."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    address: _Address


def state_path(environ: Mapping[str, str] = os.environ, *, hostname: str | None = None) -> Path:
    """Return the state directory. Raises `StateError` if there is no home directory to put it in."""
    if given := environ.get(STATE_VARIABLE):
        return Path(given)
    directory = need_directory(
        UserFiles.STATE, environ, what="the node's state", variable=STATE_VARIABLE, error=StateError
    )
    return directory / (hostname or socket.gethostname() or "localhost")


class NodeStateStore(Protocol):
    """Stores what a node knows of its earlier incarnations."""

    @property
    def id(self) -> int:
        """The node's id, the same in all incarnations."""
        ...

    @property
    def join_addresses(self) -> tuple[str, ...]:
        """Addresses of the other members; empty if the node left its cluster or was alone."""
        ...

    def new_incarnation(self) -> NodeKey:
        """Return the key of a new incarnation."""
        ...

    def remember(self, join_addresses: Iterable[str]) -> None:
        """Store the addresses of the other members."""
        ...

    def running_at(self, address: str) -> None:
        """Publish this node's address to commands on this host."""
        ...

    def close(self) -> None:
        """Release the store. Idempotent."""
        ...


class EphemeralNodeState:
    """State of a node that exists for one job: kept in memory only."""

    def __init__(self, node_id: int) -> None:
        self._key = NodeKey(node_id, 0)

    @property
    def id(self) -> int:
        """See `NodeStateStore`."""
        return self._key.id

    @property
    def join_addresses(self) -> tuple[str, ...]:
        """See `NodeStateStore`: the first incarnation knows no members."""
        return ()

    def new_incarnation(self) -> NodeKey:
        """See `NodeStateStore`."""
        self._key = NodeKey(self._key.id, self._key.incarnation + 1)
        return self._key

    def remember(self, join_addresses: Iterable[str]) -> None:
        """See `NodeStateStore`: nothing is kept."""

    def running_at(self, address: str) -> None:
        """See `NodeStateStore`: clients are given the address."""

    def close(self) -> None:
        """See `NodeStateStore`."""


class NodeState:
    """The state directory, locked for one node until `close`: a `NodeStateStore` that survives the process.

    Created by `open`. Every change is on disk when the call returns.
    """

    def __init__(self, directory: Path, lock_fd: int, kept: NodeRecord) -> None:
        self.directory = directory
        self._lock_fd = lock_fd
        self._kept = kept

    @classmethod
    def open(cls, directory: Path | None = None) -> Self:
        """Lock the directory, made if there is none. Raises `StateBusy` and `StateError`."""
        where = directory or state_path()
        try:
            where.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check(where)
            fd = os.open(where / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(where, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = _read(where / "node.json", NodeRecord) or NodeRecord(
                id=secrets.randbelow((1 << ID_BITS) - 1) + 1, incarnation=0
            )
        except BlockingIOError:
            os.close(fd)
            running = read_running(where)
            who = f"pid {running.pid} at {running.address}" if running is not None else "another node"
            raise StateBusy(
                f"{who} runs with the state directory {where} already. Stop it first (zbmd-node down), or "
                f"give this node a directory of its own: {STATE_VARIABLE}=DIR."
            ) from None
        except OSError as error:
            os.close(fd)
            raise _unusable(where, error) from error
        except BaseException:
            os.close(fd)
            raise
        return cls(where, fd, kept)

    @property
    def id(self) -> int:
        """The node's id, the same in all incarnations."""
        return self._kept.id

    @property
    def join_addresses(self) -> tuple[str, ...]:
        """Addresses of the other members; empty if the node left its cluster or was alone."""
        return self._kept.join_addresses

    def new_incarnation(self) -> NodeKey:
        """Return the key of a new incarnation. Raises `StateError` if it cannot be written to disk."""
        self._keep(msgspec.structs.replace(self._kept, incarnation=self._kept.incarnation + 1))
        return NodeKey(self._kept.id, self._kept.incarnation)

    def remember(self, join_addresses: Iterable[str]) -> None:
        """Store the addresses of at most `ADDRESSES_KEPT_MAX` other members."""
        kept = tuple(list(dict.fromkeys(join_addresses))[:ADDRESSES_KEPT_MAX])
        if kept != self._kept.join_addresses:
            self._keep(msgspec.structs.replace(self._kept, join_addresses=kept))

    def running_at(self, address: str) -> None:
        """Publish this node's address to commands on this host."""
        self._write("running.json", Running(pid=os.getpid(), address=address))

    def close(self) -> None:
        """Unlock the directory. Idempotent."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                (self.directory / "running.json").unlink()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _keep(self, kept: NodeRecord) -> None:
        self._write("node.json", kept)
        self._kept = kept

    def _write(self, name: str, what: msgspec.Struct) -> None:
        """Replace a file atomically."""
        line = msgspec.json.encode(what) + b"\n"
        try:
            replace_file(self.directory / name, lambda file: file.write(line))
        except OSError as error:
            raise _unusable(self.directory, error) from error


def read_running(directory: Path) -> Running | None:
    """Return the running node that uses the directory, or None. Raises `StateError`."""
    return _read(directory / "running.json", Running)


_FileT = TypeVar("_FileT", NodeRecord, Running)


def _read(path: Path, kind: type[_FileT]) -> _FileT | None:
    try:
        with path.open("rb") as file:
            data = file.read(STATE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path.parent, error) from error
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(
            f"{path} does not hold a node's state ({error}). Restore the file, or remove {path.parent}: the "
            "node then starts with a new id."
        ) from None


def _check(where: Path) -> None:
    status = where.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if status.st_uid != os.geteuid():
        raise StateError(
            f"the state directory {where} belongs to uid {status.st_uid}, this process to uid "
            f"{os.geteuid()}: set {STATE_VARIABLE} to a directory of your own"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise StateError(
            f"the state directory {where} can be written by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o}): `chmod 700 {where}`"
        )


def _unusable(where: Path, error: OSError) -> StateError:
    return StateError(
        f"the state directory {where} cannot be used ({error.strerror}): make it writable, or set "
        f"{STATE_VARIABLE} to a directory that is"
    )
