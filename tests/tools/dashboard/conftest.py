"""A run for the tests of its pages and numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs.two_ranks import killed_run


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of which rank 1 was killed in step 3, of six."""
    return killed_run(tmp_path_factory.mktemp("killed"))
