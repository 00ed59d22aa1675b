"""The output of ranks in a file and on a terminal: bars, prompts, tracebacks after a bar, bytes."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS
from support.cluster.etcd_server import free_ports
from support.processes.terminal import on_terminal

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

LIMIT_S = 180.0
LAUNCHED = PROGRAMS / "launched"
BAR, PROMPT, SPLIT = (str(LAUNCHED / f"{name}.py") for name in ("bar", "prompt", "split_line"))
BYTES = """
import sys
sys.stdout.buffer.write(bytes(range(256)) + "\\nübung\\n".encode())
sys.stdout.flush()
"""


@pytest.fixture(params=[False, True], ids=["one host", "several"])
def hosts(request: pytest.FixtureRequest) -> list[str]:
    """The options of a run on one host, and of one that others may join."""
    elastic = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}"]
    return elastic if request.param else []


def ranks_lines(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if line.startswith("[rank"))


def test_a_bar_is_in_a_file_as_it_was_at_last(launcher: Launcher, hosts: list[str]) -> None:
    ended = launcher.run("run", *hosts, "-n", "2", BAR)
    assert ended.code == 0, ended
    assert ranks_lines(ended.errors) == [f"[rank{rank}]: 100%|##########| 10/10 of {rank}" for rank in (0, 1)]


def test_a_traceback_after_a_bar_is_whole_and_without_marks(launcher: Launcher, hosts: list[str]) -> None:
    ended = launcher.run("run", *hosts, "-n", "1", "--max-restarts", "0", BAR, "fails")
    assert ended.code == 1, ended
    told = [line.removeprefix("[rank0]: ") for line in ranks_lines(ended.errors)]
    assert "100%|##########| 10/10 of 0" in told and "Traceback (most recent call last):" in told
    assert 'raise ValueError("in the middle")' in "".join(told)
    assert not re.search("last-words|\x1e|\r", str(ended)), ended


def test_a_script_that_has_put_a_file_in_the_place_of_standard_error_finds_no_marks_there(
    launcher: Launcher,
) -> None:
    script = (
        "import os\nos.dup2(os.open('errors', os.O_WRONLY | os.O_CREAT), 2)\n" + "raise ValueError('there')\n"
    )
    (launcher.directory / "redirects.py").write_text(script)
    assert launcher.run("run", "-n", "1", "redirects.py").code == 1
    errors = (launcher.directory / "errors").read_text()
    assert errors.startswith("Traceback (most recent call last):") and "ValueError: there" in errors
    assert "\x1e" not in errors


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_any_bytes_are_printed_whatever_the_encoding(launcher: Launcher, encoding: str) -> None:
    (launcher.directory / "bytes.py").write_text(BYTES)
    command, environment = launcher.command(["run", "-n", "1", "bytes.py"], "bytes")
    done = subprocess.run(
        command,
        env={**environment, "PYTHONIOENCODING": encoding},
        cwd=launcher.directory,
        capture_output=True,
        timeout=LIMIT_S,
        check=True,
    )
    lines = done.stdout.split(b"\n[rank0]: ")
    assert len(lines) == 3 and lines[0].startswith(b"[rank0]: \0\1\2") and lines[2].endswith(b"bung\n")


def test_bars_move_on_a_terminal_and_stay_as_they_were_at_last(launcher: Launcher, hosts: list[str]) -> None:
    with on_terminal(launcher, "run", *hosts, "-n", "2", BAR, "3", "6") as terminal:
        for step in (3, 6):
            for rank in (0, 1):
                terminal.until(f"[rank{rank}]:  {step}0%|{'#' * step}")
            (launcher.directory / f"go{step}").touch()
        assert terminal.end() == 0, terminal.text
    for rank in (0, 1):
        assert f"[rank{rank}]: 100%|##########| 10/10 of {rank}\r\n" in terminal.text
    assert "\x1e" not in terminal.text


def test_a_line_without_an_end_is_seen(launcher: Launcher, hosts: list[str]) -> None:
    with on_terminal(launcher, "run", *hosts, "-n", "2", PROMPT) as terminal:
        for rank in (0, 1):
            terminal.until(f"[rank{rank}]: Loading of {rank} ...")
        (launcher.directory / "done").touch()
        assert terminal.end() == 0, terminal.text
    assert all(f"[rank{rank}]: Loading of {rank} ... done" in terminal.text for rank in (0, 1))


def test_a_line_without_an_end_is_seen_in_a_file_too(launcher: Launcher, hosts: list[str]) -> None:
    with launcher.start("run", *hosts, "-n", "1", PROMPT, PYTHONUNBUFFERED="1", fresh=True) as running:
        running.until_shown("[rank0]: Loading of 0 ...")
        (launcher.directory / "done").touch()
        assert running.end() == 0, running.text
    assert "[rank0]: Loading of 0 ... done\n" in running.text


def test_no_line_of_another_rank_is_in_the_midst_of_one(launcher: Launcher, hosts: list[str]) -> None:
    with launcher.start("run", *hosts, "-n", "2", SPLIT, PYTHONUNBUFFERED="1", fresh=True) as running:
        running.until_shown("[rank0]: begun")
        (launcher.directory / "begun").touch()
        assert running.end() == 0, running.text
    assert "[rank0]: begun and ended\n" in running.text
    assert all(f"\n[rank1]: line {number}\n" in running.text for number in range(100))
