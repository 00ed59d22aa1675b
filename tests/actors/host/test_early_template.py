"""A template that is a fork of its launcher: what a script meets there, and when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from programs import PROGRAMS

from zbmd.actors.process.early_template import fork_template


def launch(directory: Path, script: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ZBMD_COOKIE_FILE": str(directory / "cookie")}
    command = [sys.executable, str(PROGRAMS / "actors/launcher.py"), str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.endswith("end of True\n"), done
    assert done.stdout.count("end of") == 1, "a fork went on as the launcher"
    return done


def test_a_script_meets_what_a_new_interpreter_would_show_it(tmp_path: Path) -> None:
    script = PROGRAMS / "actors/fresh_interpreter.py"
    out = launch(tmp_path, script).stdout.splitlines()
    assert out[0] == f"[rank0]: yes ['{script}'] 1 __main__ b''", out
    assert out[1:3] == ["[rank0]: True True", "[rank0]: ended in order"], out


def test_an_error_of_a_script_is_told_from_its_own_first_frame_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from zbmd.transport.errors import ZbmdError\ndef fail():\n    raise ZbmdError('no')\nfail()\n"
    )
    done = launch(tmp_path, script)
    told = [line for line in done.stderr.splitlines() if "File" in line]
    assert len(told) == 2 and all("script.py" in line for line in told), done.stderr
    assert "rank0 failed before it joined" in done.stdout, done


def test_a_process_with_threads_is_not_forked() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert fork_template([], {}) is None
    finally:
        stop.set()
        thread.join()
