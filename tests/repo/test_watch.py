"""The suite's own rules, held against a suite that breaks each of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

LEAKS = """
import mmap, os, signal, socket, subprocess, sys, tempfile, threading
import pytest

held = []
EXIT_AT_ONCE = [sys.executable, "-c", ""]
HANG = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]

def test_leaks_descriptor():
    held.append(socket.socket())

def test_leaks_thread():
    gate = threading.Event()
    held.append(gate)
    threading.Thread(target=gate.wait, daemon=True).start()

def test_leaks_running_child():
    held.append(subprocess.Popen(HANG, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

def test_leaks_unreaped_child():
    held.append(subprocess.Popen(EXIT_AT_ONCE))

def test_leaks_shared_memory():
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="zbmd-watch-", delete=False) as file:
        held.append(file.name)
        file.truncate(1)
        held.append(mmap.mmap(file.fileno(), 1))  # so that other sessions know it for this one's

def test_leaks_orphan():
    script = (
        "import subprocess, sys;"
        f"child = subprocess.Popen({HANG!r}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL);"
        "child.stdout.readline()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

@pytest.fixture(scope="module")
def shared():
    with socket.socket() as endpoint:
        yield endpoint

def test_clean_with_shared_fixture(shared):
    with socket.socket(), subprocess.Popen(HANG, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        child.kill()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()

def test_clean_again(shared):
    pass

def test_bytecode_is_written_by_all():
    ask = [sys.executable, "-c", "import sys; print(sys.dont_write_bytecode)"]
    assert not sys.dont_write_bytecode
    assert subprocess.run(ask, capture_output=True, check=True).stdout.split() == [b"False"]

def test_clean_up():
    for thing in held:
        if isinstance(thing, str):
            os.unlink(thing)
        if isinstance(thing, mmap.mmap):
            thing.close()
"""

OF_ANOTHER_SESSION = """
import mmap, sys, tempfile

open(sys.argv[1]).read()
file = tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="zbmd-watch-")
file.truncate(1)
held = mmap.mmap(file.fileno(), 1)
open(sys.argv[2], "w").close()
sys.stdin.read()
"""

BESIDE_ANOTHER_SESSION = """
import os

def test_as_another_session_shares_memory():
    open(os.environ["ASK"], "w").close()
    open(os.environ["ANSWER"]).read()
"""

SKIPS = """
import pytest

@pytest.mark.optional
def test_optional():
    pytest.skip("no torch here")

@pytest.mark.xfail
def test_expected():
    assert False

def test_passes():
    pass
"""

SESSION_LEAK = """
import threading
import conftest

conftest.SETTLE_S = 0.2

gate = threading.Event()

@pytest.fixture(scope="session")
def held():
    threading.Thread(target=gate.wait, daemon=True).start()

def test_leaks(held):
    pass
"""

LASTING = SESSION_LEAK.replace(
    "def held():\n    ",
    "def held(request):\n    with request.config.pluginmanager.get_plugin('zbmd-watch').lasting():\n        ",
)

SeededRun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_suite(tmp_path: Path) -> SeededRun:
    """Run a suite of one module under the real conftest, in a process of its own."""

    def run(text: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = optional: x\n")
        (tmp_path / "test_suite.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options]
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("ZBMD_") or name == "ZBMD_TEST_SESSION"
        }
        inherited["COLUMNS"] = "200"  # pytest cuts its summary lines to the terminal's width.
        return subprocess.run(
            command, cwd=tmp_path, env=inherited | environment, capture_output=True, text=True, check=False
        )

    return run


def test_every_kind_of_leak_is_reported_and_nothing_else(run_suite: SeededRun) -> None:
    # The settle time is for machines under load; here every leak is meant to stay.
    leaks = LEAKS.replace("import pytest", "import pytest, conftest; conftest.SETTLE_S = 0.2", 1)
    run = run_suite(leaks, PYTHONDONTWRITEBYTECODE="1")
    errors = dict(re.findall(r"^ERROR \S+::(\w+) - (.*)$", run.stdout, re.MULTILINE))
    kinds = {
        "test_leaks_descriptor": "descriptor",
        "test_leaks_thread": "thread",
        "test_leaks_running_child": "child",
        "test_leaks_unreaped_child": "child",
        "test_leaks_shared_memory": "left behind: /dev/shm/zbmd-watch-",
        "test_leaks_orphan": "orphan",
    }
    assert errors.keys() == kinds.keys(), run.stdout
    assert "FAILED" not in run.stdout
    for test, kind in kinds.items():
        assert kind in errors[test]
    assert run.returncode == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("marks", [True, False], ids=["of another session", "of no session"])
def test_memory_that_other_processes_share_is_not_left_behind(
    run_suite: SeededRun, tmp_path: Path, marks: bool
) -> None:
    """As the ranks of an mpirun do that another worker of pytest-xdist has started, or a user."""
    marked = {name: value for name, value in os.environ.items() if marks or name != "ZBMD_TEST_SESSION"}
    ask, answer = tmp_path / "ask", tmp_path / "answer"
    os.mkfifo(ask)
    os.mkfifo(answer)
    command = [sys.executable, "-c", OF_ANOTHER_SESSION, str(ask), str(answer)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=marked) as other:
        run = run_suite(BESIDE_ANOTHER_SESSION, ASK=str(ask), ANSWER=str(answer))
        assert other.poll() is None
    assert run.returncode == pytest.ExitCode.OK, run.stdout


@pytest.mark.parametrize(
    ("extra", "strict", "passes"),
    [
        ("def test_quiet():\n    pytest.skip('not today')\n", "1", False),
        ("def test_quiet():\n    pytest.skip('not today')\n", "0", True),
        ("pytest.importorskip('zbmd_no_such_package')\n", "1", False),
        ("pytest.importorskip('pyverbs.no_such_module', reason='no RDMA')\n", "1", True),
    ],
    ids=["a quiet skip", "not strict", "a module for want of anything", "what is optional"],
)
def test_strict_skips(run_suite: SeededRun, tmp_path: Path, extra: str, strict: str, passes: bool) -> None:
    (tmp_path / "test_extra.py").write_text(f"import pytest\n{extra}")
    run = run_suite(SKIPS, ZBMD_STRICT_SKIPS=strict)
    assert (run.returncode == 0) is passes, run.stdout
    assert ("install what is missing" in run.stdout) is not passes


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            (
                "def test_quiet():\n    pytest.skip('not today')\n",
                "pytest.importorskip('zbmd_no_such_package')\n",
            ),
            ("test_extra0.py::test_quiet: Skipped: not today", "could not import 'zbmd_no_such_package'"),
        ),
        ((SESSION_LEAK,), ("thread ",)),
        ((LASTING, "def test_passes(): pass"), ()),
    ],
    ids=["quiet skips", "left by the session", "lasting"],
)
def test_workers_tell_what_fails_the_session(
    run_suite: SeededRun, tmp_path: Path, files: tuple[str, ...], told: tuple[str, ...]
) -> None:
    for number, text in enumerate(files):
        (tmp_path / f"test_extra{number}.py").write_text(f"import pytest\n{text}")
    workers = ("--numprocesses=2", "--dist=loadfile")
    run = run_suite("def test_first(seed): pass", *workers, ZBMD_STRICT_SKIPS="1")
    assert run.returncode == (1 if told else 0), run.stdout
    for line in told:
        assert re.search(rf"^{re.escape(line)}|: {re.escape(line)}", run.stdout, re.MULTILINE), run.stdout


def test_one_seed_repeats_everything(run_suite: SeededRun) -> None:
    text = """
from hypothesis import given, strategies as st

drawn = []

@given(st.integers())
def test_drawn(number):
    drawn.append(number)

def test_shown(seed):
    print("drawn", seed, hash(tuple(drawn)))
    assert False
"""
    first = run_suite(text)
    seed = re.search(r"ZBMD_TEST_SEED=(\d+)", first.stdout)
    assert seed is not None
    assert f"ZBMD_TEST_SEED={seed[1]} make test PYTEST_ARGS='test_suite.py::test_shown'" in first.stdout
    again = run_suite(text, ZBMD_TEST_SEED=seed[1])
    other = run_suite(text, ZBMD_TEST_SEED=str(int(seed[1]) + 1))
    shown = [re.search(r"^drawn .*$", run.stdout, re.MULTILINE) for run in (first, again, other)]
    lines = [line[0] for line in shown if line is not None]
    assert len(lines) == 3
    assert lines[0] == lines[1] != lines[2]


def test_a_bad_seed_is_a_usage_error(run_suite: SeededRun) -> None:
    run = run_suite("def test_nothing(): pass", ZBMD_TEST_SEED="soon")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "whole number" in run.stderr
