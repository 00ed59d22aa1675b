"""A man in the middle: passes on what two ends say over TCP, and does to the bytes what a test asks for."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from zbmd.transport.secure.record_stream import RECORD_HEADER_BYTES
from zbmd.transport.tcp.address import TcpAddress

Tamper = Callable[[list[bytes]], list[bytes]]
"""Takes all records of a direction so far, and gives what the other side should have got so far."""


class Middle:
    """Stands between a dialer, which dials `address`, and `target`. tag_bytes: of the session's records.

    What the dialer says passes unchanged until `tamper` is set; from then on whole records are collected, and
    with each new one `tamper` says what the listener gets, all in all.
    """

    def __init__(self, target: TcpAddress, *, tag_bytes: int) -> None:
        self._target = target
        self._tag_bytes = tag_bytes
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.tamper: Tamper | None = None

    async def __aenter__(self) -> Middle:
        self._server = await asyncio.start_server(self._on_dialer, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    @property
    def address(self) -> TcpAddress:
        """The address that the dialer is to dial."""
        assert self._server is not None
        return TcpAddress(host="127.0.0.1", port=self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """End both connections, as a network does that is gone: in order, without a word of the ends."""
        for writer in self._writers:
            writer.close()

    async def _on_dialer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers += [writer, other_writer]
        for source, sink, both_ways in ((reader, other_writer, False), (other_reader, writer, True)):
            task = asyncio.ensure_future(self._pass(source, sink, plain=both_ways))
            self._tasks.add(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, plain: bool) -> None:
        try:
            while self.tamper is None or plain:
                data = await source.read(1 << 16)
                if not data:
                    break
                if self.tamper is not None and not plain:
                    await self._records(source, sink, data)
                    return
                sink.write(data)
                await sink.drain()
            sink.close()
        except ConnectionError:
            sink.close()

    async def _records(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, data: bytes) -> None:
        assert self.tamper is not None
        records: list[bytes] = []
        passed = 0
        while True:
            while (size := self._record_bytes(data)) is not None and len(data) >= size:
                records.append(data[:size])
                data = data[size:]
                stream = b"".join(self.tamper(list(records)))
                sink.write(stream[passed:])
                passed = max(passed, len(stream))
            more = await source.read(1 << 16)
            if not more:
                sink.close()
                return
            data += more

    def _record_bytes(self, data: bytes) -> int | None:
        if len(data) < RECORD_HEADER_BYTES:
            return None
        (word,) = struct.unpack_from("<I", data)
        size: int = RECORD_HEADER_BYTES + (word & 0xFFFFFF) + self._tag_bytes
        return size
