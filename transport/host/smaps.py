"""What the kernel counts of a range of this process's memory: proc_pid_smaps(5)."""

from __future__ import annotations

import re
from pathlib import Path

SMAPS = Path("/proc/self/smaps")


def counted(address: int, nbytes: int, *fields: str) -> int:
    """The sum of `fields` (without their colons), in bytes, over mappings inside of the range.

    0 where the kernel does not tell.
    """
    try:
        lines = SMAPS.read_text().splitlines()
    except OSError:
        return 0
    wanted = tuple(f"{field}:" for field in fields)
    found, inside = 0, False
    for line in lines:
        header = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if header:
            inside = address <= int(header[1], 16) and int(header[2], 16) <= address + nbytes
        elif inside and line.startswith(wanted):
            found += int(line.split()[1]) << 10
    return found
