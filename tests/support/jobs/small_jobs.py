"""Small training jobs, each under a host of its own that is forked, with the template of its ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zbmd.actors.cluster.jobs.hosted_job import KEEP_MEMORY_VARIABLE
from zbmd.actors.replay.process_capture import CAPTURE_VARIABLE
from zbmd.actors.view import OnLoss
from zbmd.tools.chaos.job_worker import Case, JobCase, ProgramCase, Worker
from zbmd.tools.chaos.small_job import RANKS_DEFAULT, JobOutcome, variables_for
from zbmd.tools.train.command import recipe_of
from zbmd.training.optim.mixed_precision import Precision
from zbmd.transport.errors import UserError

TRAINS = "zbmd.training.sharded"
"""The module that ranks of `zbmd train` run."""


class SmallJobs:
    """Runs them in one worker, so that no run pays for an interpreter that imports what the last one did."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._calm: dict[tuple[bytes, str, Precision], str] = {}

    def undisturbed(
        self, directory: Path, data: Path, kinds: Sequence[tuple[str, Precision]]
    ) -> dict[tuple[bool, Precision], str]:
        """Return the digests of runs on these meshes of one axis, by whether that is `tp`, and precision.

        Of each text a kind is run once for all tests.
        """
        digests: dict[tuple[bool, Precision], str] = {}
        for mesh, precision in kinds:
            kind = data.read_bytes(), mesh, precision
            if kind not in self._calm:
                out, ranks = directory / f"{mesh}-{precision}", int(mesh[-1])
                done = self.run(out, data, mesh=mesh, world_size=ranks, precision=precision)
                self._calm[kind] = done.digest
            digests["tp" in mesh, precision] = self._calm[kind]
        return digests

    def run(
        self,
        out: Path,
        data: Path,
        *,
        fault: str = "",
        on_loss: OnLoss = OnLoss.REPLACE,
        world_size: int = RANKS_DEFAULT,
        links: str = "auto",
        zero: int = 0,
        offload: Path | None = None,
        mesh: str = "",
        precision: Precision = "float32",
        optimizer: str = "adamw",
        keep_memory: bool = True,
    ) -> JobOutcome:
        """As `zbmd.tools.chaos.small_job.run_small_job`, captured if this process's environment says so.

        keep_memory: whether that of a rank outlives it; off anyway where `fault` needs it.
        """
        captured = {name: value for name, value in os.environ.items() if name == CAPTURE_VARIABLE}
        kept = variables_for(fault) if keep_memory else {KEEP_MEMORY_VARIABLE: "off"}
        case = JobCase(
            out=out,
            data=data,
            fault=fault,
            on_loss=on_loss,
            ranks=world_size,
            links=links,
            zero=zero,
            offload=offload,
            mesh=mesh,
            precision=precision,
            optimizer=optimizer,
            variables={**captured, **kept},
        )
        return self._outcome(case)

    def train(self, words: Sequence[str], *, ranks: int) -> JobOutcome:
        """Run `zbmd train` with these options on so many ranks. Raises `UserError` if it fails."""
        return self.program(TRAINS, recipe_of(words, ranks=ranks).encode(), ranks=ranks)

    def program(
        self, program: str, *arguments: str, ranks: int, on_loss: OnLoss = OnLoss.REPLACE, **variables: str
    ) -> JobOutcome:
        """Run a program or a module on so many ranks. Raises `UserError` if it fails."""
        case = ProgramCase(
            program=program, arguments=arguments, ranks=ranks, on_loss=on_loss, variables=variables
        )
        return self._outcome(case)

    def _outcome(self, case: Case) -> JobOutcome:
        ended = self._worker.run(case)
        if ended.outcome is None:
            raise UserError(ended.error)
        return ended.outcome
