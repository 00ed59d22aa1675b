"""Find the snapshot processes of this user on this host, and ask them."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import select
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.actors.snapshots.messages import (
    PACKET_BYTES_MAX,
    Answer,
    Attach,
    Drop,
    Dropped,
    JobIdentity,
    Look,
    Memory,
    Refused,
    Request,
    Standing,
    Worked,
    decode_answer,
    encode,
)
from zbmd.transport.errors import PeerLost, RemoteProtocolError, UserError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.host.process import peer_of

ASK_S_MAX: Final = 2.0
HOLDERS_MAX: Final = 256
"""Listed at most."""
_TAG_BYTES: Final = 4
_LABEL: Final = b"zbmd snapshots address"


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderAddress:
    """The abstract socket of a holder. tag: of the run's command line; job: its number."""

    name: str
    tag: str
    job: int


@dataclass(slots=True, kw_only=True)
class Snapshots:
    """The contents of a holder. memory: descriptors by rank, which the caller closes (`close`)."""

    standing: Standing
    pid: int
    memory: dict[int, int]

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        while self.memory:
            os.close(self.memory.popitem()[1])


def tag_of(run: str) -> str:
    """Return the part of an address that stands for a directory and a command line."""
    return hashlib.blake2b(run.encode(), digest_size=8).hexdigest()


def address_of(tag: str, job: int) -> str:
    """Return the address of the holder of a job."""
    return f"{_prefix()}-{tag}-{job:016x}"


def find_holders(*, tag: str | None = None, job: int | None = None) -> list[HolderAddress]:
    """List this user's holders on this host, of one run or job or of all, from /proc/net/unix."""
    wanted = re.compile(f" @({re.escape(_prefix())}-([0-9a-f]{{16}})-([0-9a-f]{{16}}))$")
    lines = Path("/proc/net/unix").read_text().splitlines()
    matches = [match for line in lines if (match := wanted.search(line))]
    found = {HolderAddress(name=one[1], tag=one[2], job=int(one[3], 16)) for one in matches}
    kept = [one for one in found if tag in (None, one.tag) and job in (None, one.job)]
    return sorted(kept, key=lambda one: one.name)[:HOLDERS_MAX]


def _prefix() -> str:
    digest = hmac.digest(load_or_create_cookie(), _LABEL, "sha256")
    return f"zbmd-{os.getuid()}-{digest[:_TAG_BYTES].hex()}-snapshots"


class HolderLine:
    """A connection to the holder at `address`. Raises `PeerLost` if none is there."""

    def __init__(self, address: str) -> None:
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.line.settimeout(ASK_S_MAX)
            self.line.connect(f"\0{address}")
            self.pid, uid = peer_of(self.line)
            if uid != os.getuid():
                raise PeerLost("the snapshot process", f"user {uid} has its address")
        except OSError as error:
            self.line.close()
            raise _gone(error) from None
        except BaseException:
            self.line.close()
            raise

    def ask(self, request: Request) -> Answer:
        """Send a request, and return the answer. Raises `PeerLost`, `RemoteProtocolError`."""
        self.send(request)
        return self._receive()[0]

    def send(self, request: Request, memory: int | None = None) -> None:
        """Send a request, with a memfd if one is given. Raises `PeerLost`."""
        try:
            fds = [] if memory is None else [memory]
            socket.send_fds(self.line, [encode(request)], fds, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise _gone(error) from None

    def worked(self, wait_s: float) -> bytes | None:
        """Return the next progress of work; None if there is none within `wait_s`.

        Raises `PeerLost`, `RemoteProtocolError`.
        """
        if not select.select([self.line], [], [], wait_s)[0]:
            return None
        answer, fds = self._receive()
        _close(fds)
        if not isinstance(answer, Worked):
            raise RemoteProtocolError(f"the snapshot process sent {type(answer).__name__}, not its progress")
        return answer.payload

    def kill(self) -> None:
        """Kill the process, which does not answer: what it has not written yet must not be written later."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(self.pid)
            try:
                if peer_of(self.line)[0] == self.pid:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)

    def _receive(self) -> tuple[Answer, list[int]]:
        try:
            packet, fds, _, _ = socket.recv_fds(self.line, PACKET_BYTES_MAX + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise _gone(error) from None
        if not packet:
            raise PeerLost("the snapshot process", "it has ended")
        try:
            return decode_answer(packet), fds
        except BaseException:
            _close(fds)
            raise

    def snapshots(self, request: Attach | Look) -> Snapshots | Refused:
        """Ask for what is held. Raises `PeerLost`, `RemoteProtocolError`."""
        answer = self.ask(request)
        if isinstance(answer, Refused):
            return answer
        if not isinstance(answer, Standing):
            raise RemoteProtocolError(f"the snapshot process answered {type(answer).__name__}")
        found = Snapshots(standing=answer, pid=self.pid, memory={})
        try:
            for _ in answer.ranks:
                memory, fds = self._receive()
                if not isinstance(memory, Memory) or len(fds) != 1 or memory.rank in found.memory:
                    _close(fds)
                    raise RemoteProtocolError("the snapshot process did not send the memory that it lists")
                found.memory[memory.rank] = fds[0]
        except BaseException:
            found.close()
            raise
        return found

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.line.close()


def attach(address: str, identity: JobIdentity) -> tuple[HolderLine, Snapshots] | Refused:
    """Become the launcher of a held job: its line, and what is held. Raises as `HolderLine` does."""
    line = HolderLine(address)
    try:
        found = line.snapshots(Attach(identity=identity))
    except BaseException:
        line.close()
        raise
    if isinstance(found, Refused):
        line.close()
        return found
    return line, found


def look(address: str) -> Snapshots | None:
    """Return what a holder has; None if it has ended meanwhile. Raises `UserError` if it refuses."""
    with contextlib.suppress(PeerLost):
        line = HolderLine(address)
        try:
            found = line.snapshots(Look())
        finally:
            line.close()
        if isinstance(found, Refused):
            raise UserError(
                f"the snapshot process {line.pid} refuses: {found.reason}. Use the zbmd that it is of."
            )
        return found
    return None


def drop(address: str) -> str:
    """Have a holder end; return why it does not, and "" if it does or has ended already."""
    try:
        line = HolderLine(address)
    except PeerLost:
        return ""
    try:
        ended = os.pidfd_open(line.pid)
    except ProcessLookupError:
        line.close()
        return ""
    try:
        answer = line.ask(Drop())
        if isinstance(answer, Dropped):
            # The end of the connection comes before that of its address: another holder may want that.
            select.select([ended], [], [], ASK_S_MAX)
            return ""
    except PeerLost:
        return ""
    finally:
        os.close(ended)
        line.close()
    return answer.reason if isinstance(answer, Refused) else f"it answered {type(answer).__name__}"


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _gone(error: OSError) -> PeerLost:
    return PeerLost("the snapshot process", error.strerror or str(error))
