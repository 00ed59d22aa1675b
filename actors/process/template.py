"""The template: one process that has imported everything and started nothing, and forks rank processes.

It has one thread, no event loop and no open link, so forking it is safe and takes milliseconds; the child
starts its own. It talks to its host over one sequenced-packet socket: typed requests in, replies out,
descriptors beside them (SCM_RIGHTS). It ends when the host closes that socket; it dies with its parent, the
reaper (PR_SET_PDEATHSIG), and its children die with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import msgspec

from zbmd.actors.process import debugger, spare
from zbmd.actors.process.exit import (
    USAGE_EXIT_CODE,
    CausePage,
    cause_of,
    needs_no_traceback,
    script_begins,
    script_ended,
    write_exit_reason,
)
from zbmd.actors.process.forks import JOINED_VARIABLE, children_end_here
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.view import RANKS_MAX
from zbmd.transport.errors import RemoteProtocolError, ZbmdError
from zbmd.transport.host.process import end_with_parent, set_process_name
from zbmd.transport.host.threads import apply_threads
from zbmd.transport.memory.kept import KEPT_FDS_VARIABLE
from zbmd.transport.memory.memory_kills import offer_memory

REQUEST_BYTES_MAX = 128 * 1024  # one packet; argv and the environment's changes must fit
FDS_PER_REQUEST_MIN = 2
FDS_PER_REQUEST_MAX = 5
CHILDREN_MAX = 2 * RANKS_MAX  # live children: a host's ranks, and some that are still dying
REASON_CHARACTERS_MAX = 500


class ForkRequest(msgspec.Struct, frozen=True, array_like=True, tag="fork"):
    """Fork one process. Two descriptors come with the request, for standard output and error; optionally a
    third, for standard input, and `keeps` more: the memory that outlives the process, and the pidfd of the
    process that may still write to it.

    job, rank and incarnation name the process in replies. waits: it is a spare; the last descriptor is its
    end of the socket on which it waits for a rank, see `zbmd.actors.process.spare`.
    """

    rank: int
    incarnation: int
    target: str
    is_module: bool
    arguments: tuple[str, ...]
    environment: dict[str, str]
    job: int = 0
    keeps: int = 0
    waits: bool = False


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """All modules are imported. `threads`: of the template; more than one makes forks unsafe."""

    pid: int
    threads: int


class Forked(msgspec.Struct, frozen=True, array_like=True, tag="forked"):
    """The child exists. The reply carries its pidfd."""

    rank: int
    incarnation: int
    pid: int
    job: int = 0


class ForkFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The fork failed."""

    rank: int
    incarnation: int
    reason: str
    job: int = 0


class ForkExited(msgspec.Struct, frozen=True, array_like=True, tag="exited"):
    """Reaped. `code`: its exit code, or minus the signal that ended it. cause: see `cause_of`."""

    rank: int
    incarnation: int
    pid: int
    code: int
    job: int = 0
    cause: str = ""


Reply = Ready | Forked | ForkFailed | ForkExited

_request_decoder = msgspec.msgpack.Decoder(ForkRequest)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.Encoder().encode


def decode_request(packet: bytes) -> ForkRequest:
    """Decode the host's request. Raises `RemoteProtocolError`."""
    try:
        return _request_decoder.decode(packet)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"the host sent the template an invalid request: {error}") from error


def decode_reply(packet: bytes) -> Reply:
    """Decode the template's reply. Raises `RemoteProtocolError`, as an imported module may write there."""
    try:
        return _reply_decoder.decode(packet)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"the template sent its host an invalid reply: {error}") from error


@dataclass(frozen=True, slots=True)
class _Child:
    job: int
    rank: int
    incarnation: int
    pid: int
    cause: CausePage


