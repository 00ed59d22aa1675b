"""A few hosts on one machine: each a network namespace with an address, a name and a home of its own.

    python -m zbmd.tools.lab.hosts.netns [--hosts N] [--delay TIME] [--loss FRACTION] [--rate MBPS] COMMAND
        ...

runs the command on every host, with ZBMD_LAB_HOST, ZBMD_LAB_ADDRESS and ZBMD_LAB_HOSTS in its environment,
and ends when all have. Wants root, iproute2 and util-linux.

Cables are veth pairs into a bridge; with `shaped` they end in a switch in user space (`switch`), which
can delay, lose and slow down what passes, or, with `netem` too, the kernel does that where it can. Nothing
can be left behind: no namespace has a name. Each lives in a process that ends with this one, however this
one ends, and all devices are in those namespaces, the bridge too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from zbmd.tools.cli.options import exit_code_of, script_parser
from zbmd.tools.lab.hosts.switch import DEVICE, Cable, Command
from zbmd.transport.clock.deadlines import parse_duration
from zbmd.transport.errors import UserError, ZbmdError

HOSTS_MAX: Final = 16
BRIDGE: Final = "bridge0"
PREFIX: Final = "10.77.0"
PREFIX6: Final = "fd77::"
START_S: Final = 30.0
BURST_BYTES_MIN: Final = 128 << 10
BURST_S: Final = 0.008
"""Burst of a rate of the kernel: two of its ticks, and some large frames at least."""
QUEUE_MS: Final = 100
"""Queue for that rate; what comes on top is lost, as at any switch."""

# Ends when its input does, which is when the process that holds the other end is gone. Each host has booted
# by itself: else its nodes would take each other for processes of one host, whose ends the kernel proves.
_HOLDER: Final = """
set -e
hostname "$1"
mount --make-rprivate /
mount -t sysfs zbmd-lab /sys
mount -t cgroup2 zbmd-lab /sys/fs/cgroup 2>/dev/null || true
boot=$(mktemp)
cat /proc/sys/kernel/random/uuid >"$boot"
mount --bind "$boot" /proc/sys/kernel/random/boot_id
rm "$boot"
echo ready
exec cat
"""


class LabError(ZbmdError):
    """The laboratory could not be set up, or one of its commands failed."""


def why_not(*, switched: bool = True) -> str:
    """Why no laboratory can be had here; nothing if it can. switched: whether it needs our own switch."""
    if os.geteuid() != 0:
        return "network namespaces want root"
    missing = [name for name in ("ip", "nsenter", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install iproute2 util-linux"
    tunnels = not switched or os.path.exists("/dev/net/tun")
    return "" if tunnels else "there is no /dev/net/tun: modprobe tun"


def sweep() -> None:
    """Remove the folders of laboratories whose processes were killed: nothing else stays of them."""
    for folder in Path(tempfile.gettempdir()).glob("zbmd-lab-*"):
        pid = folder.name.split("-")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Namespace:
    """A process that holds namespaces open."""

    process: subprocess.Popen[bytes]

    @classmethod
    def make(cls, name: str) -> _Namespace:
        command = ["unshare", "--net", "--uts", "--mount", "--", "sh", "-c", _HOLDER, "holder", name]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            process.wait()
            raise LabError(f"no namespace for {name}: {' '.join(command[:4])} failed")
        made = cls(process)
        made.ip("link", "set", "lo", "up")
        return made

    @property
    def pid(self) -> int:
        return self.process.pid

    def enter(self) -> list[str]:
        """The beginning of a command that is to run inside."""
        return [
            "nsenter",
            "--target",
            str(self.pid),
            "--net",
            "--uts",
            "--mount",
            "--root",
            f"--wdns={os.getcwd()}",
        ]

    def ip(self, *arguments: str) -> None:
        self._run("ip", *arguments)

    def shape(self, cable: Cable) -> None:
        """By the kernel: what leaves the host is delayed, lost and slowed down as on this cable."""
        words = ["delay", f"{cable.delay_ms}ms", "loss", f"{cable.loss:.4%}"]
        words += ["rate", f"{cable.rate_mbps}mbit"] if cable.rate_mbps else []
        self._run("tc", "qdisc", "replace", "dev", DEVICE, "root", "netem", *words)

    def limit(self, rate_mbps: float) -> None:
        """By the kernel, with a token bucket, which every kernel has: what leaves the host has this rate."""
        burst = max(BURST_BYTES_MIN, round(rate_mbps * 1e6 / 8 * BURST_S))
        words = ["tbf", "rate", f"{rate_mbps}mbit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"]
        self._run("tc", "qdisc", "replace", "dev", DEVICE, "root", *words)

    def _run(self, *command: str) -> None:
        entered = ["nsenter", "--target", str(self.pid), "--net", *command]
        done = subprocess.run(entered, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class LabHost:
    """One host: its `name`, `address`, `address6`, and `home`, a folder for all that it keeps."""

    def __init__(self, lab: Lab, number: int, namespace: _Namespace, home: Path) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = f"{PREFIX}.{number + 1}"
        self.address6 = f"{PREFIX6}{number + 1:x}"
        self.home = home
        self._lab = lab
        self._namespace = namespace

    def environment(self) -> dict[str, str]:
        """Return the variables that give this host's processes files of their own."""
        return {
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "ZBMD_COOKIE_FILE": str(self.home / "cookie"),
            "ZBMD_LAB_HOST": str(self.number),
            "ZBMD_LAB_ADDRESS": self.address,
            "ZBMD_LAB_HOSTS": " ".join(host.address for host in self._lab.hosts),
        }

    def enter(self) -> list[str]:
        """The beginning of a command that is to run on this host."""
        return self._namespace.enter()

    def popen(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on this host; options are those of `subprocess.Popen`."""
        env = {**os.environ, **self.environment(), **(environment or {})}
        return subprocess.Popen([*self._namespace.enter(), *command], env=env, **options)

    def pull_cable(self) -> None:
        """No carrier, and nothing passes, from here on."""
        self._lab.set_cable(self.number, plugged=False)

    def plug_cable(self) -> None:
        """As before it was pulled."""
        self._lab.set_cable(self.number, plugged=True)

    def shape(self, *, delay_ms: float = 0.0, loss: float = 0.0, rate_mbps: float = 0.0) -> None:
        """Delay, lose and slow down what this host sends; a rate alone is the kernel's work if the lab is not
        shaped. Raises `LabError` for a delay or losses unless it is.
        """
        self._lab.set_cable(self.number, delay_ms=delay_ms, loss=loss, rate_mbps=rate_mbps)

    def shape_link(self, other: LabHost, *, delay_ms: float) -> None:
        """Delay what this host and another one send to each other, beside what their cables do.

        Raises `LabError` unless the lab is shaped by the switch in user space.
        """
        for one, to in ((self, other), (other, self)):
            self._lab.set_delay(one.number, to.number, delay_ms)


class Lab:
    """`hosts` hosts on one network; a context manager. seed: of what a shaped network loses; netem: it is the
    kernel that shapes, by its chance.

    Raises `UserError` if no laboratory can be had here, and `LabError` if a command of it fails.
    """

    def __init__(self, hosts: int = 3, *, shaped: bool = False, netem: bool = False, seed: int = 0) -> None:
        if not 1 <= hosts <= HOSTS_MAX:
            raise UserError(f"{hosts} hosts: 1 to {HOSTS_MAX} fit")
        if reason := why_not(switched=shaped and not netem):
            raise UserError(f"no laboratory here: {reason}.")
        self.hosts: tuple[LabHost, ...] = ()
        self._count = hosts
        self._shaped, self._netem = shaped, netem
        self._seed = seed
        self._stack = contextlib.ExitStack()
        self._bridge: _Namespace | None = None
        self._spaces: list[_Namespace] = []
        self._switch: subprocess.Popen[bytes] | None = None
        self._cables = [Cable() for _ in range(hosts)]

    def __enter__(self) -> Self:
        with self._stack:
            sweep()
            prefix = f"zbmd-lab-{os.getpid()}-"
            home = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
            spaces = self._spaces = [self._namespace(f"host{number}") for number in range(self._count)]
            self.hosts = tuple(self._host(number, space, home) for number, space in enumerate(spaces))
            if self._shaped and not self._netem:
                self._start_switch([space.pid for space in spaces])
            else:
                self._start_bridge(spaces)
            for host, space in zip(self.hosts, spaces, strict=True):
                space.ip("address", "add", f"{host.address}/24", "dev", DEVICE)
                space.ip("address", "add", f"{host.address6}/64", "dev", DEVICE, "nodad")
                space.ip("link", "set", DEVICE, "up")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def set_cable(self, number: int, **changes: Any) -> None:
        """Change a host's cable; returns once the change holds."""
        cable = self._cables[number] = msgspec.structs.replace(self._cables[number], **changes)
        if self._switch is not None:
            self._order(Command(port=number, **msgspec.structs.asdict(cable)))
            return
        if self._shaped:
            self._spaces[number].shape(cable)
        elif cable.delay_ms or cable.loss:
            raise LabError("only the cables of a shaped laboratory delay or lose")
        elif cable.rate_mbps:
            self._spaces[number].limit(cable.rate_mbps)
        assert self._bridge is not None
        self._bridge.ip("link", "set", f"port{number}", "up" if cable.plugged else "down")

    def set_delay(self, number: int, to: int, delay_ms: float) -> None:
        """Delay what a host sends to another one by so much more; returns once the change holds."""
        if self._switch is None:
            raise LabError("only the switch in user space delays what passes between two hosts")
        self.set_cable(number, more_ms={**self._cables[number].more_ms, str(to): delay_ms})

    def _namespace(self, name: str) -> _Namespace:
        space = _Namespace.make(name)
        self._stack.callback(space.close)
        return space

    def _host(self, number: int, space: _Namespace, home: Path) -> LabHost:
        folder = home / f"host{number}"
        folder.mkdir(mode=0o700)
        return LabHost(self, number, space, folder)

    def _start_bridge(self, spaces: Sequence[_Namespace]) -> None:
        bridge = self._bridge = self._namespace("bridge")
        bridge.ip("link", "add", BRIDGE, "type", "bridge", "forward_delay", "0")
        bridge.ip("link", "set", BRIDGE, "up")
        for number, space in enumerate(spaces):
            port = f"port{number}"
            bridge.ip("link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", str(space.pid))
            bridge.ip("link", "set", port, "master", BRIDGE, "up")

    def _start_switch(self, pids: Sequence[int]) -> None:
        command = [sys.executable, "-m", "zbmd.tools.lab.hosts.switch", "--seed", str(self._seed)]
        switch = subprocess.Popen([*command, *map(str, pids)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._switch = switch
        self._stack.callback(self._stop_switch)
        assert switch.stdout is not None
        if switch.stdout.readline() != b"ready\n":
            raise LabError("the switch did not start: its error is above")

    def _stop_switch(self) -> None:
        assert self._switch is not None and self._switch.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._switch.stdin.close()
        assert self._switch.stdout is not None
        self._switch.stdout.close()
        self._switch.wait()
        self._switch = None

    def _order(self, command: Command) -> None:
        assert self._switch is not None
        assert self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(msgspec.json.encode(command) + b"\n")
        self._switch.stdin.flush()
        if self._switch.stdout.readline() != b"done\n":
            raise LabError("the switch has ended: its error is above")


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = script_parser("lab.hosts.netns", __doc__)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--delay", metavar="TIME", help="of what each host sends")
    parser.add_argument("--loss", type=float, default=0.0, metavar="FRACTION")
    parser.add_argument("--rate", type=float, default=0.0, metavar="MBPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    arguments = parser.parse_args(argv)
    if not arguments.command:
        raise UserError("there is no command to run on the hosts.")
    delay_ms = 0.0 if arguments.delay is None else parse_duration(arguments.delay) * 1e3
    shaped = bool(delay_ms or arguments.loss or arguments.rate)
    with Lab(arguments.hosts, shaped=shaped, seed=arguments.seed) as lab:
        if shaped:
            for host in lab.hosts:
                host.shape(delay_ms=delay_ms, loss=arguments.loss, rate_mbps=arguments.rate)
        running = [host.popen(arguments.command) for host in lab.hosts]
        return max(process.wait() for process in running)


if __name__ == "__main__":
    sys.exit(main())
