"""The server of the pages: files, answers as JSON, and a line on which it says that there is more to see.

It reads runs and changes nothing but their databases, and computes plans. It listens on loopback, where the
name that a browser was given must be a local one, or elsewhere with a token that comes from the cluster's
cookie. A page asks for nothing from another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import importlib
import importlib.resources
import ipaddress
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from zbmd.tools.dashboard.queries import QUESTIONS, timeline
from zbmd.tools.plan.designs import DESIGN_NAME, OPTIONS, PRESETS, answer, design_text
from zbmd.tools.runs.goodput import goodput_of, read_runs
from zbmd.tools.runs.goodput_command import as_json
from zbmd.tools.runs.profile import read_rings, trace_of
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.tools.telemetry.measures import Measure, RunMeasures, exposition
from zbmd.training.profiler.lines import PROFILE_DIRECTORY, read_profiles
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from aiohttp import web

REFRESH_S: Final = 1.0
"""The database is brought up to date at most that often, and pages hear of it."""
SPANS_REFRESH_S: Final = 5.0
"""Spans are read again at most that often: they are 3.6 MB a rank."""
CLIENTS_MAX: Final = 64
"""Pages that may follow at once."""
GOODPUT_BYTES_MAX: Final = 200 << 20
"""Of profiles, which goodput reads as a whole."""
QUERY_MAX: Final = 4_096
"""Characters of the options of a design."""
TOKEN_BYTES: Final = 16
TOKEN_NAME: Final = "zbmd_token"
PAGES: Final = ("profiling", "run", "cluster", "logs")
ASSETS: Final = {
    **{"app.js": "text/javascript", "plan.js": "text/javascript", "style.css": "text/css"},
    **{"page.html": "text/html", "plan.html": "text/html"},
}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def token_of(cookie: bytes) -> str:
    """Return the token that a page on another host needs, from the cookie of the cluster."""
    return hmac.new(cookie, b"zbmd dashboard", hashlib.sha256).hexdigest()[: 2 * TOKEN_BYTES]


def _library() -> tuple[Any, bytes]:
    """Return aiohttp's web module and the plotting library's script. Raises `UserError` without them."""
    try:
        web = importlib.import_module("aiohttp.web")
        script = importlib.resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    except (ImportError, FileNotFoundError) as error:
        raise UserError('the dashboard needs aiohttp and plotly: pip install "zbmd[telemetry]".') from error
    return web, script


class _Run:
    """One run's database, which one thread at a time uses."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self.version = 0
        """Grows with what is new."""
        self.problem = ""
        self._database = RunDatabase(directory)
        self._measures = RunMeasures(name, directory)
        self._updated_s = self._spans_s = -1e9
        self._answers: dict[tuple[Any, ...], tuple[int, bytes]] = {}

    def close(self) -> None:
        self._database.connection.close()

    def update(self, *, spans: bool = False) -> int:
        """Bring the database up to date, unless that was done just now; return the version."""
        now_s = time.monotonic()
        spans = spans and now_s - self._spans_s >= SPANS_REFRESH_S
        if spans or now_s - self._updated_s >= REFRESH_S:
            before = self._database.connection.total_changes
            try:
                self._database.update(spans=spans)
                self.problem = ""
            except UserError as error:  # a run that has just begun has written nothing
                self.problem = str(error)
            self.version += self._database.connection.total_changes != before
            self._updated_s = time.monotonic()
            self._spans_s = self._updated_s if spans else self._spans_s
        return self.version

    def answer(self, question: str, steps: tuple[int, int] | None) -> bytes:
        """Return the answer as JSON, computed once for each version."""
        version = self.update(spans=question in ("timeline", "slowest_ops"))
        key = (question, steps)
        known = self._answers.get(key)
        if known is not None and known[0] == version:
            return known[1]
        connection = self._database.connection
        if question == "timeline":
            found = timeline(connection, *(steps or (None, None)))
        elif question == "goodput":
            found = self._goodput()
        else:
            found = QUESTIONS[question](connection)
        data = msgspec.json.encode({**found, "version": version, "problem": self.problem})
        if len(self._answers) > 4 * len(QUESTIONS):
            self._answers.clear()  # time lines of many ranges of steps
        self._answers[key] = version, data
        return data

    def measures(self) -> list[Measure]:
        """Return the metrics for Prometheus."""
        self.update()
        return self._measures.collect(self._database.connection)

    def _goodput(self) -> dict[str, Any]:
        paths = (self.directory / PROFILE_DIRECTORY).glob("rank*.jsonl*")
        if sum(path.stat().st_size for path in paths) > GOODPUT_BYTES_MAX:
            return {"missing": f"the profile is too large for a page: zbmd goodput {self.directory}"}
        try:
            return as_json(goodput_of(read_runs([self.directory])))
        except UserError as error:
            return {"missing": str(error)}

    def trace(self) -> bytes:
        """Return the latest spans as a trace for Perfetto. Raises `UserError`."""
        return trace_of(read_rings([self.directory]), read_profiles(self.directory))


