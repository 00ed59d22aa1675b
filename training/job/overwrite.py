"""Start over in the directory of an earlier run, once it has ended."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from zbmd.training.checkpoint.sharded import SHARDS_NAME, is_shard
from zbmd.training.data.sources import RECORD_NAME
from zbmd.training.job.records import METRICS_NAME, TENSORBOARD_NAME
from zbmd.training.model.weights import WEIGHTS_NAME
from zbmd.training.profiler.lines import PROFILE_DIRECTORY
from zbmd.training.run.ledger import LOG_NAME, nobody_writes
from zbmd.transport.errors import UserError

FILES: Final = (METRICS_NAME, SHARDS_NAME, WEIGHTS_NAME, RECORD_NAME)
FOLDERS: Final = (PROFILE_DIRECTORY, TENSORBOARD_NAME)


def remove_run(directory: Path) -> None:
    """Remove what a run has written in `directory`, its commit log last; other files stay.

    Raises `UserError` if the run goes on, or if something cannot be removed.
    """
    if not (directory / LOG_NAME).exists():
        return
    with nobody_writes(directory):
        try:
            for name in FOLDERS:
                if (directory / name).is_dir():
                    shutil.rmtree(directory / name)
            shards = [path for path in directory.iterdir() if is_shard(path)]
            for path in (*(directory / name for name in FILES), *shards, directory / LOG_NAME):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot remove {error.filename}: {error.strerror}.") from error
