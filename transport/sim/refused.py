"""What an event loop on a virtual clock has not: it would reach outside of the simulation."""

from __future__ import annotations

import asyncio
from typing import Any

from zbmd.transport.sim.errors import NotSimulated


def _refusing(name: str) -> Any:
    def refuse(self: object, *args: object, **options: object) -> object:
        raise NotSimulated(
            f"loop.{name}() would reach outside of the simulation: "
            "let processes talk through `SimProcess.listen`, `dial` and `send_datagram`"
        )

    refuse.__name__ = name
    return refuse


class NoRealIO(asyncio.AbstractEventLoop):
    """Every method that needs sockets, pipes, signals or child processes raises `NotSimulated`."""

    add_reader: Any = _refusing("add_reader")
    remove_reader: Any = _refusing("remove_reader")
    add_writer: Any = _refusing("add_writer")
    remove_writer: Any = _refusing("remove_writer")
    add_signal_handler: Any = _refusing("add_signal_handler")
    remove_signal_handler: Any = _refusing("remove_signal_handler")
    getaddrinfo: Any = _refusing("getaddrinfo")
    getnameinfo: Any = _refusing("getnameinfo")
    create_connection: Any = _refusing("create_connection")
    create_server: Any = _refusing("create_server")
    create_unix_connection: Any = _refusing("create_unix_connection")
    create_unix_server: Any = _refusing("create_unix_server")
    start_tls: Any = _refusing("start_tls")
    sendfile: Any = _refusing("sendfile")
    connect_accepted_socket: Any = _refusing("connect_accepted_socket")
    create_datagram_endpoint: Any = _refusing("create_datagram_endpoint")
    connect_read_pipe: Any = _refusing("connect_read_pipe")
    connect_write_pipe: Any = _refusing("connect_write_pipe")
    subprocess_shell: Any = _refusing("subprocess_shell")
    subprocess_exec: Any = _refusing("subprocess_exec")
    sock_recv: Any = _refusing("sock_recv")
    sock_recv_into: Any = _refusing("sock_recv_into")
    sock_recvfrom: Any = _refusing("sock_recvfrom")
    sock_recvfrom_into: Any = _refusing("sock_recvfrom_into")
    sock_sendall: Any = _refusing("sock_sendall")
    sock_sendto: Any = _refusing("sock_sendto")
    sock_connect: Any = _refusing("sock_connect")
    sock_accept: Any = _refusing("sock_accept")
    sock_sendfile: Any = _refusing("sock_sendfile")
