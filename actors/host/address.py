"""Where a user's hosts are found on a machine: abstract sockets, named so that only their own look there.

A name begins with the user and a tag of the cookie. Who has another cookie could not link up, and would only
fill the host's log by trying.
"""

from __future__ import annotations

import hmac
import os
import re
from pathlib import Path
from typing import Final

HOSTS_MAX: Final = 256
_TAG_BYTES: Final = 4
_LABEL: Final = b"zbmd host address"
_REST: Final = "[0-9a-f]{16}(?:-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+)?"


def host_address(cookie: bytes, job: int, *more: str) -> str:
    """The address of a job's host. more: three hexadecimal words, if a machine may have several of a job."""
    return "-".join((_prefix(cookie), f"{job:016x}", *more))


def find_hosts(cookie: bytes) -> list[str]:
    """The addresses of this user's hosts that have this cookie, at most `HOSTS_MAX`, from /proc/net/unix."""
    wanted = re.compile(f" @({re.escape(_prefix(cookie))}-{_REST})$")
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sorted({match[1] for line in lines if (match := wanted.search(line))})[:HOSTS_MAX]


def _prefix(cookie: bytes) -> str:
    tag = hmac.digest(cookie, _LABEL, "sha256")[:_TAG_BYTES]
    return f"zbmd-{os.getuid()}-{tag.hex()}"
