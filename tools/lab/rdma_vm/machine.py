"""Boots the machine, runs one command in it, and passes on what it prints and how it ends.

The host's file system is the machine's, read-only. There is no folder for a run: the command is in the
machine's memory from the start, and its output and exit code come by serial ports. QEMU ends with us, however
we end.
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import zbmd
from zbmd.tools.lab.rdma_vm import guest
from zbmd.tools.lab.rdma_vm.image import Archive, Image
from zbmd.transport.errors import ZbmdError
from zbmd.transport.host.process import end_with_parent

# Bytecode of zbmd and its tests is compiled on the host: the machine would take ten times as long, and
# without it (a fresh checkout, `PYTHONDONTWRITEBYTECODE`) each of its processes would compile hundreds of
# modules.

_BY_TIME: Final = py_compile.PycInvalidationMode.TIMESTAMP


def made(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Of zbmd and of the tests in `folder`, each with the file that it belongs in, which the host may lack.

    None if `PYTHONPYCACHEPREFIX` is set: who sets it has it there. What does not compile is left out.
    """
    if sys.pycache_prefix is not None:
        return
    package = Path(zbmd.__file__).parent
    roots = {each.resolve() for each in (package, *package.iterdir(), folder / "tests")}
    with tempfile.TemporaryDirectory(prefix="rdma-vm-") as scratch:
        new = os.path.join(scratch, "new")
        for source in sorted({source for root in roots for source in root.rglob("*.py")}):
            belongs = Path(importlib.util.cache_from_source(source))
            if _is_current(belongs, source):
                yield belongs, belongs.read_bytes()
                continue
            with suppress(py_compile.PyCompileError):
                py_compile.compile(str(source), new, doraise=True, invalidation_mode=_BY_TIME)
                yield belongs, Path(new).read_bytes()


def _is_current(bytecode: Path, source: Path) -> bool:
    """Whether Python would take it: by what is ahead of the code (PEP 552)."""
    found = source.stat()
    head = importlib.util.MAGIC_NUMBER + b"".join(
        (number & 0xFFFFFFFF).to_bytes(4, "little") for number in (0, int(found.st_mtime), found.st_size)
    )
    try:
        with bytecode.open("rb") as file:
            return file.read(len(head)) == head
    except OSError:
        return False


# Files that most commands import are preloaded into the memory of the machine: over 9p each costs several
# round trips to the host, which took 22 of the 30 s of the first import of pytest and numpy.

MODULES: Final = (
    "hypothesis",
    "pytest",
    "pytest_asyncio.plugin",
    "uvloop",
    "numpy.random",
    "zbmd.actors.cluster.node.node",
    "zbmd.actors.cluster.jobs.host",
    "zbmd.actors.process.template",
    "zbmd.collectives.group.group",
    "zbmd.tools.chaos.small_job",
    "zbmd.training.sharded.run",
    "zbmd.transport.rdma.plane",
)
"""Candidates that are not installed are left out."""
BYTES_MAX: Final = 512 << 20
"""Of the machine's memory; what comes behind it stays on the host."""
IMPORT_S_MAX: Final = 120.0
_ELSEWHERE: Final = ("/dev/", "/proc/", "/sys/")
_FIND: Final = """
import importlib, importlib.metadata, os, sys

found = set()

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        found.add(arguments[0])

sys.addaudithook(hook)
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for distribution in importlib.metadata.distributions():
    distribution.entry_points  # which pytest reads, all of them
with open("/proc/self/maps") as maps:
    found.update(line.split(maxsplit=5)[5].rstrip() for line in maps if "/" in line)
print(*map(os.path.realpath, found), sep="\\n")
"""


def files(folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[Path, bytes]]:
    """Each with what is in it, as a Python of this kind finds them in `folder`.

    Sources are not among them: bytecode names the time of its source, which a file made at boot has not.
    """
    listed = subprocess.run(
        [sys.executable, "-c", _FIND, *MODULES],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=IMPORT_S_MAX,
    )
    left = BYTES_MAX
    for path in sorted(map(Path, listed.stdout.splitlines())):
        if path.suffix == ".py" or str(path).startswith(_ELSEWHERE) or not path.is_file():
            continue
        left -= path.stat().st_size
        if left < 0:
            return
        yield path, path.read_bytes()


