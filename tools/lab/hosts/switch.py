"""A network switch in user space: hosts' cables with delay, loss and a rate, on kernels with `netem` or
without.

    python -m zbmd.tools.lab.hosts.switch --seed N PID [PID ...]

Makes one TAP device `eth0` in the network namespace of each process, and carries Ethernet frames between
them. What a host sends waits for its turn at the cable's rate, is lost by chance, and arrives after the
delay, as behind `tc netem`; chance is seeded. Commands come on standard input, one JSON object a line
(`Cable` and the port's number), and each is answered by a line once it holds. The devices go with this
process, and it goes with its input.

Frames of up to 64 KiB pass whole (the kernel's segmentation offload) unless a cable loses some: then each
frame on the network is one packet, so that a loss is the loss of one.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

FRAME_BYTES_MAX: Final = 65536 + 64
QUEUE_BYTES_MAX: Final = 32 << 20
"""That wait for a port's cable or are on their way through it; what comes on top is lost, as at any
switch."""
QUEUE_NS_MAX: Final = 100_000_000
"""What waits for its turn at a cable with a rate takes no longer than this; what comes on top is lost, as at
the tail of any bounded queue. A longer queue would hold acknowledgements up for seconds."""
COMMAND_BYTES_MAX: Final = 4096
DEVICE: Final = "eth0"

_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_TUNSETCARRIER: Final = 0x400454E2
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS: Final = 0x01 | 0x02 | 0x04  # checksum, TCP over IPv4 and IPv6
_HEADER_BYTES: Final = 10  # struct virtio_net_hdr, in front of each frame


class Cable(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a host's cable, applied to what the host sends. rate_mbps 0: unlimited; loss: 0..1.

    more_ms: added to `delay_ms` of what goes to these ports, which are numbers as text.
    """

    plugged: bool = True
    delay_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 0.0
    loss: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    rate_mbps: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    more_ms: dict[str, Annotated[float, msgspec.Meta(ge=0, le=60_000)]] = {}


class Command(Cable, frozen=True, kw_only=True):
    """A port's cable from now on."""

    port: int


class Port:
    """One host's device and cable."""

    def __init__(self, pid: int) -> None:
        self.fd = _open_tap(pid)
        self.cable = Cable()
        self.free_ns = 0
        self.queued_bytes = 0

    def apply(self, cable: Cable) -> None:
        """The cable from now on; pulled, the host loses its carrier, as with a real one."""
        self.cable = cable
        fcntl.ioctl(self.fd, _TUNSETOFFLOAD, 0 if cable.loss else _OFFLOADS)
        fcntl.ioctl(self.fd, _TUNSETCARRIER, array.array("i", [int(cable.plugged)]), False)


class Switch:
    """Ports, what is on its way between them, and which address is behind which port."""

    def __init__(self, pids: Sequence[int], seed: int) -> None:
        self.ports = [Port(pid) for pid in pids]
        self._chance = random.Random(seed)
        self._learned: dict[bytes, Port] = {}
        self._under_way: list[tuple[int, int, bytes, Port, Port]] = []
        self._serial = 0
        self._by_fd = {port.fd: port for port in self.ports}

    def run(self) -> None:
        """Carry frames until the input ends."""
        poller = select.poll()
        poller.register(sys.stdin.fileno(), select.POLLIN)
        for port in self.ports:
            poller.register(port.fd, select.POLLIN)
        text = b""
        while True:
            for fd, _ in poller.poll(self._wait_ms()):
                if fd in self._by_fd:
                    self._read(self._by_fd[fd])
                    continue
                more = os.read(fd, COMMAND_BYTES_MAX)
                if not more:
                    return
                *lines, text = (text + more).split(b"\n")
                for line in lines:
                    self._obey(line)
            self._deliver()

    def _obey(self, line: bytes) -> None:
        command = msgspec.json.decode(line, type=Command)
        self.ports[command.port].apply(command)
        print("done", flush=True)

    def _wait_ms(self) -> float | None:
        if not self._under_way:
            return None
        return max(0.0, (self._under_way[0][0] - time.monotonic_ns()) / 1e6)

    def _read(self, port: Port) -> None:
        frame = os.read(port.fd, FRAME_BYTES_MAX)
        cable, now_ns = port.cable, time.monotonic_ns()
        nbytes = len(frame) - _HEADER_BYTES
        target, source = (frame[_HEADER_BYTES + at : _HEADER_BYTES + at + 6] for at in (0, 6))
        self._learned[source] = port
        lost = cable.loss and self._chance.random() < cable.loss
        if not cable.plugged or lost or port.queued_bytes + nbytes > QUEUE_BYTES_MAX:
            return
        due_ns = now_ns
        if cable.rate_mbps:
            begin_ns = max(now_ns, port.free_ns)
            if begin_ns - now_ns > QUEUE_NS_MAX:
                return
            due_ns = port.free_ns = begin_ns + round(nbytes * 8000 / cable.rate_mbps)
        due_ns += round(cable.delay_ms * 1e6)
        to = self._learned.get(target)
        for other in [to] if to is not None else [p for p in self.ports if p is not port]:
            if other is not port:
                self._serial += 1
                port.queued_bytes += nbytes
                there_ns = due_ns + round(cable.more_ms.get(str(self.ports.index(other)), 0.0) * 1e6)
                heapq.heappush(self._under_way, (there_ns, self._serial, frame, port, other))

    def _deliver(self) -> None:
        now_ns = time.monotonic_ns()
        while self._under_way and self._under_way[0][0] <= now_ns:
            _, _, frame, port, other = heapq.heappop(self._under_way)
            port.queued_bytes -= len(frame) - _HEADER_BYTES
            if port.cable.plugged and other.cable.plugged:
                self._write(other, frame)

    def _write(self, port: Port, frame: bytes) -> None:
        try:
            os.write(port.fd, frame)
        except (BlockingIOError, OSError) as error:
            # EIO: the host has its device down. A frame that no host takes is lost.
            if not isinstance(error, BlockingIOError) and error.errno not in (5, 22):
                raise


def _open_tap(pid: int) -> int:
    """A TAP device in the network namespace of a process; this process stays in that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"the namespace of process {pid}: {os.strerror(code)}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR)
    fcntl.ioctl(fd, _TUNSETIFF, request)
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    return fd


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("pids", type=int, nargs="+", metavar="PID")
    arguments = parser.parse_args(argv)
    switch = Switch(arguments.pids, arguments.seed)
    print("ready", flush=True)
    switch.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
