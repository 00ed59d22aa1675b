"""The dashboard of a launcher or node: a process of its own, which never holds up or ends the job.

The launcher has the listening socket before anything starts, so an address that cannot be served is an error
then, and a dashboard that fails is started again at the same one. It ends with the launcher, whatever ends
that.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Final, ParamSpec

from zbmd.actors.cluster.jobs.reports import RankDown
from zbmd.actors.process.exit import describe_exit
from zbmd.tools.dashboard.access import is_local, shown_address, token_of
from zbmd.training.profiler.announcements import VARIABLE, RankLost, announce
from zbmd.transport.errors import UserError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.tcp.address import TcpAddress

MODULE: Final = "zbmd.tools.dashboard.command"
ADDRESS_VARIABLE: Final = "ZBMD_DASHBOARD"
NEEDED: Final = ("aiohttp", "plotly")
AGAIN_S: Final = 1.0
AGAIN_S_MAX: Final = 60.0
"""A dashboard that ends is started again after `AGAIN_S`, and after twice as long each time."""
STOP_S: Final = 2.0
BACKLOG: Final = 128

ArgumentsP = ParamSpec("ArgumentsP")


class LauncherDashboard:
    """Serves the runs that ranks of this process begin at `where`. Raises `UserError` if that cannot be.

    Make it before ranks are forked: they read from the environment where to announce their runs.
    """

    def __init__(self, where: TcpAddress) -> None:
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise UserError(
                f'--dashboard needs {" and ".join(missing)}: pip install "zbmd[telemetry]", or leave it out.'
            )
        host = where.host or "0.0.0.0"
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, where.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise UserError(
                f"--dashboard {host}:{where.port}: cannot be served: {error.strerror}. Choose another "
                "address; port 0 takes a free one."
            ) from None
        port = self._socket.getsockname()[1]
        token = "" if is_local(f"[{host}]" if ":" in host else host) else token_of(load_or_create_cookie())
        self.address = shown_address(host, port, token)
        self._runs = os.memfd_create("zbmd-runs", os.MFD_CLOEXEC)
        os.environ.pop(ADDRESS_VARIABLE, None)  # a launcher that a rank starts announces its runs to this one
        os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{self._runs}"
        self._is_open = True
        self._is_serving = False
        os.register_at_fork(after_in_child=self._close_in_fork)

    def _close_in_fork(self) -> None:
        """Close both in the template of the ranks: a rank would hold the port, and hand it on."""
        if not self._is_serving:  # then the fork is the dashboard, which uvloop makes
            self.close()

    def close(self) -> None:
        """Give the port and the file back. Idempotent, also in forks of forks."""
        if self._is_open:
            self._is_open = False
            self._socket.close()
            os.close(self._runs)

    def beside(
        self, running: Callable[ArgumentsP, Coroutine[None, None, int]]
    ) -> Callable[ArgumentsP, Coroutine[None, None, int]]:
        """Return `running` with the dashboard beside it."""

        async def both(*args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs) -> int:
            async with self.serving():
                return await running(*args, **kwargs)

        return both

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Have the process run within the context."""
        print(f"[zbmd]: dashboard: {self.address}", file=sys.stderr, flush=True)
        self._is_serving = True
        task = asyncio.get_running_loop().create_task(self._supervise(), name="dashboard")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            self.close()

    async def _supervise(self) -> None:
        again_s = AGAIN_S
        while True:  # until it is cancelled
            try:
                code = await self._run()
            except OSError as error:  # no process can be had
                code, why = 0, f"cannot be started ({error.strerror})"
            else:
                why = f"has ended ({describe_exit(code)})"
            words = f"[zbmd]: the dashboard {why}; it is started again in {again_s:g} s, the job goes on"
            print(words, file=sys.stderr, flush=True)
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_S_MAX)

    async def _run(self) -> int:
        """Start the process, and wait for its end; end it if this is cancelled."""
        given = (self._socket.fileno(), self._runs)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, *map(str, (*given, os.getpid()))),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=given,
            start_new_session=True,  # Ctrl-C is for the launcher, which ends it when the job has ended
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                try:
                    async with asyncio.timeout(STOP_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()


def opened(where: TcpAddress | None) -> LauncherDashboard | None:
    """Return the dashboard at `where`, None without one. Raises `UserError`."""
    return None if where is None else LauncherDashboard(where)


def note_death(event: object) -> None:
    """Announce the cause of an unexpected death to the dashboard, if there is one."""
    if isinstance(event, RankDown) and not event.expected and not event.normal:
        cause = "out of memory" if event.no_memory else describe_exit(event.code)
        announce(RankLost(event.rank, event.incarnation, cause))
