"""Every rule of tidy against a planted breach, and against the nearest thing that is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zbmd.tools.dev import tidy

ROOT = Path(__file__).resolve().parents[2]
MACHINE = '''"""A machine."""

{imports}

class Machine:
    """It."""

    def handle(self, event: object, *, now_ns: int) -> list[object]:
        """Take it."""
        return []

    def check_invariants(self) -> None:
        """Hold."""
'''
LONG_C = "static int walk(int n) {\n" + "    n++;\n" * 70 + "}\n"
LONG_CYTHON = "cdef int walk(int n) noexcept nogil:\n" + "    n += 1\n" * 70 + "\ndef short():\n    pass\n"
SWALLOW = "for x in y:\n    try:\n        f()\n    except (OSError, BaseException):\n        continue\n"
DIRECT_TIMING = "def f():\n    start = time.monotonic()\n    assert time.monotonic() - start < 1\n"
NAMED_TIMING = "def f():\n    a = now_ns()\n    spent = now_ns() - a\n    assert 0 < spent / 1e6 < 3\n"
PROGRAM = "import os\n" + "print(os.getpid())\n" * 5
NO_PROGRAM = "a line of text, def and import\n" * 9
LONG_PYTHON = "def walk(n):\n" + "    n += 1\n" * 70

# (path, text, line, rule): the breach that must be reported, and no other.
PLANTED = [
    ("actors/long.py", "x = 1\n" * 601, 601, "file-lines"),
    ("transport/long.h", "\n" * 601, 601, "file-lines"),
    ("actors/walk.py", LONG_PYTHON, 1, "function-lines"),
    ("transport/walk.pyx", LONG_CYTHON, 1, "function-lines"),
    ("transport/walk.h", LONG_C, 1, "function-lines"),
    ("training/model.py", "def f():\n    import torch.nn\n", 2, "import-ban"),
    ("training/model.py", "from cupy import array\n", 1, "import-ban"),
    ("transport/shm/connect.py", 'import_module("pyverbs.device")\n', 1, "import-ban"),
    ("actors/core/wire.py", "import json, pickle\n", 1, "import-ban"),
    ("tests/actors/test_wire.py", "from marshal import loads\n", 1, "import-ban"),
    ("tools/wire.py", '__import__("shelve")\n', 1, "import-ban"),
    ("training/data.py", "np.load(path, allow_pickle=True)\n", 1, "import-ban"),
    ("actors/view.py", MACHINE.format(imports="import asyncio"), 3, "sans-io"),
    ("actors/view.py", MACHINE.format(imports="from os import environ"), 3, "sans-io"),
    ("actors/rules.py", '"""Sans-I/O decisions."""\nimport random\n', 2, "sans-io"),
    ("collectives/algorithms/ring.py", "import time\n", 1, "sans-io"),
    ("actors/a.py", "try:\n    f()\nexcept Exception:\n    pass\n", 3, "swallowed-error"),
    ("actors/a.py", "try:\n    f()\nexcept:\n    ...\n", 3, "swallowed-error"),
    ("actors/a.py", SWALLOW, 4, "swallowed-error"),
    ("tests/test_a.py", "with suppress(Exception):\n    f()\n", 1, "swallowed-error"),
    ("actors/a.py", f"x = 1  # {'TO' + 'DO'}: later\n", 1, "unfinished"),
    ("transport/a.h", f"/* {'FIX' + 'ME'} */\n", 1, "unfinished"),
    ("docs/a.md", f"text\n{'<' * 7} HEAD\n", 2, "merge-marker"),
    ("actors/a.pyx", f"{'>' * 7} main\n", 1, "merge-marker"),
    ("docs/a.md", f"Run /{'home'}/ada/zbmd.\n", 1, "home-path"),
    ("tools/a.py", f'x = "/{"root"}/.cache"\n', 1, "home-path"),
    ("tests/actors/test_a.py", "import time\ntime.sleep(0.1)\n", 2, "test-sleep"),
    ("tests/actors/test_a.py", "async def f(n):\n    await asyncio.sleep(n)\n", 2, "test-sleep"),
    ("tests/test_a.py", DIRECT_TIMING, 3, "test-timing"),
    ("tests/test_a.py", NAMED_TIMING, 4, "test-timing"),
    ("tests/test_a.py", f"x = 1\nSCRIPT = {PROGRAM!r}\n", 2, "test-program"),
    ("tests/support/a.py", f"SCRIPT = f'''{{x}}\n{PROGRAM}'''\n", 1, "test-program"),
    ("actors/broken.py", "def f(:\n", 1, "syntax"),
]

ALLOWED = [
    ("actors/long.py", "x = 1\n" * 600),
    ("docs/long.md", "\n" * 5000),
    ("actors/walk.py", "def walk(n):\n" + "    n += 1\n" * 69),
    ("transport/walk.pyx", "cdef int walk(int n) noexcept nogil:\n" + "    n += 1\n" * 69),
    ("transport/walk.pyx", "cdef class Walk(Base):\n" + "    cdef int n\n" * 90),
    ("collectives/torch/backend.py", "import torch\n"),
    ("training/autograd/array_module.py", "def f():\n    import cupy\n"),
    ("transport/rdma/message_device.py", "import pyverbs.device\n"),
    ("tests/training/test_torch.py", 'torch = import_module("torch")\n'),
    ("actors/view.py", MACHINE.format(imports="import enum")),
    ("actors/view.py", MACHINE.format(imports="if TYPE_CHECKING:\n    from random import Random")),
    ("actors/driver.py", "import asyncio, os, random, time\n"),
    ("actors/a.py", "try:\n    f()\nexcept OSError:\n    pass\n"),
    ("actors/a.py", "try:\n    f()\nexcept Exception:\n    log()\n    raise\n"),
    ("tests/test_a.py", "async def f():\n    await asyncio.sleep(0)\n"),
    ("tests/test_a.py", "def f():\n    before = now_ns()\n    assert g().at_ns >= before\n"),
    ("tests/test_a.py", f"SCRIPT = {PROGRAM[: PROGRAM.rindex('print')]!r}\n"),
    ("tests/test_a.py", f"TEXT = {NO_PROGRAM!r}\n"),
    ("tests/repo/test_watch.py", f"SCRIPT = {PROGRAM!r}\n"),
    ("tools/a.py", f"SCRIPT = {PROGRAM!r}\n"),
    ("tools/bench.py", "def f():\n    time.sleep(1)\n"),
]


def hold(root: Path, path: str, content: bytes) -> list[tuple[int, str]]:
    """Write one file under `root` and return the (line, rule) of each breach in it."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)
    return [(breach.line, breach.rule) for breach in tidy.check(root, [path])]


