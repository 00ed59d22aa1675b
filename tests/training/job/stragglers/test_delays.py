"""Delays of batches: held by a living injector, gone with it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from zbmd.training.job.stragglers.delays import (
    DataDelay,
    delay_path,
    delaying_data,
    read_delay,
    wait_for_data,
)
from zbmd.transport.errors import UserError

LONG = DataDelay(delay_ms=50.0)


def waited_ms(path: Path) -> float:
    began = time.monotonic()
    wait_for_data(os.fspath(path))
    return (time.monotonic() - began) * 1e3


def test_batches_wait_while_the_injector_lives(tmp_path: Path) -> None:
    path = delay_path(tmp_path, 3)
    with delaying_data(tmp_path, 3, LONG):
        assert waited_ms(path) >= LONG.delay_ms
        with pytest.raises(UserError, match="another process delays"), delaying_data(tmp_path, 3, LONG):
            pass
    assert not path.exists()
    wait_for_data(os.fspath(path))


def test_a_killed_injector_delays_nothing(tmp_path: Path) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with delaying_data(tmp_path, 0, DataDelay(delay_ms=60_000.0)):
            os.write(write, b"x")
            signal.pause()
    assert os.read(read, 1) == b"x"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    path = delay_path(tmp_path, 0)
    assert path.exists()
    wait_for_data(os.fspath(path))  # the limit of time of the test is less than that delay would be
    for file in (read, write):
        os.close(file)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"delay_ms":-1}', b'{"delay_ms":1e9}', b"[" * 2000])
def test_a_damaged_file_is_no_delay(data: bytes) -> None:
    assert read_delay(data) is None
