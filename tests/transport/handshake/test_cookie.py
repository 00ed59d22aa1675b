"""The cookie file: made once whoever comes first, refused when others could know it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zbmd.transport.handshake.cookie import (
    COOKIE_BYTES_MAX,
    COOKIE_BYTES_MIN,
    CookieError,
    cookie_path,
    load_or_create_cookie,
)

LOAD = "import sys; from zbmd.transport.handshake.cookie import load_or_create_cookie as load; "


def test_it_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "config" / "zbmd" / "cookie"
    cookie = load_or_create_cookie(file)
    assert len(cookie) >= COOKIE_BYTES_MIN
    assert cookie == load_or_create_cookie(str(file)) == file.read_bytes().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert load_or_create_cookie(tmp_path / "other") != cookie


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"ZBMD_COOKIE_FILE": "/x/c", "XDG_CONFIG_HOME": "/y"}, "/x/c"),
        ({"XDG_CONFIG_HOME": "/y"}, "/y/zbmd/cookie"),
        ({"XDG_CONFIG_HOME": "relative"}, ".config/zbmd/cookie"),
        ({"ZBMD_COOKIE_FILE": "", "XDG_CONFIG_HOME": ""}, ".config/zbmd/cookie"),
    ],
)
def test_its_path(
    environ: dict[str, str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cookie_path(environ) == tmp_path / path


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "here"))
    assert load_or_create_cookie() == (tmp_path / "here").read_bytes().strip()


def test_all_who_come_at_once_get_the_same(tmp_path: Path) -> None:
    code = LOAD + "sys.stdin.read(1); print(load(sys.argv[1]).decode())"
    command = [sys.executable, "-c", code, str(tmp_path / "cookie")]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("g")
        racer.stdin.flush()
    cookies = {racer.communicate(timeout=180)[0] for racer in racers}
    assert cookies == {(tmp_path / "cookie").read_text()}
    assert os.listdir(tmp_path) == ["cookie"]


def test_a_maker_killed_before_it_wrote_leaves_the_work_to_the_next(tmp_path: Path) -> None:
    code = (
        LOAD + "import os, secrets; secrets.token_hex = lambda n: os.kill(os.getpid(), 9); load(sys.argv[1])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cookie")]
    assert subprocess.run(command, timeout=180, check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "cookie").read_bytes() == b""
    assert load_or_create_cookie(tmp_path / "cookie") == (tmp_path / "cookie").read_bytes().strip()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_one_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "cookie"
    load_or_create_cookie(file)
    file.chmod(mode)
    with pytest.raises(CookieError, match=f"mode {mode:04o}.*chmod 600"):
        load_or_create_cookie(file)
    file.chmod(0o400)
    assert load_or_create_cookie(file) == file.read_bytes().strip()


def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cookie"
    load_or_create_cookie(file)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(CookieError, match=f"this process to uid {other}.*ZBMD_COOKIE_FILE"):
        load_or_create_cookie(file)


@pytest.mark.parametrize(
    "content", [b"short", b"\n", bytes(65), b"x" * 31, b"x" * (COOKIE_BYTES_MAX + 1), b"two words " * 9]
)
def test_what_is_no_cookie_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "cookie"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(CookieError, match=r"holds no cookie.*delete it"):
        load_or_create_cookie(file)
    assert file.read_bytes() == content


@pytest.mark.parametrize("length", [COOKIE_BYTES_MIN, COOKIE_BYTES_MAX])
def test_a_secret_of_ones_own_will_do(tmp_path: Path, length: int) -> None:
    file = tmp_path / "cookie"
    file.write_bytes(b"s" * length + b"\r\n")
    file.chmod(0o600)
    assert load_or_create_cookie(file) == b"s" * length


@pytest.mark.parametrize("name", ["fifo", "."])
def test_what_is_no_file_is_refused_and_does_not_hang(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(CookieError, match="no regular file"):
        load_or_create_cookie(tmp_path / name)


def test_a_place_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CookieError, match="ZBMD_COOKIE_FILE"):
        load_or_create_cookie(tmp_path / "file" / "cookie")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write(full.fileno(), data))
        with pytest.raises(CookieError, match="No space left"):
            load_or_create_cookie(tmp_path / "cookie")
    monkeypatch.undo()
    assert load_or_create_cookie(tmp_path / "cookie")
