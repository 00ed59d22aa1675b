"""A rank's side: start the supervisor of its host, attach to it, and detach; and how ranks meet to do so.

Rank 0 decides whether the ranks of a host attach together, or not again at all. Blocking, from any thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from typing import Final

from zbmd.actors.bootstrap.attached.messages import (
    PACKET_BYTES_MAX,
    Attach,
    Attached,
    Detach,
    Hello,
    Order,
    Plan,
    decode_answer,
    encode,
)
from zbmd.actors.cluster.local_deaths import memory_domain, pid_space
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.view import RANKS_MAX
from zbmd.transport.errors import DeadlineExceeded, PeerLost, UserError

DIVIDER: Final = "|"
GUIDE: Final = "docs/GUIDE_BOOTSTRAP.md"


def host_name() -> str:
    """Return this host's name: ranks of one name share kernel, namespaces and user, so one supervisor."""
    return f"{memory_domain()}{DIVIDER}{pid_space()}{DIVIDER}{os.getuid()}"


def plan_of(greetings: Sequence[Hello], name: str, *, cookie: str) -> Plan:
    """Return what all ranks are to do; their greetings are in the order of the ranks.

    cookie: for a job on several hosts.
    """
    size = len(greetings)
    if size > RANKS_MAX:
        return Plan(problem=f"world_size: expected at most {RANKS_MAX} ranks, got {size}")
    job = greetings[0].job
    if job and all((h.job, h.rank, h.size) == (job, rank, size) for rank, h in enumerate(greetings)):
        return Plan(name=name, stays=True)
    found: dict[str, list[int]] = {}
    for rank, greeting in enumerate(greetings):
        found.setdefault(greeting.host, []).append(rank)
    hosts = tuple(tuple(ranks) for ranks in found.values())
    if len(hosts) == 1:
        return Plan(name=name, hosts=hosts)
    if problem := _divided(found) or _uneven(hosts):
        return Plan(
            problem=f"{problem}. `zbmd-node run --nnodes` runs them, also under this launcher: {GUIDE}"
        )
    return Plan(name=name, hosts=hosts, cookie=cookie)


def _divided(found: Mapping[str, Sequence[int]]) -> str:
    """Why processes that could share memory cannot: they do not see each other."""
    kernels: dict[str, Sequence[int]] = {}
    for host, ranks in found.items():
        other = kernels.setdefault(host.partition(DIVIDER)[0], ranks)
        if other is not ranks:
            return (
                f"ranks {other[0]} and {ranks[0]} are on one host, in other namespaces of processes or of "
                "other users: expected the same of both"
            )
    return ""


def _uneven(hosts: Sequence[Sequence[int]]) -> str:
    in_turn = [rank for ranks in hosts for rank in ranks] == list(range(sum(map(len, hosts))))
    if in_turn and len({len(ranks) for ranks in hosts}) == 1:
        return ""
    shown = "; ".join(f"{', '.join(map(str, ranks[:4]))}{' …' if ranks[4:] else ''}" for ranks in hosts[:4])
    return (
        f"the ranks are on {len(hosts)} hosts as {shown}: expected as many on each, one after the other, "
        "0 and up on the first"
    )


BACKLOG: Final = 1024
DETACH_S_MAX: Final = 1.0
SAID_BYTES_MAX: Final = 4096
FAILED: Final = "!"
"""Begins what a supervisor, or the rank that starts it, says in the place of an address."""
_MAIN: Final = (
    "import os, sys; os.fork() and os._exit(0); os.setsid(); "  # so that the starter has no child
    "from zbmd.actors.bootstrap.attached.supervisor import serve; serve(*map(int, sys.argv[1:]))"
)


def start(order: Order) -> tuple[str, str]:
    """Start the supervisor of this host; return the address to attach at, and its node's: "" on one host.

    Processes may attach at once: the supervisor takes them as soon as it is up. Raises OSError; and
    `PeerLost`, `DeadlineExceeded` and `UserError` where its node's address does not come.
    """
    address = f"zbmd-attached-{os.getuid()}-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starter, (told, tells) = os.pidfd_open(os.getpid()), os.pipe()
    with listener, open(told, "rb", buffering=0) as answers:
        try:
            listener.bind(f"\0{address}")
            listener.listen(BACKLOG)
            fds = (listener.fileno(), starter, tells)
            arguments = (fds[0], os.getpid(), *fds[1:])
            # -P: the working directory must not shadow what we import.
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
            )
        finally:
            os.close(starter)
            os.close(tells)
        process.communicate(encode(order))
        return address, _node_address(answers, order) if order.hosts > 1 else ""


def _node_address(answers: RawIOBase, order: Order) -> str:
    """Return what the supervisor says once its node has begun."""
    said, end_s = b"", time.monotonic() + order.patience_s
    while not said.endswith(b"\n"):
        if not select.select([answers], [], [], max(0.0, end_s - time.monotonic()))[0]:
            raise DeadlineExceeded(
                f"the supervisor of this host did not begin within {order.patience_s:g} s: see what it says "
                "on standard error, or raise the timeout of init_process_group"
            )
        data = answers.read(SAID_BYTES_MAX)
        if not data or len(said) > SAID_BYTES_MAX:
            raise PeerLost("the supervisor of this host", "it says on standard error why it failed")
        said += data
    return address_of(said)


def address_of(said: bytes) -> str:
    """Return the address that is said. Raises `UserError` if it is the reason why there is none."""
    text = said.decode(errors="replace").strip()
    if text.startswith(FAILED):
        raise UserError(text.removeprefix(FAILED))
    return text


@dataclass(slots=True)
class Attachment:
    """This process as a rank of a supervisor's job. environment: the rank's, as of one that was forked."""

    environment: RankEnvironment
    pid: int
    _socket: socket.socket

    @property
    def stands(self) -> bool:
        """Whether the supervisor lives. False in a forked child, which is not the rank."""
        if self.pid != os.getpid() or self._socket.fileno() < 0:
            return False
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def detach(self, *, ends: bool) -> None:
        """Leave in order. ends: this process ends now; else it may attach elsewhere. Idempotent."""
        with contextlib.suppress(OSError), self._socket:
            if self.pid == os.getpid():
                self._socket.settimeout(DETACH_S_MAX)
                self._socket.send(encode(Detach(ends=ends)))


def attach(address: str, rank: int, timeout_s: float) -> Attachment:
    """Be `rank` of the job of the supervisor at `address`.

    Raises `UserError` if it refuses, `DeadlineExceeded` after `timeout_s`, `PeerLost` if it is gone.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{address}")
        connection.send(encode(Attach(rank=rank)))
        packet = connection.recv(PACKET_BYTES_MAX + 1)
        if not packet:
            raise ConnectionResetError("it closed the connection")
        answer = decode_answer(packet)
    except TimeoutError:
        connection.close()
        raise DeadlineExceeded(
            f"the supervisor of this host did not take rank {rank} within {timeout_s:g} s: raise the "
            "timeout of init_process_group, or see what it writes to standard error"
        ) from None
    except OSError as error:
        connection.close()
        reason = (
            f"{error}; it ends with the process that started it, or says on that one's standard error why "
            "it failed"
        )
        raise PeerLost("the supervisor of this host", reason) from None
    except BaseException:
        connection.close()
        raise
    if not isinstance(answer, Attached):
        connection.close()
        raise UserError(f"rank {rank} was not taken: {answer.reason}")
    connection.setblocking(False)
    environment = RankEnvironment.read(answer.variables)
    assert environment is not None, "the supervisor names its host"
    return Attachment(environment, os.getpid(), connection)
