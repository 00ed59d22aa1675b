"""Launchers of others that start guards (`python -m zbmd.torch.run`), as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.processes.children import children_of
from support.processes.launcher import MARKER, Running, marked

GUARD = ("-m", "zbmd.torch.run")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1")


@contextmanager
def started(
    command: Sequence[str | Path], directory: Path, variables: Mapping[str, str] | None = None
) -> Generator[Running]:
    """Start a command in a session of its own; what is left of it at the end is killed."""
    marker = uuid.uuid4().hex
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_"))}
    own = {
        "ZBMD_COOKIE_FILE": str(directory / "cookie"),
        "ZBMD_ARENA": "32MiB",
        "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(directory / "state"),
        MARKER: marker,
    }
    with subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**kept, **own, **(variables or {})},
        start_new_session=True,
    ) as process:
        try:
            yield Running(process, marker)
        finally:
            for pid in marked(marker):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def torchrun(
    directory: Path, ranks: int, *script: str | Path, options: Sequence[str] = (), **variables: str
) -> Generator[Running]:
    """Run a script in guarded ranks under torchrun. options: more of torchrun."""
    command = (sys.executable, *TORCHRUN, "--nproc-per-node", str(ranks), *options, *GUARD, *script)
    with started(command, directory, variables) as running:
        yield running


@contextmanager
def by_hand(
    directory: Path, places: Sequence[Mapping[str, str]], *script: str | Path, **variables: str
) -> Generator[list[Running]]:
    """Start a guard for each of the environments that a launcher would set."""
    with ExitStack() as stack:
        command = (sys.executable, *GUARD, *script)
        yield [stack.enter_context(started(command, directory, {**variables, **place})) for place in places]


def guards_of(agent: int) -> dict[int, int]:
    """Return the pids of the guards that torchrun, of that pid, has started, by their local ranks."""
    found: dict[int, int] = {}
    for pid in children_of(agent):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found.update({int(v[11:]): pid for v in variables if v.startswith(b"LOCAL_RANK=")})
    return found
