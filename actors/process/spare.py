"""A spare: a process that has begun its script, and waits where the script needs a rank.

The template forks it with one end of a socket; its host has the other. The spare sends `Waiting` where its
script needs a rank. Once a rank is lost the host sends `Assign`, with the memory of that rank beside it. The
spare answers `Accepted`, and continues as that rank when the host sends `Proceed`. By then the host knows
this process as the rank, so it never refuses its link as that of an unknown process. A host that ends, or
needs no spare any more, closes its end, and the spare exits.

Until then the variables that say which rank a process is are absent, and reading one raises `RankUnknown`:
a default instead, such as `os.environ.get("RANK", 0)`, would make this process a second rank 0.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final, TypeAlias, TypeVar

import msgspec

from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.host.process import set_process_name
from zbmd.transport.memory.kept import KEPT_FDS_VARIABLE

SPARE_NAME: Final = "zbmd-spare"
SPARE_RANK: Final = -1
"""Stands for a rank's number in the names of spares: with their template, and of their output."""
RANK_VARIABLES: Final = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
        *("TORCHELASTIC_RESTART_COUNT", "ZBMD_INCARNATION"),
    }
)
"""Variables that differ between the ranks of a host, or between the processes of a rank."""
PACKET_BYTES_MAX: Final = 128 * 1024
FDS_MAX: Final = 3
"""Beside an `Assign`: standard input, the memory of the rank, and its process before, if that still ends."""


class RankUnknown(UserError):
    """This process is a spare, and its script asked which rank it is before it has a rank."""


class Assign(msgspec.Struct, frozen=True, array_like=True, tag="assign"):
    """The host makes a spare a rank. keeps: descriptors that `KEPT_FDS_VARIABLE` is about; the
    first one before them is standard input, if there is one more."""

    rank: int
    incarnation: int
    environment: dict[str, str]
    keeps: int = 0


class Proceed(msgspec.Struct, frozen=True, array_like=True, tag="proceed"):
    """The host knows this process as the rank from now on."""


class Waiting(msgspec.Struct, frozen=True, array_like=True, tag="waiting"):
    """The script of a spare asks for a rank, and waits."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The spare has all that the rank needs."""


ToSpare: TypeAlias = Assign | Proceed
OfSpare: TypeAlias = Waiting | Accepted
_to_spare: msgspec.msgpack.Decoder[ToSpare] = msgspec.msgpack.Decoder(ToSpare)
_of_spare: msgspec.msgpack.Decoder[OfSpare] = msgspec.msgpack.Decoder(OfSpare)
encode = msgspec.msgpack.Encoder().encode
MessageT = TypeVar("MessageT", Assign, Proceed)


def decode_to_spare(packet: bytes) -> ToSpare:
    """Decode what a host sends. Raises `RemoteProtocolError`."""
    try:
        return _to_spare.decode(packet)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"the host sent its spare an invalid message: {error}") from error


def decode_of_spare(packet: bytes) -> OfSpare:
    """Decode what a spare sends, whose script may write there too. Raises `RemoteProtocolError`."""
    try:
        return _of_spare.decode(packet)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a spare sent an invalid message: {error}") from error


_Environ: Final = type(os.environ)


class _WithoutRank(_Environ):  # type: ignore[misc,valid-type]
    """The environment of a spare."""

    def __getitem__(self, name: str) -> str:
        if name in RANK_VARIABLES:
            raise RankUnknown(
                f"{name}: this process is a spare (--spare-ranks) and has no rank yet. Call zbmd.join(), "
                "zbmd.init() or torch.distributed.init_process_group() first, where a spare waits for its "
                f"rank, and read {name} after that; or start the run without --spare-ranks."
            )
        found: str = super().__getitem__(name)
        return found


class _HostSocket:
    """This process's end of the socket. pid: of the spare, whose forked children have a copy."""

    def __init__(self, fd: int) -> None:
        self.socket, self.pid, self._asked = socket.socket(fileno=fd), os.getpid(), False

    def ask(self) -> None:
        """Tell the host that the script waits; once."""
        if os.getpid() != self.pid:
            raise UserError(
                f"this process ({os.getpid()}) was forked by the spare {self.pid}, which waits for a rank; a "
                "rank is one process. Call this in the spare itself."
            )
        if not self._asked:
            self._asked = True
            self._send(Waiting())

    def take(self) -> None:
        """Wait for a rank, and be it. Raises `SystemExit` if none is needed."""
        self.socket.setblocking(True)  # libuv has changed that, if a loop has waited here
        assigned, fds = self._receive(Assign)
        os.environ.__class__ = _Environ
        os.environ.update(assigned.environment)
        kept = fds[len(fds) - assigned.keeps :]
        if kept:
            os.environ[KEPT_FDS_VARIABLE] = " ".join(map(str, kept))
        for stdin_fd in fds[: len(fds) - assigned.keeps]:
            os.dup2(stdin_fd, 0)
            os.close(stdin_fd)
        set_process_name(f"zbmd-rank{assigned.rank}")
        self._send(Accepted())
        self._receive(Proceed)
        self.socket.close()

    def _send(self, message: OfSpare) -> None:
        try:
            self.socket.send(encode(message))
        except OSError:
            raise SystemExit(0) from None

    def _receive(self, kind: type[MessageT]) -> tuple[MessageT, list[int]]:
        try:
            packet, fds, _, _ = socket.recv_fds(
                self.socket, PACKET_BYTES_MAX, FDS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            packet, fds = b"", []
        if not packet:
            raise SystemExit(0)  # the run ends, and had no use for this process
        message = decode_to_spare(packet)
        if not isinstance(message, kind):
            raise RemoteProtocolError(f"the host sent its spare {type(message).__name__} out of turn")
        return message, fds


_host: _HostSocket | None = None


def begin(fd: int) -> None:
    """Be a spare, whose host is at the other end of `fd`. Called before the script begins."""
    global _host
    for name in RANK_VARIABLES:  # those of a rank that has started this launcher
        os.environ.pop(name, None)
    os.environ.__class__ = _WithoutRank
    _host = _HostSocket(fd)


def is_spare() -> bool:
    """Return whether this process waits, or would wait, for a rank."""
    return _host is not None


def wait_for_rank() -> None:
    """Return once this process has a rank: at once, if it is no spare. Blocks.

    Raises `SystemExit` in a spare that is not needed any more, and `UserError` in its children.
    """
    global _host
    if _host is not None:
        _host.ask()
        _host.take()
        _host = None


async def rank_given() -> None:
    """Return once this process has a rank, as `wait_for_rank`; the event loop goes on meanwhile."""
    if _host is None:
        return
    _host.ask()
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    fd = _host.socket.fileno()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)
    wait_for_rank()