class Template:
    """The template's loop: one request or one child's end at a time."""

    def __init__(self, host: socket.socket) -> None:
        self._host = host
        self._pid = os.getpid()
        self._poll = select.poll()
        self._poll.register(host, select.POLLIN)
        self._children: dict[int, _Child] = {}  # by pidfd
        self.cause: CausePage | None = None
        """In a child, where it leaves the cause of its failure."""
        self.spare_fd: int | None = None
        """In a spare, where it waits for a rank."""

    def serve(self) -> ForkRequest | None:
        """Serve requests until the host closes (returns None); in a child, return the request to run."""
        self._reply(Ready(pid=self._pid, threads=len(os.listdir("/proc/self/task"))))
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._host.fileno():
                    self._reap(fd)
                    continue
                try:
                    packet, fds, _, _ = socket.recv_fds(
                        self._host, REQUEST_BYTES_MAX, FDS_PER_REQUEST_MAX, socket.MSG_CMSG_CLOEXEC
                    )
                except ConnectionResetError:
                    return None  # it closed without having read all replies
                if not packet:
                    return None
                request = self._fork(packet, fds)
                if request is not None:
                    return request

    def _fork(self, packet: bytes, fds: list[int]) -> ForkRequest | None:
        request = decode_request(packet)
        if not FDS_PER_REQUEST_MIN <= len(fds) <= FDS_PER_REQUEST_MAX:
            raise OSError(f"a fork request came with {len(fds)} descriptors")
        try:
            if len(self._children) >= CHILDREN_MAX:
                raise OSError(f"the template has {CHILDREN_MAX} children already")
            cause = CausePage()
            # Only the pidfd is opened after the fork: without it the child could not be supervised.
            pid = os.fork()
        except OSError as error:
            reason = str(error)[:REASON_CHARACTERS_MAX]
            failed = ForkFailed(
                rank=request.rank, incarnation=request.incarnation, reason=reason, job=request.job
            )
            self._reply(failed)
            _close_all(fds)
            return None
        if pid == 0:
            self._become_child(request, fds)
            self.cause = cause
            return request
        _close_all(fds)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = _Child(request.job, request.rank, request.incarnation, pid, cause)
        self._poll.register(pidfd, select.POLLIN)
        forked = Forked(rank=request.rank, incarnation=request.incarnation, pid=pid, job=request.job)
        self._reply(forked, [pidfd])
        return None

    def _become_child(self, request: ForkRequest, fds: list[int]) -> None:
        """Drop the template's descriptors, session and parent."""
        end_with_parent(self._pid)
        os.setsid()
        set_process_name(spare.SPARE_NAME if request.waits else f"zbmd-rank{request.rank}")
        self._host.close()
        _close_all(list(self._children))
        for other in self._children.values():
            other.cause.close()
        if request.waits:
            self.spare_fd = fds.pop()
        if request.keeps:
            request.environment[KEPT_FDS_VARIABLE] = " ".join(map(str, fds[-request.keeps :]))
            del fds[-request.keeps :]
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        for stdin_fd in fds[2:]:
            os.dup2(stdin_fd, 0)
        _close_all(fds)

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        # While the child is a zombie its process group's id cannot be used again: what it left in its
        # group (helpers that it started) is ended before it is reaped.
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        assert end is not None, "a readable pidfd has an end to report"
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        exited = ForkExited(
            rank=child.rank,
            incarnation=child.incarnation,
            pid=child.pid,
            code=code,
            job=child.job,
            cause=child.cause.read() if code else "",
        )
        child.cause.close()
        self._reply(exited)

    def _reply(self, reply: Reply, fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._host, [encode(reply)], fds)
        except BrokenPipeError:
            raise SystemExit(0) from None  # the host is gone; our children go with us


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the traceback from the user's first frame on, as `python script.py` would."""
    users = trace
    while users is not None and users.tb_frame.f_code is not run_target.__code__:
        users = users.tb_next
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while users is not None and users.tb_frame.f_code.co_filename in ours:
        users = users.tb_next
    trace = users or trace
    write_exit_reason("".join(traceback.format_exception(kind, error, trace)))


def run_target(request: ForkRequest, cause: CausePage | None = None, *, spare_fd: int | None = None) -> None:
    """Run the script or module as `__main__`, as `python` would.

    cause: takes the cause of its failure; spare_fd: of a spare.
    """
    pid = os.getpid()
    os.environ.update(request.environment)
    if spare_fd is not None:
        spare.begin(spare_fd)
    os.environ.pop(JOINED_VARIABLE, None)  # of a rank that has started this launcher
    script_begins(cause)
    offer_memory()
    apply_threads(os.environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Completed lines must be written before a kill; a pipe would buffer them in blocks.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # else every rank would have the template's state
    sys.excepthook = _show_exception
    log_to_stderr()
    sys.argv = [request.target, *request.arguments]
    failed = True
    try:
        if request.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(request.target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(request.target).resolve().parent))
            runpy.run_path(request.target, run_name="__main__")
        failed = False
    except BaseException as error:
        failed = not isinstance(error, SystemExit) or error.code not in (None, 0)
        if failed and cause is not None and os.getpid() == pid:
            cause.write(cause_of(error))
        raise
    finally:
        script_ended(failed=failed)


def serve_host(fd: int, modules: Sequence[str]) -> NoReturn:
    """Import `modules` and serve the host at the other end of socket `fd`; in a fork, run a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_process_name("zbmd-template")
    for module in modules:
        importlib.import_module(module)
    with socket.socket(fileno=fd) as host:
        host.set_inheritable(False)
        gc.collect()
        gc.freeze()  # so that a child's collector does not touch, and copy, inherited pages
        template = Template(host)
        request = template.serve()
    if request is not None:
        try:
            if request.incarnation:  # a rank, and no process of a pool
                debugger.install()
            with children_end_here():
                run_target(request, template.cause, spare_fd=template.spare_fd)
        except ZbmdError as error:
            if not needs_no_traceback(error):
                raise
            write_exit_reason(" ".join(str(error).splitlines()))
            raise SystemExit(USAGE_EXIT_CODE) from None
    raise SystemExit(0)
