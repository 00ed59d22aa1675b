"""Records what becomes of a launcher's ranks, for `zbmd diagnose`: events of the run to `launches` files."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from zbmd.actors.cluster.jobs.reports import (
    HostEvent,
    RankDown,
    RankReport,
    RankStarted,
    RunResult,
    ViewChanged,
)
from zbmd.actors.cluster.local_deaths import boot_id, started
from zbmd.actors.hangs.verdict import HangNotice
from zbmd.actors.process.exit import CAUSE_MARK, EXIT_FAILED, USAGE_EXIT_CODE
from zbmd.actors.view import Outcome
from zbmd.tools.cli.launch_settings import Settings
from zbmd.tools.runs.launches import (
    VERSION,
    HangFound,
    LaunchBegan,
    LaunchEnded,
    LaunchWriter,
    Noted,
    RankBegan,
    RankEnded,
    RanksMet,
    RunFound,
    cut_lines,
    cut_text,
    launches_of_user,
)
from zbmd.training.profiler.announcements import (
    FILE_BYTES_MAX,
    VARIABLE,
    RunBegun,
    announce,
    read_announcements,
)
from zbmd.transport.errors import UserError

REFUSED = "refused"
"""Outcome of a launch that began nothing."""


class AnnouncedRuns:
    """The directories of runs that ranks of this process announce. A fork of it has none.

    Make it before anything else sets the variable of the file.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._outer = os.environ.get(VARIABLE)
        self._file = -1
        self._is_ours = False
        self._read_bytes = 0
        os.register_at_fork(after_in_child=self.close)

    def listen(self) -> None:
        """Have ranks announce the directories of their runs, before they are forked.

        A dashboard of this launcher has the file already; what is announced goes on to the launcher that this
        one was started by.
        """
        path = os.environ.get(VARIABLE)
        with contextlib.suppress(OSError):
            if path is not None and path != self._outer:
                self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                return
            self._file = os.memfd_create("zbmd-launch", os.MFD_CLOEXEC)
            os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{self._file}"
            self._is_ours = True

    def look(self) -> list[RunBegun]:
        """Return what ranks have announced since the last look."""
        if self._file < 0:
            return []
        try:
            data = os.pread(self._file, FILE_BYTES_MAX, self._read_bytes)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        lines = read_announcements(whole)
        if self._is_ours and self._outer is not None:
            for line in lines:
                announce(line, {VARIABLE: self._outer})
        return [line for line in lines if isinstance(line, RunBegun)]

    def close(self) -> None:
        """Close the file; in a fork of this process, the fork's. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._is_ours and os.getpid() == self._pid:
            self._is_ours = False
            if self._outer is None:
                os.environ.pop(VARIABLE, None)
            else:
                os.environ[VARIABLE] = self._outer


class LaunchRecorder:
    """The record of this launch. Not for two threads; close it in a fork of this process.

    began: its first line; directory: where it goes at once; None if there is no place; runs: what its ranks
    announce, which it owns.
    """

    def __init__(self, began: LaunchBegan, directory: Path | None, runs: AnnouncedRuns | None = None) -> None:
        self._writer = LaunchWriter(began)
        self._step: int | None = None
        self._is_over = False
        self._runs = runs
        if directory is not None:
            self._writer.add(directory)

    def listen(self) -> None:
        """See `AnnouncedRuns.listen`."""
        if self._runs is not None:
            self._runs.listen()

    def take(self, event: HostEvent, words: Sequence[str] = ()) -> None:
        """Record an event of the host. words: the exit reason of a rank that ended."""
        self._look()
        match event:
            case RankStarted():
                self._writer.put(
                    RankBegan(
                        at_ns=event.at_ns, rank=event.rank, incarnation=event.incarnation, pid=event.pid
                    )
                )
            case RankDown():
                self._writer.put(self._ended(event, words))
            case ViewChanged():
                ranks = tuple(sorted(member.rank for member in event.view.members))
                self._writer.put(RanksMet(at_ns=event.at_ns, epoch=event.view.epoch, ranks=ranks))
            case HangNotice():
                self._writer.put(
                    HangFound(
                        at_ns=time.monotonic_ns(),
                        text=cut_text(event.text),
                        ranks=tuple(rank for rank, _ in event.culprits),
                        stack=cut_lines(event.stack),
                        next_step=cut_text(event.next_step),
                        over=event.over,
                        process=cut_text(event.doing),
                        step=self._step,
                    )
                )
            case RankReport():
                self._reported(event.rank, event.payload)

    def note(self, text: str) -> None:
        """Record what the launcher itself says of the run."""
        self._writer.put(Noted(at_ns=time.monotonic_ns(), text=cut_text(text)))

    def over(self, result: RunResult) -> None:
        """Record the result of the run."""
        outcome = outcome_word(result.outcome)
        records = "" if result.last_records is None else str(result.last_records)
        self.end(
            outcome, result.reason, exit_code=result.exit_code, restarts=result.restarts, records=records
        )

    def end(
        self,
        outcome: str,
        reason: str,
        *,
        exit_code: int,
        restarts: int = 0,
        records: str = "",
        cause: str = "",
    ) -> None:
        """Record the end of the launch; the last record. Later calls do nothing."""
        if self._is_over:
            return
        self._look()
        self._is_over = True
        self._writer.put(
            LaunchEnded(
                at_ns=time.monotonic_ns(),
                outcome=outcome,
                reason=cut_text(reason),
                exit_code=exit_code,
                restarts=restarts,
                step=self._step,
                records=cut_text(records),
                cause=cause,
            )
        )
        self.close()

    def close(self) -> None:
        """Close its files; in a fork of this process, the fork's. Idempotent."""
        self._writer.close()
        if self._runs is not None:
            self._runs.close()

    def _ended(self, down: RankDown, words: Sequence[str]) -> RankEnded:
        return RankEnded(
            at_ns=down.confirmed_ns,
            rank=down.rank,
            incarnation=down.incarnation,
            pid=down.pid,
            code=down.code,
            reason=cut_text(down.reason),
            cause=cut_text(down.cause.partition(CAUSE_MARK)[0]),
            normal=down.normal,
            expected=down.expected,
            no_memory=down.no_memory,
            words=cut_lines(words or (() if down.normal else down.tail)),
            next_step=cut_text(down.next_step),
            step=self._step,
        )

    def _reported(self, rank: int, payload: dict[str, Any]) -> None:
        kind, version, text = payload.get("kind"), payload.get("version"), payload.get("text")
        if kind == "step" and isinstance(version, int) and version >= 0:
            self._step = version
        elif kind == "missing" and isinstance(text, str):
            self._writer.put(Noted(at_ns=time.monotonic_ns(), text=cut_text(text), rank=rank))

    def found(self, directory: str) -> None:
        """Record that a rank takes part in the run of a directory, which then has the record too."""
        self._writer.put(RunFound(at_ns=time.monotonic_ns(), directory=cut_text(directory)))
        self._writer.add(Path(directory))

    def _look(self) -> None:
        """Take what ranks have announced since the last look."""
        for run in () if self._runs is None else self._runs.look():
            self.found(run.directory)