class Dashboard:
    """Serves the planners, and pages on `directories`. token: what a browser must know; "" on loopback.

    Raises `UserError` for a directory that is no run, and without aiohttp or plotly.
    """

    def __init__(self, directories: Sequence[Path], *, token: str = "") -> None:
        self._web, self._plotly = _library()
        self._token = token
        self._runs: list[_Run] = []
        self._thread = ThreadPoolExecutor(1, "zbmd-dashboard")
        self._followers = set[Any]()
        try:
            for directory in directories:
                self._runs.append(_Run(directory, self._name_of(directory)))
        except BaseException:
            self._close()
            raise

    def _name_of(self, directory: Path) -> str:
        """Return the name of a run on pages and in `/metrics`: no other has it."""
        name = directory.name or str(directory)
        known = {run.name for run in self._runs}
        return next(one for one in (name, str(directory), f"{directory}#{len(known)}") if one not in known)

    def _close(self) -> None:
        self._thread.shutdown()
        for run in self._runs:
            run.close()

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncGenerator[str]:
        """Serve within the context; yields the address. port: 0 for any. Raises `UserError`."""
        web = self._web

        async def guard(request: Any, handler: Any) -> Any:
            return await self._guard(request, handler)

        application = web.Application(middlewares=[web.middleware(guard)], client_max_size=1 << 16)
        application.router.add_get("/", self._first)
        for page in PAGES:
            application.router.add_get(f"/{page}", self._page)
        application.router.add_get("/plan", self._plan)
        application.router.add_get("/api/plan/{question}", self._planned)
        application.router.add_get("/assets/{name}", self._asset)
        application.router.add_get("/api/runs", self._list)
        application.router.add_get("/api/trace", self._trace)
        application.router.add_get("/api/{question}", self._answer)
        application.router.add_get("/live", self._live)
        application.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as error:
                raise UserError(
                    f"cannot serve on {host}:{port}: {error.strerror}. Choose another --listen."
                ) from None
            bound = runner.addresses[0][1]
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{bound}/" + (f"?token={self._token}" if self._token else "")
        finally:
            for follower in list(self._followers):
                await follower.close()
            await runner.cleanup()
            self._close()

    async def _in_thread(self, call: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *given)

    # ---- who may ask

    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Let a request pass that may; a middleware of aiohttp."""
        given = request.query.get("token") or request.cookies.get(TOKEN_NAME, "")
        header = request.headers.get("Authorization", "")
        given = header.removeprefix("Bearer ") if header.startswith("Bearer ") else given
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            raise self._web.HTTPForbidden(
                text="a token is needed: open the address that zbmd dashboard has printed\n"
            )
        if not self._token and not is_local(request.headers.get("Host", "")):
            raise self._web.HTTPForbidden(text="this page is for this machine alone\n")
        response = await handler(request)
        if not response.prepared:
            response.headers.update(HEADERS)
            if self._token and "token" in request.query:
                response.set_cookie(TOKEN_NAME, self._token, httponly=True, samesite="Strict")
        return response

    # ---- what is asked

    async def _first(self, request: web.Request) -> web.StreamResponse:
        raise self._web.HTTPFound("/run" if self._runs else "/plan")

    async def _page(self, request: web.Request) -> web.StreamResponse:
        if not self._runs:
            raise self._web.HTTPFound("/plan")
        return self._file("page.html")

    async def _plan(self, request: web.Request) -> web.StreamResponse:
        return self._file("plan.html")

    async def _planned(self, request: web.Request) -> web.StreamResponse:
        """Answer what the page of the planners asks. It is computed in a few ms, so no thread is asked."""
        try:
            match request.match_info["question"]:
                case "presets":
                    return self._json(msgspec.json.encode({"options": OPTIONS, "presets": PRESETS}))
                case "answer":
                    return self._json(msgspec.json.encode(answer(_options(request))))
                case "design":
                    file = {"Content-Disposition": f'attachment; filename="{DESIGN_NAME}"'}
                    text = design_text(answer(_options(request)))
                    return self._web.Response(text=text, content_type="application/toml", headers=file)  # type: ignore[no-any-return]
                case _:
                    raise self._web.HTTPNotFound(text="expected presets, answer or design\n")
        except UserError as error:
            problem = self._json(msgspec.json.encode({"error": str(error)}))
            problem.set_status(400)
            return problem

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name == "plotly.js":
            return self._web.Response(body=self._plotly, content_type="text/javascript", charset="utf-8")  # type: ignore[no-any-return]
        if name not in ASSETS:
            raise self._web.HTTPNotFound
        return self._file(name)

    def _file(self, name: str) -> web.StreamResponse:
        data = importlib.resources.files("zbmd.tools.dashboard").joinpath("assets", name).read_bytes()
        return self._web.Response(body=data, content_type=ASSETS[name], charset="utf-8")  # type: ignore[no-any-return]

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return self._json(msgspec.json.encode({"runs": [run.name for run in self._runs]}))

    def _json(self, data: bytes) -> web.StreamResponse:
        return self._web.Response(body=data, content_type="application/json")  # type: ignore[no-any-return]

    def _run(self, request: web.Request) -> _Run:
        number = request.query.get("run", "0")
        if not number.isdecimal() or len(number) > 4 or int(number) >= len(self._runs):
            known = f"there are runs 0 to {len(self._runs) - 1}" if self._runs else "no run was named"
            raise self._web.HTTPNotFound(text=f"{known}\n")
        return self._runs[int(number)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        question = request.match_info["question"]
        if question not in (*QUESTIONS, "timeline", "goodput"):
            raise self._web.HTTPNotFound(
                text=f"the questions are {', '.join(QUESTIONS)}, timeline, goodput\n"
            )
        steps = request.query.get("steps")
        try:
            return self._json(
                await self._in_thread(
                    self._run(request).answer, question, None if steps is None else _steps(steps)
                )
            )
        except UserError as error:
            raise self._web.HTTPBadRequest(text=f"{error}\n") from None

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """Answer Prometheus."""
        try:
            data, kind = await self._in_thread(self._exposition)
        except UserError as error:
            raise self._web.HTTPServiceUnavailable(text=f"{error}\n") from None
        return self._web.Response(body=data, headers={"Content-Type": kind})  # type: ignore[no-any-return]

    def _exposition(self) -> tuple[bytes, str]:
        return exposition(one for run in self._runs for one in run.measures())

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        try:
            data = await self._in_thread(self._run(request).trace)
        except UserError as error:
            raise self._web.HTTPNotFound(text=f"{error}\n") from None
        response = self._json(data)
        response.headers["Content-Disposition"] = 'attachment; filename="trace.json"'
        return response

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Say the version of the run each time that it grows; a page asks again for what it shows."""
        run = self._run(request)
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("Host"):
            raise self._web.HTTPForbidden(text="pages of other hosts may not follow\n")
        if len(self._followers) >= CLIENTS_MAX:
            raise self._web.HTTPServiceUnavailable(text=f"{CLIENTS_MAX} pages follow already\n")
        follower = self._web.WebSocketResponse(heartbeat=30.0)
        await follower.prepare(request)
        self._followers.add(follower)
        telling = asyncio.ensure_future(self._tell(run, follower))
        try:
            async for _ in follower:  # a page has nothing to say; this ends when it is closed
                pass
        finally:
            telling.cancel()
            await asyncio.wait([telling])
            self._followers.discard(follower)
        return follower  # type: ignore[no-any-return]

    async def _tell(self, run: _Run, follower: Any) -> None:
        told = -1
        while True:  # until the page is closed
            version = await self._in_thread(run.update)
            if version != told:
                told = version
                with contextlib.suppress(ConnectionError):
                    await follower.send_json({"version": version})
            await asyncio.sleep(REFRESH_S)


def is_local(host: str) -> bool:
    """Whether HOST or HOST:PORT means this machine alone: a foreign name may have been pointed here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _options(request: web.Request) -> dict[str, str]:
    if len(request.query_string) > QUERY_MAX:
        raise UserError(
            f"expected a query of at most {QUERY_MAX} characters, got {len(request.query_string)}"
        )
    return {name: text for name, text in request.query.items() if name != "token"}


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or len(text) > 40 or int(first) > int(last):
        raise UserError(f"steps={text}: expected the first and the last step, such as 20:24.")
    return int(first), int(last)
