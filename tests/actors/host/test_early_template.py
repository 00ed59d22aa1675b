"""A template that is a fork of its launcher: what a script meets there, and when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from zbmd.actors.process.early_template import fork_template

LAUNCHER = """
import os, sys
from zbmd.tools.cli import process
from zbmd.actors.process.early_template import fork_template

def main():
    import uvloop
    from zbmd.actors.host.supervisor import Host, HostConfig
    template = fork_template(["zbmd.actors.rank.member"], {**os.environ, "GIVEN": "yes"})
    assert template is not None
    os.environ["GIVEN"] = "too late"
    config = HostConfig(target=sys.argv[1], world_size=1, max_restarts=0, arena_bytes=1 << 20)
    async def run():
        return await Host(config, template=template).run()
    try:
        print(uvloop.run(run()).reason)
    except Exception:
        print("an error of the script was taken for one of the launcher")
    finally:
        print("end of", os.getpid() == launcher)
    return 0

launcher = os.getpid()
sys.exit(process.run(main))
"""


def launch(directory: Path, script: str) -> subprocess.CompletedProcess[str]:
    (directory / "launcher.py").write_text(LAUNCHER)
    (directory / "script.py").write_text(script)
    environment = {**os.environ, "ZBMD_COOKIE_FILE": str(directory / "cookie")}
    command = [sys.executable, str(directory / "launcher.py"), str(directory / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.endswith("end of True\n"), done
    assert done.stdout.count("end of") == 1, "a fork went on as the launcher"
    return done


def test_a_script_meets_what_a_new_interpreter_would_show_it(tmp_path: Path) -> None:
    script = """
import atexit, os, sys
atexit.register(print, "ended in order")
print(os.environ["GIVEN"], sys.argv, sys.path.count(os.path.dirname(__file__)), __name__, os.read(0, 1))
print("zbmd.actors.rank.member" in sys.modules, os.getsid(0) == os.getpid())
"""
    out = launch(tmp_path, script).stdout.splitlines()
    assert out[0] == f"[rank0]: yes ['{tmp_path}/script.py'] 1 __main__ b''", out
    assert out[1:3] == ["[rank0]: True True", "[rank0]: ended in order"], out


def test_an_error_of_a_script_is_told_from_its_own_first_frame_on(tmp_path: Path) -> None:
    script = "from zbmd.transport.errors import ZbmdError\ndef fail():\n    raise ZbmdError('no')\nfail()\n"
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
