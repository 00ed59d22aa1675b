"""The flight recorders of a process, written down: on an error, on SIGUSR2, when `zbmd-node dump` asks.

A dump is one JSON file a process, in `flight_directory`, written whole or not at all. A thread of its own
makes it when a native handler wakes it: neither a blocked loop nor native code in the main thread delays it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog

from zbmd.actors.rank.environment import FLIGHTS_DIRECTORY, FLIGHTS_VARIABLE
from zbmd.actors.view import RANKS_MAX
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.flight._flight import leave, listen, wait, wake
from zbmd.collectives.flight.recorder import FLIGHT_RECORDS_MAX, FlightLog
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import UserFiles, need_directory, replace_file

log: Final = structlog.stdlib.get_logger("zbmd.collectives.flight")

SIGNAL: Final = signal.SIGUSR2
DIRECTORY_VARIABLE: Final = FLIGHTS_VARIABLE
GROUPS_KEPT_MAX: Final = 8
"""Closed groups whose operations a process still remembers."""
FILES_MAX: Final = 64
"""Dumps kept in the directory; the oldest go."""
FILE_BYTES_MAX: Final = 256 << 20
GROUPS_MAX: Final = 64
TEXT_CHARS_MAX: Final = 4096
VERSION: Final = 1

Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """A `FlightRecord`. Times: CLOCK_MONOTONIC, ns."""

    operation: Text
    algorithm: Text
    sequence: Count
    nbytes: Count
    start_ns: Count
    met_ns: Count
    end_ns: Count
    state: Text
    error: Text


class GroupFlights(msgspec.Struct, frozen=True, kw_only=True):
    """The latest operations of one group. `rank`: of this process; `begun`: the number of all it has run."""

    channel: Count
    epoch: Count
    rank: Count
    members: Annotated[tuple[Count, ...], msgspec.Meta(max_length=RANKS_MAX)]
    begun: Count
    closed: bool
    operations: Annotated[tuple[Operation, ...], msgspec.Meta(max_length=FLIGHT_RECORDS_MAX)]


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """The file. `taken_ns`: CLOCK_MONOTONIC, `taken_unix_ns`: CLOCK_REALTIME, both as it was made."""

    version: Count
    name: Text
    pid: Count
    reason: Text
    taken_ns: Count
    taken_unix_ns: Count
    groups: Annotated[tuple[GroupFlights, ...], msgspec.Meta(max_length=GROUPS_MAX)]


_decoder: msgspec.json.Decoder[Dump] = msgspec.json.Decoder(Dump)


def read_dump(data: bytes, name: str) -> Dump:
    """A dump's content; `name` is for the error. Raises `UserError`."""
    try:
        dump = _decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is no dump of a flight recorder: {error}") from None
    if dump.version != VERSION:
        raise UserError(f"{name} has the format {dump.version}; this version reads {VERSION}")
    return dump


def flight_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Return `$ZBMD_FLIGHT_DIR`, else `zbmd/flights` in `$XDG_STATE_HOME` or `~/.local/state`.

    Raises `UserError` if there is no home directory to put it in.
    """
    environment = os.environ if environment is None else environment
    if given := environment.get(DIRECTORY_VARIABLE):
        return Path(given).absolute()
    what, variable = "flight records", DIRECTORY_VARIABLE
    return need_directory(UserFiles.STATE, environment, what=what, variable=variable) / FLIGHTS_DIRECTORY


def dump_path(directory: Path, pid: int) -> Path:
    """Return the path of a process's dump."""
    return directory / f"flight-{pid}.json"


