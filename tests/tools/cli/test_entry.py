"""The first steps of the commands."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
def main():
    return 7
"""


@pytest.mark.parametrize(
    ("handler", "code"),
    [(signal.default_int_handler, -signal.SIGINT), (signal.SIG_IGN, 7)],
    ids=["ends it", "is ignored where it was"],
)
def test_ctrl_c_during_the_imports_leaves_no_traceback(tmp_path: Path, handler: object, code: int) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    name = "default_int_handler" if handler is signal.default_int_handler else "SIG_IGN"
    program = (
        f"import signal, sys; signal.signal(signal.SIGINT, signal.{name})\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from zbmd.tools.entry import scripts\n"
        "sys.exit(scripts._run('interrupted'))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert ended.stderr == ""
