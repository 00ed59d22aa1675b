"""Fuzz targets, and the check of one input against a target."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import tracemalloc
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

# Scripts: any bytes are a sequence of small instructions of an attacker, and so is any mutation.


class Script:
    """Reads numbers and blocks; at the end there is nothing but zeros and empty blocks."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def ended(self) -> bool:
        """Whether all has been read."""
        return self._at >= len(self._data)

    def take(self, nbytes: int) -> bytes:
        """The next bytes, fewer at the end."""
        part = self._data[self._at : self._at + nbytes]
        self._at += nbytes
        return part

    def number(self, width: int) -> int:
        """The next unsigned number of `width` bytes."""
        return int.from_bytes(self.take(width), "little")

    def block(self) -> bytes:
        """The next bytes that say their own length."""
        return self.take(self.number(2))

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))


def block(data: bytes) -> bytes:
    """What `Script.block` reads."""
    return len(data).to_bytes(2, "little") + data


def blocks(parts: Iterable[bytes]) -> bytes:
    """Several, one behind the other."""
    return b"".join(map(block, parts))


def read_blocks(data: bytes, count_max: int) -> Iterator[bytes]:
    """The blocks of a script, at most so many."""
    script = Script(data)
    for _ in range(count_max):
        if script.ended:
            return
        yield script.block()


INPUT_BYTES_MAX = 64 << 10
"""Most bytes of a generated input."""
INPUT_S_MAX = 10.0
"""An input that takes longer is a finding: decoders are linear, and their inputs bounded."""
FIXED_BYTES_MAX = 32 << 20
"""Memory of an input beside `Target.bytes_per_byte`: systems, rings, decoders made for the first time."""


class Hang(BaseException):
    """An input took longer than `INPUT_S_MAX`. No `Exception`: nothing that is fuzzed may catch it."""


class Broken(AssertionError):
    """A target's own check failed: the decoder raised nothing, but left something that must not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One way in for bytes from outside.

    name: as on the command line; what: in a few words; allowed: the errors that its documentation names, all
    else is a finding; seeds: makes valid inputs, by the encoders that production uses; run: takes any bytes,
    and raises one of `allowed`, or nothing, and `Broken` if what came of it breaks a bound or a promise.
    bytes_per_byte: how much memory a byte of input may take on the way.
    """

    name: str
    what: str
    allowed: tuple[type[Exception], ...]
    seeds: Callable[[], tuple[bytes, ...]]
    run: Callable[[bytes], object]
    bytes_per_byte: int = 256


registered: Final[dict[str, Target]] = {}
"""By name, in the order of registration; the modules of `targets/` register theirs when they are imported."""

Seeds = tuple[bytes, ...] | Callable[[], tuple[bytes, ...]]
"""Valid inputs, or what makes them at their first use."""
ReadT = TypeVar("ReadT", bound=Callable[[Any], object])


def target(
    name: str, what: str, seeds: Seeds, *allowed: type[Exception], bytes_per_byte: int = 256
) -> Callable[[ReadT], ReadT]:
    """Register a function of `bytes` as a target; the arguments are those of `Target`."""
    return _registering(lambda read: read, name, what, seeds, allowed, bytes_per_byte)


def text_target(
    name: str, what: str, seeds: Seeds, *allowed: type[Exception], bytes_per_byte: int = 256
) -> Callable[[ReadT], ReadT]:
    """Register a function of a `str`: the input, decoded as UTF-8."""

    def on_text(read: Callable[[str], object]) -> Callable[[bytes], object]:
        return lambda data: read(data.decode(errors="replace"))

    return _registering(on_text, name, what, seeds, allowed, bytes_per_byte)


def file_target(
    name: str, what: str, seeds: Seeds, *allowed: type[Exception], file: str = "file"
) -> Callable[[ReadT], ReadT]:
    """Register a function of a `Path`: a file named `file` that holds the input, alone in its directory."""

    def on_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def run(data: bytes) -> None:
            with as_file(data, file) as path:
                read(path)

        return run

    return _registering(on_file, name, what, seeds, allowed)


def _registering(
    adapt: Callable[[Any], Callable[[bytes], object]],
    name: str,
    what: str,
    seeds: Seeds,
    allowed: tuple[type[Exception], ...],
    bytes_per_byte: int = 256,
) -> Callable[[ReadT], ReadT]:
    def make() -> tuple[bytes, ...]:
        return seeds() if callable(seeds) else seeds

    def register(read: ReadT) -> ReadT:
        assert name not in registered, f"two fuzz targets are named {name!r}"
        registered[name] = Target(
            name=name,
            what=what,
            allowed=allowed,
            seeds=make,
            run=adapt(read),
            bytes_per_byte=bytes_per_byte,
        )
        return read

    return register


@contextlib.contextmanager
def folder() -> Generator[Path]:
    """A directory for the body."""
    with tempfile.TemporaryDirectory(prefix="zbmd-fuzz-") as made:
        yield Path(made)


@contextlib.contextmanager
def as_file(data: bytes, name: str = "file") -> Generator[Path]:
    """A file that holds `data` and that only its owner can read, alone in a directory."""
    with folder() as made:
        path = made / name
        path.write_bytes(data)
        path.chmod(0o600)
        yield path


def refuses(target: Target, data: bytes) -> Exception | None:
    """Run one input: the allowed error that it was refused with, or None if it was taken.

    Anything else that the target raises is raised from here: it is a finding.
    """
    try:
        target.run(data)
    except target.allowed as error:
        str(error)  # its text must be printable
        return error
    return None


@contextlib.contextmanager
def bounded_in_memory(target: Target, input_bytes: int) -> Generator[None]:
    """Raise `Broken` if the body takes more of Python's memory than an input of that size may."""
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    bound_bytes = FIXED_BYTES_MAX + target.bytes_per_byte * input_bytes
    if peak_bytes > bound_bytes:
        raise Broken(f"{input_bytes} bytes of input took {peak_bytes} of memory; {bound_bytes} are the bound")


@contextlib.contextmanager
def bounded_in_time(seconds: float = INPUT_S_MAX) -> Generator[None]:
    """Raise `Hang` in the main thread if the body takes longer. It can end no loop inside of C."""

    def expired(_: int, frame: FrameType | None) -> None:
        where = "" if frame is None else f" in {frame.f_code.co_filename}:{frame.f_lineno}"
        raise Hang(f"no end within {seconds:g} s{where}")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def open_descriptors() -> int:
    """Return the descriptors that this process has: no input may leave one behind."""
    return len(os.listdir("/proc/self/fd"))