class _Kept:
    """The part of a communicator that is kept after its end."""

    def __init__(self, communicator: Communicator) -> None:
        self.channel, self.epoch = communicator.channel, communicator.epoch
        self.rank, self.members = communicator.rank, communicator.members
        self.log: FlightLog = communicator.flight
        self.closed = False

    def flights(self) -> GroupFlights:
        return GroupFlights(
            channel=self.channel,
            epoch=self.epoch,
            rank=self.rank,
            members=self.members,
            begun=self.log.ring.begun,
            closed=self.closed,
            operations=tuple(
                Operation(
                    r.operation,
                    r.algorithm,
                    r.sequence,
                    r.nbytes,
                    r.start_ns,
                    r.met_ns,
                    r.end_ns,
                    r.state.value,
                    r.error[:TEXT_CHARS_MAX],
                )
                for r in self.log
            ),
        )


class FlightRecorder:
    """The flight recorders of all groups of a process."""

    def __init__(self, directory: Callable[[], Path] = flight_directory) -> None:
        self._directory = directory
        self._starting = threading.Lock()  # held while the thread starts or ends
        self._guard = threading.Lock()
        self._open: list[_Kept] = []
        self._lasting = 0
        """Contexts of `lasting` that are open."""
        self._closed: deque[_Kept] = deque(maxlen=GROUPS_KEPT_MAX)
        self._name = ""
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def add(self, name: str, communicator: Communicator) -> Callable[[], None]:
        """Keep the flights of a group of process `name`; returns what is to be called when it is closed."""
        kept = _Kept(communicator)
        communicator.on_fault = self.dump
        with self._starting:
            with self._guard:
                self._name = name
                self._open.append(kept)
            if self._thread is None:
                self._start()

        def closed() -> None:
            with self._starting:
                with self._guard:
                    if kept in self._open:
                        kept.closed = True
                        self._open.remove(kept)
                        self._closed.append(kept)
                self._stop_if_unused()

        return closed

    @contextlib.contextmanager
    def lasting(self) -> Generator[None]:
        """In this context the thread outlives the last group: another comes, and nobody waits for either."""
        with self._starting:
            self._lasting += 1
        try:
            yield
        finally:
            with self._starting:
                self._lasting -= 1
                self._stop_if_unused()

    def taken(self, reason: str) -> Dump:
        """All of it as it is now."""
        with self._guard:
            groups = [*self._closed, *self._open][-GROUPS_MAX:]
        return Dump(
            version=VERSION,
            name=self._name,
            pid=os.getpid(),
            reason=reason[:TEXT_CHARS_MAX],
            taken_ns=time.monotonic_ns(),
            taken_unix_ns=time.time_ns(),
            groups=tuple(kept.flights() for kept in groups),
        )

    def dump(self, reason: str) -> Path | None:
        """Write all of it down. A failure to write is logged, and returns None."""
        try:
            directory = self._directory()
        except UserError as error:
            log.warning("the flight recorder is not written", reason=str(error))
            return None
        try:
            path = dump_path(directory, os.getpid())
            taken = msgspec.json.encode(self.taken(reason))
            replace_file(path, lambda file: file.write(taken))
            _forget_oldest(directory)
        except OSError as error:
            log.error("the flight recorder cannot be written", directory=str(directory), error=str(error))
            return None
        log.info("the flight recorder is written", path=str(path), reason=reason)
        return path

    def _start(self) -> None:
        self._ended.clear()
        if not listen(SIGNAL):
            log.info("a handler for the flight recorder's signal is there already", signal=SIGNAL.name)
        self._thread = threading.Thread(target=self._run, name="zbmd-flight", daemon=True)
        self._thread.start()

    def _stop_if_unused(self) -> None:
        if self._thread is not None and not self._open and not self._lasting:
            leave(SIGNAL)
            self._ended.set()
            wake()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            wait()
            if self._ended.is_set():
                return
            self.dump(SIGNAL.name)


def _forget_oldest(directory: Path) -> None:
    """Keep `FILES_MAX`; another process may do the same now."""
    ages: list[tuple[float, Path]] = []
    for path in directory.glob("flight-*.json"):
        with contextlib.suppress(OSError):
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages)[:-FILES_MAX]:
        path.unlink(missing_ok=True)


FLIGHTS: Final = FlightRecorder()
"""This process's."""
