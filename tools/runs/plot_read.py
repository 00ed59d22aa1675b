"""The picture of a run from what it has left on disk: a commit log, or metrics and profiles."""

from __future__ import annotations

from pathlib import Path

from zbmd.tools.runs.plot_data import RunPicture, picture_of, spent_by
from zbmd.tools.runs.plot_metrics import picture_of_metrics, read_metrics
from zbmd.tools.runs.result import load_result
from zbmd.training.profiler.lines import PROFILE_DIRECTORY, read_profiles
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.training.sharded.records import METRICS_NAME
from zbmd.transport.errors import UserError


def read_picture(directory: Path) -> RunPicture:
    """The picture of the run in `directory`.

    Raises `UserError` if there is nothing of a run, if it holds no step yet, or if a file is damaged.
    """
    lives = read_profiles(directory) if (directory / PROFILE_DIRECTORY).is_dir() else []
    spent = spent_by(lives)
    metrics = directory / METRICS_NAME
    if metrics.exists() and not (directory / LOG_NAME).exists():
        picture = picture_of_metrics(read_metrics(metrics), lives, spent)
        if picture is None:
            raise UserError(f"{metrics} holds no step yet: there is nothing to draw.")
        return picture
    _, records = read_log(directory / LOG_NAME)
    if not records:
        raise UserError(f"{directory / LOG_NAME} holds no committed step yet: there is nothing to draw.")
    return picture_of(records, load_result(directory), spent)