MEMORY_MIB: Final = 1792
CPUS: Final = 2
PROCESSORS: Final = {"tcg": "max,-erms,-fsrm,la57=off", "kvm": "host,-arch-capabilities"}
"""By accelerator. The kernel copies and clears by single bytes where those are said to be fast, and an
emulated processor goes through them one by one. Five levels of tables are one more to look into than four."""
CONSOLE_BYTES_MAX: Final = 1 << 14
"""Of the machine's console, the end, which is shown when the machine has failed."""
END_S: Final = 10.0
"""From the command's end to the machine's."""
READ_BYTES: Final = 1 << 16
_PASSED: Final = (
    *("PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "CI", "NO_COLOR", "PYTEST_ADDOPTS"),
    "PYTHONPYCACHEPREFIX",  # bytecode that the host has made; the machine takes ten times as long
)
_PASSED_PREFIX: Final = "ZBMD_"
_KERNEL_WORDS: Final = (
    "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr random.trust_cpu=on tsc=reliable "
    "no_timer_check rcupdate.rcu_expedited=1"
)


class MachineFailed(ZbmdError):
    """The machine did not boot, did not end in time, or ended without saying how its command did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A command of the machine, run in `folder`. accelerator: `kvm` or `tcg`."""

    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    timeout_s: float
    accelerator: str
    console: IO[bytes] | None = None
    """File that receives a copy of the machine's console."""

    def script(self) -> bytes:
        """Command that the machine's shell runs."""
        passed = {
            name: value
            for name, value in sorted(self.environment.items())
            if name in _PASSED or name.startswith(_PASSED_PREFIX)
        }
        lines = [f"export {name}={shlex.quote(value)}" for name, value in passed.items()]
        lines += [guest.network(), f"cd {shlex.quote(str(self.folder))} || exit 1", shlex.join(self.command)]
        return "\n".join(lines).encode() + b"\n"


def run(image: Image, what: Run, output: IO[bytes]) -> int:
    """Run it; the command's exit code. Raises `MachineFailed`, with the end of the machine's console."""
    initrd = _initrd(image, what)
    ports = {name: os.pipe() for name in ("console", guest.OUTPUT_PORT, guest.RESULT_PORT)}
    try:
        passed = (initrd, *(write for _, write in ports.values()))
        parent = os.getpid()
        process = subprocess.Popen(
            _qemu(image, what, initrd, {name: write for name, (_, write) in ports.items()}),
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            preexec_fn=lambda: end_with_parent(parent),  # noqa: PLW1509 - we have one thread
        )
        for fd in passed:
            os.close(fd)
        try:
            return _follow(process, {name: read for name, (read, _) in ports.items()}, what, output)
        finally:
            process.kill()
            process.wait()
    finally:
        for read, _ in ports.values():
            os.close(read)


def _initrd(image: Image, what: Run) -> int:
    """The image's, and behind it the command and files at hand: the kernel unpacks both. It has no name."""
    archive = Archive()
    archive.file(guest.COMMAND_FILE, what.script())
    at_once = dict(files(what.folder, what.environment))
    at_once.update(made(what.folder))
    for path, data in at_once.items():
        archive.file(f"{guest.PACKAGES_FOLDER}{path}", data, executable=os.access(path, os.X_OK))
    initrd = os.memfd_create("initrd")
    with os.fdopen(os.dup(initrd), "wb") as file:
        file.write(image.initrd.read_bytes())
        file.write(archive.whole())
    return initrd


def _qemu(image: Image, what: Run, initrd: int, ports: Mapping[str, int]) -> list[str]:
    words = ["qemu-system-x86_64", "-M", "q35", "-smp", str(CPUS), "-m", str(MEMORY_MIB)]
    words += ["-accel", "tcg,thread=multi" if what.accelerator == "tcg" else what.accelerator]
    words += ["-cpu", PROCESSORS[what.accelerator]]
    words += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-net", "none"]
    words += ["-kernel", str(image.kernel), "-initrd", f"/dev/fd/{initrd}", "-append", _KERNEL_WORDS]
    words += ["-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"]
    words += ["-device", "virtio-9p-pci,fsdev=host,mount_tag=host", "-device", "virtio-serial-pci"]
    for name, fd in ports.items():
        words += ["-chardev", f"file,id={name},path=/dev/fd/{fd}"]
        words += (
            ["-serial", f"chardev:{name}"]
            if name == "console"
            else ["-device", f"virtserialport,chardev={name},name={name}"]
        )
    return words


def _follow(process: subprocess.Popen[bytes], ports: Mapping[str, int], what: Run, output: IO[bytes]) -> int:
    console: deque[bytes] = deque()
    console_bytes = 0
    result = b""
    deadline_s = time.monotonic() + what.timeout_s
    with selectors.DefaultSelector() as selector:
        for name, fd in ports.items():
            selector.register(fd, selectors.EVENT_READ, name)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                late = "its command has ended, but the machine has not" if result else "it is ended now"
                return _code(result, console, f"the machine has had its {what.timeout_s:g} s: {late}")
            for key, _ in ready:
                data = os.read(key.fd, READ_BYTES)
                if not data:
                    selector.unregister(key.fd)
                elif key.data == guest.OUTPUT_PORT:
                    output.write(data)
                    output.flush()
                elif key.data == guest.RESULT_PORT:
                    result += data[:READ_BYTES]
                    deadline_s = min(deadline_s, time.monotonic() + END_S)
                else:
                    if what.console is not None:
                        what.console.write(data)
                        what.console.flush()
                    console.append(data)
                    console_bytes += len(data)
                    while console_bytes > CONSOLE_BYTES_MAX and len(console) > 1:
                        console_bytes -= len(console.popleft())
    return _code(result, console, f"the machine ended by itself, QEMU with {process.wait()}")


def _code(result: bytes, console: deque[bytes], otherwise: str) -> int:
    words = result.decode(errors="replace").split()
    if len(words) == 2 and words[0] == "exit" and words[1].isdecimal():
        return int(words[1])
    raise MachineFailed(f"{otherwise}. The end of its console:\n{b''.join(console).decode(errors='replace')}")