@pytest.mark.parametrize(("path", "text", "line", "rule"), PLANTED)
def test_a_planted_breach_is_reported(tmp_path: Path, path: str, text: str, line: int, rule: str) -> None:
    assert hold(tmp_path, path, text.encode()) == [(line, rule)]


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_its_neighbour_is_allowed(tmp_path: Path, path: str, text: str) -> None:
    assert hold(tmp_path, path, text.encode()) == []


def test_every_rule_has_a_planted_breach() -> None:
    kinds = len(tidy.RULES) + len({"syntax"})
    assert len({rule for _, _, _, rule in PLANTED}) == kinds


def test_binaries_and_large_files(tmp_path: Path) -> None:
    assert hold(tmp_path, "transport/_native.so", b"\x7fELF\0") == [(1, "binary")]
    assert hold(tmp_path, "training/corpus.bin", b"\xff\xfe") == [(1, "binary")]
    assert hold(tmp_path, "tests/transport/lost_ack.zlog", b"\x93\xc4\0") == []
    assert hold(tmp_path, "docs/figures.csv", b"1,2\n" * 60_000) == [(1, "file-bytes")]


def test_test_modules_have_names_of_their_own() -> None:
    paths = ["tests/actors/test_view.py", "tests/training/test_view.py", "tests/actors/__init__.py"]
    paths += ["tests/support/__init__.py", "tests/support/links/__init__.py", "tests/programs/__init__.py"]
    found = [(breach.path, breach.rule) for breach in tidy.repeated_test_names(paths)]
    assert sorted(found) == [
        ("tests/actors/__init__.py", "test-name"),
        ("tests/training/test_view.py", "test-name"),
    ]


def test_the_command_prints_each_breach_and_fails(tmp_path: Path) -> None:
    def run_tidy() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "tools/dev/tidy.py", str(tmp_path)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("built.py\n")
    (tmp_path / "built.py").write_text("import pickle\n")
    (tmp_path / "new.py").write_text("import json\n")
    assert run_tidy().returncode == 0
    (tmp_path / "new.py").write_text("import pickle\n")
    run = run_tidy()
    assert run.returncode == 1
    assert run.stdout.startswith("new.py:1: import-ban: pickle: ")
    assert run.stdout.count("\n") == 1
