"""Files that Python reads for what most commands import: they are in the machine's memory from the start.

Over 9p each costs the machine several round trips to the host, which take milliseconds where that is busy: of
the 30 s that the first import of pytest and numpy took, 22 were those.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

MODULES: Final = (
    "hypothesis",
    "pytest",
    "pytest_asyncio.plugin",
    "uvloop",
    "numpy.random",
    "zbmd.actors.cluster.node.node",
    "zbmd.actors.host.supervisor",
    "zbmd.actors.process.template",
    "zbmd.collectives.group.group",
    "zbmd.tools.chaos.small_job",
    "zbmd.training.__main__",
    "zbmd.transport.rdma.plane",
)
"""What is not installed is left out."""
BYTES_MAX: Final = 512 << 20
"""Of the machine's memory; what comes behind it stays on the host."""
IMPORT_S_MAX: Final = 120.0
_ELSEWHERE: Final = ("/dev/", "/proc/", "/sys/")
_FIND: Final = """
import importlib, importlib.metadata, os, sys

found = set()

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        found.add(arguments[0])

sys.addaudithook(hook)
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for distribution in importlib.metadata.distributions():
    distribution.entry_points  # which pytest reads, all of them
with open("/proc/self/maps") as maps:
    found.update(line.split(maxsplit=5)[5].rstrip() for line in maps if "/" in line)
print(*map(os.path.realpath, found), sep="\\n")
"""


def files(folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[Path, bytes]]:
    """Each with what is in it, as a Python of this kind finds them in `folder`.

    Sources are not among them: bytecode names the time of its source, which a file made at boot has not.
    """
    listed = subprocess.run(
        [sys.executable, "-c", _FIND, *MODULES],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=IMPORT_S_MAX,
    )
    left = BYTES_MAX
    for path in sorted(map(Path, listed.stdout.splitlines())):
        if path.suffix == ".py" or str(path).startswith(_ELSEWHERE) or not path.is_file():
            continue
        left -= path.stat().st_size
        if left < 0:
            return
        yield path, path.read_bytes()
