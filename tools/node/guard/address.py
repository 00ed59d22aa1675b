"""Sockets between the guards of one host: their address, and who may connect.

Each guard listens at an address of its own, and the one of local rank 0 and each other guard try to connect
to each other. The later one of the two finds the earlier one listening, so nobody has to ask twice.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from typing import Final

from zbmd.actors.bootstrap.rank_variables import MPI_JOBS
from zbmd.transport.errors import UserError
from zbmd.transport.host.process import peer_of

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
