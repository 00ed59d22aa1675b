"""What a benchmarked process and the benchmark say to each other, over one unix socket a rank.

The process connects to an address that it was given (abstract, or with a slash a path, which other network
namespaces reach, too) and says its rank in one line. From then on each line that it reads is `WHAT NBYTES
ITERATIONS`, and it answers with one line of JSON: `Reply`. The end of the connection is the end of the
process, so a killed benchmark leaves nothing running. While a process
waits for its next line it sleeps in the kernel: it never polls while another one is measured.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Final

COMMAND_BYTES_MAX: Final = 256
REPLY_BYTES_MAX: Final = 64 << 20

Measure = Callable[[str, int, int], list[float]]
"""Takes what to measure, bytes and iterations; returns nanoseconds, one number an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Nanoseconds, one number for each operation; empty from a rank that only took part.

    Of the standard library alone: a peer may run in an interpreter that has nothing else.
    """

    ns: list[float] = field(default_factory=list)


def socket_name(control: str) -> str:
    """How the kernel calls the control address."""
    return control if "/" in control else f"\0{control}"


def connect(control: str, rank: int) -> socket.socket:
    """Connect to the benchmark at the address `control` as `rank`. Raises OSError if it is gone."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(socket_name(control))
        sock.sendall(f"{rank}\n".encode())
    except OSError:
        sock.close()
        raise
    return sock


def parse_command(line: bytes) -> tuple[str, int, int]:
    """What to measure, bytes, iterations. Raises ValueError on anything else."""
    what, nbytes, iterations = line.decode().split()
    return what, int(nbytes), int(iterations)


def encode_reply(ns: list[float]) -> bytes:
    """One line."""
    return json.dumps(asdict(Reply(ns=ns))).encode() + b"\n"


def serve(control: str, rank: int, measure: Measure) -> None:
    """Measure what is asked for until the benchmark hangs up."""
    with connect(control, rank) as sock, sock.makefile("rb") as lines:
        while line := lines.readline(COMMAND_BYTES_MAX):
            sock.sendall(encode_reply(measure(*parse_command(line))))
