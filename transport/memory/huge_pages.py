"""Huge pages for PyTorch's tensors in the memory of a host.

PyTorch asks for them in allocations of 2 MiB and more, if a variable is set before its first allocation. A
process then maps new tensors with a fraction of the page faults: over FSDP2, which frees and allocates whole
parameters in each step, 3 % of them. Without it the first step of a replacement mostly maps memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

HUGE_PAGES_VARIABLE: Final = "THP_MEM_ALLOC_ENABLE"
"""Of PyTorch: 1 or 0."""
_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_page_variables(enabled: Path = _ENABLED) -> dict[str, str]:
    """Return the variables of a process that is to import PyTorch; those of its user come before them.

    enabled: where the kernel says whether it gives huge pages. Empty if it does not: PyTorch would warn.
    """
    try:
        modes = enabled.read_text()
    except OSError:
        return {}
    return {} if "[never]" in modes else {HUGE_PAGES_VARIABLE: "1"}
