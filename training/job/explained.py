"""Errors of a run that only a person can mend, each with what to do."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.training.checkpoint.sharded import checkpoint_in
from zbmd.training.optim.clip import TrainingDiverged
from zbmd.training.redundancy.failures import StepFailed
from zbmd.training.step.memory_estimate import StepOutOfMemory, raise_for
from zbmd.transport.errors import OutOfMemory, UserError
from zbmd.transport.host.files import DiskFull


@contextmanager
def errors_explained(out: Path, launched: RankEnvironment | None, *, memory: str) -> Generator[None]:
    """Raise what only a person can mend as `UserError`. memory: the beginning of an error for too little.

    `out`: the directory of the run; `launched`: this rank's environment.
    """
    try:
        yield
    except TrainingDiverged as error:
        raise UserError(str(error)) from error
    except StepOutOfMemory as error:
        raise_for(error, out, launched)
    except (OutOfMemory, MemoryError) as error:
        raise UserError(f"{memory}: {error}") from error
    except DiskFull as error:
        raise UserError(_to_continue(error, out, otherwise="free some space and start again")) from error
    except StepFailed as error:
        otherwise = "start again, with a smaller --checkpoint-every"
        raise UserError(_to_continue(error, out, otherwise=otherwise)) from error


def _to_continue(error: Exception, out: Path, *, otherwise: str) -> str:
    """Return what happened, and the checkpoint to resume from; `otherwise`: what to do if there is none."""
    what, path = str(error).removesuffix("."), checkpoint_in(out)
    if path is None:
        return f"{what}. No checkpoint had been written yet: {otherwise}."
    return f"{what}. The last durable checkpoint is {path}: resume with --resume {path}."
