"""Files are replaced whole, and a writer that is killed leaves nothing that outlasts the next write."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from zbmd.transport.host import files
from zbmd.transport.host.files import write_atomically


@pytest.fixture(params=["unnamed", "named"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a file in a directory whose file system has unnamed files, or none."""
    if request.param == "named":
        monkeypatch.setattr(files, "_unnamed", lambda directory: None)
    return tmp_path / "run" / "state.json"


def put(path: Path, data: bytes) -> None:
    write_atomically(path, lambda file: file.write(data))


def killed_as_it_replaces(path: Path) -> None:
    """Have another process write, and die at the last moment at which the old file is still there."""
    pid = os.fork()
    if not pid:
        try:
            os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
            put(path, b"never seen")
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_the_next_write_removes_what_a_killed_one_has_left(path: Path) -> None:
    put(path, b"old")
    for _ in range(2):
        killed_as_it_replaces(path)
        (left,) = [each.name for each in path.parent.iterdir() if each != path]
        assert re.fullmatch(r"\.state\.json\.[0-9a-f]{16}", left)
    assert path.read_bytes() == b"old"
    beside = path.parent / ".state.json.bak"
    beside.touch()
    put(path, b"new")
    assert path.read_bytes() == b"new"
    assert sorted(path.parent.iterdir()) == [beside, path]


def test_a_first_write_that_is_killed_leaves_nothing_where_files_can_be_unnamed(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    put(path, b"a first write needs no second name")
    other = tmp_path / "other.json"
    pid = os.fork()
    if not pid:
        try:
            write_atomically(other, lambda file: os.kill(os.getpid(), signal.SIGKILL))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert list(tmp_path.iterdir()) == [path]


def test_a_living_writer_keeps_its_file_while_another_writes(path: Path) -> None:
    put(path, b"old")
    begun, go_on = threading.Event(), threading.Event()

    def slowly(file: BinaryIO) -> None:
        file.write(b"slow")
        begun.set()
        assert go_on.wait(180)

    slow = threading.Thread(target=write_atomically, args=(path, slowly))
    slow.start()
    try:
        assert begun.wait(180)
        put(path, b"fast")
        assert path.read_bytes() == b"fast"
    finally:
        go_on.set()
        slow.join()
    assert path.read_bytes() == b"slow"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_changes_nothing_and_leaves_nothing(path: Path) -> None:
    put(path, b"old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
