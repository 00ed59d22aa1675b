"""Small models trained on meshes of real processes, case by case."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from programs import mesh_ranks
from programs.mesh_ranks import Case

from support.jobs.small_jobs import SmallJobs
from zbmd.actors.view import OnLoss

Result = tuple[np.ndarray, list[float]]
"""The weights, and the losses of all steps and of the held-out windows."""


def on_ranks(small_jobs: SmallJobs, out: Path, ranks: int, *cases: Case) -> dict[str, Result]:
    """Train the cases one after the other on as many processes; all ranks must end with the same."""
    small_jobs.program(
        mesh_ranks.__file__,
        ranks=ranks,
        on_loss=OnLoss.SHRINK,
        MESH_OUT=str(out),
        MESH_CASES=msgspec.json.encode(cases).decode(),
    )
    found: dict[str, Result] = {}
    for case in cases:
        files = told(out, ranks, case.name)
        assert len({file["weights"].tobytes() for file in files}) == 1, case.name
        assert len({file["losses"].tobytes() for file in files}) == 1, case.name
        assert len({file["norms"].tobytes() for file in files}) == 1, case.name
        found[case.name] = files[0]["weights"], files[0]["losses"].tolist()
    return found


def told(out: Path, ranks: int, name: str) -> list[dict[str, np.ndarray]]:
    """Return what each rank wrote for a case."""
    return [dict(np.load(out / f"{name}.{rank}.npz")) for rank in range(ranks)]