def outcome_word(outcome: Outcome | None) -> str:
    """Return the outcome as a record has it."""
    return {Outcome.FAILED: "failed", Outcome.STOPPED: "stopped"}.get(outcome or Outcome.SUCCEEDED, "done")


@contextlib.contextmanager
def recording(command: Sequence[str], settings: Settings, nodes: int) -> Generator[LaunchRecorder]:
    """Record a launch of `command` within the context; its end too, if an error is its end."""
    record = _recorder_of(command, settings, nodes)
    try:
        yield record
    except UserError as error:
        record.end(REFUSED, str(error), exit_code=USAGE_EXIT_CODE, cause=type(error).__name__)
        raise
    except BaseException as error:
        record.end("failed", str(error), exit_code=EXIT_FAILED, cause=type(error).__name__)
        raise
    finally:
        record.end("stopped", "the launcher has ended", exit_code=0)  # if nothing else was its end


def _recorder_of(command: Sequence[str], settings: Settings, nodes: int) -> LaunchRecorder:
    log_dir, capture = settings["log_dir"], settings["capture"]
    began = begins_now(
        command,
        ranks=settings["nproc_per_node"],
        nodes=nodes,
        on_loss=settings["on_loss"].value,
        capture=None if capture is None else Path(capture),
    )
    directory = launches_of_user() if log_dir is None else Path(log_dir).absolute()
    record = LaunchRecorder(began, directory, AnnouncedRuns())
    os.register_at_fork(after_in_child=record.close)
    return record


def begins_now(
    command: Sequence[str],
    *,
    ranks: int,
    nodes: int,
    on_loss: str,
    capture: Path | None,
    job: str = "",
    node: str = "",
) -> LaunchBegan:
    """Return the first line of a record that this process begins now."""
    return LaunchBegan(
        version=VERSION,
        host=cut_text(socket.gethostname()),
        boot_id=boot_id(),
        pid=os.getpid(),
        process_ticks=started(os.getpid()),
        monotonic_ns=time.monotonic_ns(),
        unix_ns=time.time_ns(),
        command=cut_lines(command),
        folder=cut_text(os.getcwd()),
        ranks=ranks,
        nodes=nodes,
        on_loss=on_loss,
        capture="" if capture is None else str(capture.absolute()),
        job=job,
        node=node,
    )
