"""Connections of short paths do not pace; those of long ones have what the system has chosen."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from zbmd.transport.tcp.sockets import SHORT_PATH_US, begin_short, min_round_trip_us, settle

PINGS_MAX = 50


def name_of(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


class FarSocket(socket.socket):
    """One whose kernel says that its path is long."""

    def getsockopt(self, level: int, optname: int, buflen: int = 0) -> bytes:  # type: ignore[override]
        if optname == socket.TCP_INFO:
            return struct.pack("=148xI", SHORT_PATH_US)
        return super().getsockopt(level, optname, buflen)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket() as listener, socket.socket() as near:
        for sock in (listener, near):
            begin_short(sock)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        near.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            yield near, accepted


def test_a_short_path_is_not_paced_on_either_side(pair: tuple[socket.socket, socket.socket]) -> None:
    with socket.socket() as fresh:
        default = name_of(fresh)
    near, accepted = pair
    for _ in range(PINGS_MAX):  # on a busy machine the first ones may take longer
        near.sendall(b"x")
        accepted.sendall(accepted.recv(1))
        near.recv(1)
    for sock in pair:
        assert min_round_trip_us(sock) < SHORT_PATH_US
        settle(sock)
        assert not name_of(sock).startswith(b"bbr")
        assert default.startswith(b"bbr") or name_of(sock) == default


def test_a_long_path_gets_what_the_system_has_chosen() -> None:
    with FarSocket() as sock, socket.socket() as fresh:
        default = name_of(fresh)
        begin_short(sock)
        settle(sock)
        assert name_of(sock) == default


def test_a_choice_that_does_not_pace_stays() -> None:
    with FarSocket() as sock, socket.socket() as fresh:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        begin_short(sock)
        assert name_of(sock) == b"reno"
        if not name_of(fresh).startswith(b"bbr"):
            settle(sock)
            assert name_of(sock) == b"reno"
