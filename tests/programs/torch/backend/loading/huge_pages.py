"""Whether a rank has a tensor of some size on huge pages, as its argument says: huge, or small."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

torch: Any = importlib.import_module("torch")


def flags_at(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that has this address."""
    begins = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, _ = line.partition(" ")
        low, dash, high = first.partition("-")
        if dash and not first.endswith(":"):
            begins = int(low, 16) <= address < int(high, 16)
        elif begins and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:#x}")


tensor = torch.zeros(8 << 20, dtype=torch.uint8)
middle = tensor.data_ptr() + tensor.numel() // 2
found, wanted = "hg" in flags_at(middle), sys.argv[1] == "huge"
assert found == wanted, (os.environ.get("THP_MEM_ALLOC_ENABLE"), flags_at(middle))
print("a tensor: good", flush=True)
