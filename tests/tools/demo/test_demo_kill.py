"""The kill that the demo deals."""

from __future__ import annotations

import subprocess
import sys

from programs import PROGRAMS


def test_a_kill_that_comes_after_the_end_of_its_rank_kills_nobody() -> None:
    """In a session of its own, for what went wrong once ended the whole process group of the demo."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "tools" / "late_kill.py")],
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "0 kills\n"), done.stderr
