"""How often each rank of a job passes each kill point: `chaos.sweep` learns from it where a kill can be.

    python -m zbmd.tools.chaos.sweep.passes DIRECTORY MODULE ARGUMENT ...

runs the module as `__main__` in a rank, whose every point is armed for a pass that never comes, and writes
what was passed to DIRECTORY as the module ends.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

NEVER: Final = 10**15
"""A pass that no run comes to."""

Passes = dict[str, int]
"""Number of passes of each point; points without a pass are left out."""


def _path(directory: Path, rank: int) -> Path:
    return directory / f"passes{rank}.json"


def read_passes(directory: Path, ranks: int) -> list[Passes]:
    """Return the passes of each rank of a run. Raises `UserError` if one is missing."""
    try:
        return [
            msgspec.json.decode(_path(directory, rank).read_bytes(), type=Passes) for rank in range(ranks)
        ]
    except (OSError, ValueError) as error:
        raise UserError(f"a rank has not told which kill points it passes: {error}") from error


def main(argv: Sequence[str]) -> None:
    """Run the module, and write what was passed."""
    directory, module, *arguments = argv
    launched = RankEnvironment.read(os.environ)
    if launched is None:
        raise UserError("kill_passes counts in a rank: start it by zbmd.tools.chaos.sweep.")
    points = ",".join(f"rank{launched.rank}:{point}:{NEVER}" for point in faults.declared())
    os.environ[faults.FAULT_VARIABLE] = points
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        passed = {point: NEVER - left for point, left in faults.left().items() if left < NEVER}
        _path(Path(directory), launched.rank).write_bytes(msgspec.json.encode(passed))


if __name__ == "__main__":
    main(sys.argv[1:])
