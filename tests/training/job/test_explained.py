"""An error that ends a run names the last checkpoint to resume from, wherever that lies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zbmd.training.autograd.parameter_layout import flat_slice
from zbmd.training.checkpoint.sharded import Piece, last_in, write_alone
from zbmd.training.checkpoint.storage import Directory
from zbmd.training.job.explained import errors_explained
from zbmd.training.redundancy.failures import FailureKind, StepFailed
from zbmd.training.step.memory_estimate import StepOutOfMemory
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import DiskFull

ERRORS = (
    StepFailed(FailureKind.STATE_LOST, "all ranks that held the same state were lost at once"),
    DiskFull("the disk is full."),
    StepOutOfMemory(0, 3, "1 PiB", is_first=False),
)


def told(error: Exception, out: Path, to: Path | str) -> str:
    with pytest.raises(UserError) as caught, errors_explained(out, str(to), None, memory="the state"):
        raise error
    return str(caught.value)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_last_checkpoint_is_named_where_it_lies(error: Exception, tmp_path: Path) -> None:
    out, to = tmp_path / "out", tmp_path / "saved"
    assert "No checkpoint had been written yet" in told(error, out, to)
    assert "No checkpoint had been written yet" in told(error, out, "ftp://no/such/place")
    piece = Piece("w", flat_slice(4, 0, 4), (np.zeros(4, np.float32),), ("weights",))
    for place in (out, to):
        write_alone(place, [piece], version=3, plan="{}")
    for named, place in ((to, to), (out, ""), (out, tmp_path / "none")):
        path = last_in(Directory(named))
        assert path is not None and f"is {path}: resume with --resume {path}." in told(error, out, place)
