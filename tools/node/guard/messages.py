"""Messages of the guards of a host to the one that supervises its ranks, its answer, and their sockets.

A packet on a Unix socket is one message. Each guard listens at an address of its own, and the one of local
rank 0 and each other guard try to connect to each other. The later one of the two finds the earlier one
listening, so nobody has to ask twice.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from typing import Final, TextIO, TypeAlias

import msgspec

from zbmd.actors.bootstrap.rank_variables import MPI_JOBS
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.host.process import decoded_packet, peer_of

PACKET_BYTES_MAX: Final = 1024
CODE_MAX: Final = 255
NO_MESSAGE: Final = "a guard of this host sent no message of a guard"


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here", kw_only=True):
    """A guard is here, for this rank of its host."""

    local_rank: int


class Signalled(msgspec.Struct, frozen=True, array_like=True, tag="signalled", kw_only=True):
    """The guard has received a signal, for its rank."""

    number: int


class RankEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended", kw_only=True):
    """The rank of the guard has ended for good; code: what the guard is to exit with."""

    code: int


Reported: TypeAlias = Here | Signalled

_reported_decoder: msgspec.msgpack.Decoder[Reported] = msgspec.msgpack.Decoder(Reported)
_ended_decoder = msgspec.msgpack.Decoder(RankEnded)
encode = msgspec.msgpack.Encoder().encode


def decode_reported(packet: bytes) -> Reported:
    """Decode what a guard sent. Raises `RemoteProtocolError`."""
    reported = decoded_packet(_reported_decoder, packet, NO_MESSAGE, PACKET_BYTES_MAX)
    value = reported.local_rank if isinstance(reported, Here) else reported.number
    if value < 0:
        raise RemoteProtocolError(f"a guard of this host sent {reported}: expected 0 or more")
    return reported


def decode_ended(packet: bytes) -> RankEnded:
    """Decode what the guard that supervises the ranks sent. Raises `RemoteProtocolError`."""
    ended = decoded_packet(_ended_decoder, packet, NO_MESSAGE, PACKET_BYTES_MAX)
    if not 0 <= ended.code <= CODE_MAX:
        raise RemoteProtocolError(f"the guard of local rank 0 sent {ended}: expected 0 to {CODE_MAX}")
    return ended


STREAMS_MAX: Final = 2


def received(connection: socket.socket) -> tuple[bytes, list[TextIO]]:
    """Return a packet of a guard, and the streams that came with it. Raises OSError."""
    packet, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES_MAX + 1, STREAMS_MAX)
    streams: list[TextIO] = [open(each, "w", errors="backslashreplace") for each in descriptors]  # noqa: SIM115
    return packet, streams


SET_OF_GUARDS: Final = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"),
    *MPI_JOBS,
)
"""Variables that are equal in the guards of one host, and that differ between jobs and between attempts."""
BACKLOG: Final = 16


def address_of_guards(environment: Mapping[str, str]) -> str:
    """Return the beginning of the addresses of all guards that a launcher started together on this host."""
    values = [environment.get(name, "") for name in SET_OF_GUARDS]
    if not any(values):
        values.append(str(os.getppid()))  # a launcher that names nothing is known by its process
    digest = hashlib.blake2b("\0".join(values).encode(), digest_size=12).hexdigest()
    return f"zbmd-guard-{os.getuid()}-{digest}"


def listening(address: str, local_rank: int) -> socket.socket:
    """Return the socket at which a guard is reached. Raises `UserError` if another guard has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{address}-{local_rank}")
    except OSError as error:
        listener.close()
        raise UserError(
            f"local rank {local_rank} has a guard already on this host ({error.strerror}): expected one for "
            "each LOCAL_RANK. Was the command started twice by one launcher?"
        ) from None
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def connected(address: str, local_rank: int) -> socket.socket | None:
    """Connect to a guard; None if it does not listen yet. Raises `UserError`, if it is another user's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"\0{address}-{local_rank}")
    except ConnectionRefusedError:
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return checked(connection)


def accepted(listener: socket.socket) -> socket.socket:
    """Take a connection. Raises `UserError`, if another user's process asks for it, and OSError."""
    connection, _ = listener.accept()
    return checked(connection)


def checked(connection: socket.socket) -> socket.socket:
    """Return the connection, made non-blocking. Raises `UserError` if it is to another user's process."""
    pid, uid = peer_of(connection)
    if uid != os.getuid():
        connection.close()
        raise UserError(
            f"process {pid} of user {uid} is at the address of a guard of this job: expected one of user "
            f"{os.getuid()}. End that process, or start the job again"
        )
    connection.setblocking(False)
    return connection
