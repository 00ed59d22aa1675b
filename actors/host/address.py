"""Addresses of a user's hosts on one machine: abstract sockets, named so that only their own ranks dial them.

A name begins with the user id and a tag of the cookie: a process with another cookie could not link up
anyway, and would only fill the host's log by trying.
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
    """Return the address of a job's host. more: three hexadecimal words, if one machine has several."""
    return "-".join((_prefix(cookie), f"{job:016x}", *more))


def find_hosts(cookie: bytes) -> list[str]:
    """List the addresses of this user's hosts with this cookie, at most `HOSTS_MAX`, from /proc/net/unix."""
    wanted = re.compile(f" @({re.escape(_prefix(cookie))}-{_REST})$")
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sorted({match[1] for line in lines if (match := wanted.search(line))})[:HOSTS_MAX]


def _prefix(cookie: bytes) -> str:
    tag = hmac.digest(cookie, _LABEL, "sha256")[:_TAG_BYTES]
    return f"zbmd-{os.getuid()}-{tag.hex()}"
