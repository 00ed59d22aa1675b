"""The server of the pages: files, answers as JSON, and a line on which it says that there is more to see.

It reads runs and changes nothing but their databases, and computes plans. It listens on loopback, where the
name that a browser was given must be a local one, or elsewhere with a token that comes from the cluster's
cookie. A page asks for nothing from another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib
import importlib.resources
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from zbmd.tools.dashboard.access import is_local, shown_address
from zbmd.tools.dashboard.live import Live
from zbmd.tools.dashboard.queries import QUESTIONS
from zbmd.tools.dashboard.runs import REFRESH_S, ShownRun, ShownRuns
from zbmd.tools.plan.designs import DESIGN_NAME, OPTIONS, PRESETS, answer, design_text
from zbmd.tools.telemetry.measures import exposition
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from aiohttp import web

CLIENTS_MAX: Final = 64
"""Pages that may follow at once."""
QUERY_MAX: Final = 4_096
"""Characters of the options of a design."""
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


def _library() -> tuple[Any, bytes]:
    """Return aiohttp's web module and the plotting library's script. Raises `UserError` without them."""
    try:
        web = importlib.import_module("aiohttp.web")
        script = importlib.resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    except (ImportError, FileNotFoundError) as error:
        raise UserError('the dashboard needs aiohttp and plotly: pip install "zbmd[telemetry]".') from error
    return web, script


class Dashboard:
    """Serves the planners, what is live, and pages on `directories`. token: what a browser must know; "" on
    loopback. announced: a file in which a launcher has what its ranks begin; None without a launcher.

    Raises `UserError` for a directory that is no run, and without aiohttp or plotly.
    """

    def __init__(self, directories: Sequence[Path], *, token: str = "", announced: int | None = None) -> None:
        self._web, self._plotly = _library()
        self._token = token
        self._runs = ShownRuns(directories, announced)
        self._thread = ThreadPoolExecutor(1, "zbmd-dashboard")
        self._followers = set[Any]()
        self._live_view: Live | None = None

    async def _close(self) -> None:
        if self._live_view is not None:
            await self._live_view.close()
        self._thread.shutdown()
        self._runs.close()

    @contextlib.asynccontextmanager
    async def serving(
        self, host: str, port: int, *, listening: socket.socket | None = None
    ) -> AsyncGenerator[str]:
        """Serve within the context; yields the address. port: 0 for any. Raises `UserError`.

        listening: a socket that listens already.
        """
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
        application.router.add_get("/api/live", self._answer_live)
        application.router.add_get("/api/{question}", self._answer)
        application.router.add_get("/live", self._live)
        application.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port) if listening is None else web.SockSite(runner, listening)
            try:
                await site.start()
            except OSError as error:
                raise UserError(
                    f"cannot serve on {host}:{port}: {error.strerror}. Choose another --listen."
                ) from None
            yield shown_address(host, runner.addresses[0][1], self._token)
        finally:
            for follower in list(self._followers):
                await follower.close()
            await runner.cleanup()
            await self._close()

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
        raise self._web.HTTPFound("/run" if self._has_runs() else "/plan")

    def _has_runs(self) -> bool:
        return bool(self._runs.all) or self._runs.announced is not None

    async def _page(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/cluster" and not self._has_runs():
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
        await self._in_thread(self._runs.look)
        return self._json(msgspec.json.encode({"runs": [run.name for run in self._runs.all]}))

    def _json(self, data: bytes) -> web.StreamResponse:
        return self._web.Response(body=data, content_type="application/json")  # type: ignore[no-any-return]

    def _run(self, request: web.Request) -> ShownRun:
        number, runs = request.query.get("run", "0"), self._runs.all
        if not number.isdecimal() or len(number) > 4 or int(number) >= len(runs):
            none = "no run was named" if self._runs.announced is None else "no run has begun yet"
            raise self._web.HTTPNotFound(text=f"{f'there are runs 0 to {len(runs) - 1}' if runs else none}\n")
        return runs[int(number)]

    def _lives(self) -> Live:
        if self._live_view is None:
            self._live_view = Live()
        return self._live_view

    async def _answer_live(self, request: web.Request) -> web.StreamResponse:
        return self._json(msgspec.json.encode(await self._lives().answer()))

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
            live = await self._lives().measures()
            data, kind = await self._in_thread(lambda: exposition([*self._runs.measures(), *live]))
        except UserError as error:
            raise self._web.HTTPServiceUnavailable(text=f"{error}\n") from None
        return self._web.Response(body=data, headers={"Content-Type": kind})  # type: ignore[no-any-return]

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        try:
            data = await self._in_thread(self._run(request).trace)
        except UserError as error:
            raise self._web.HTTPNotFound(text=f"{error}\n") from None
        response = self._json(data)
        response.headers["Content-Disposition"] = 'attachment; filename="trace.json"'
        return response

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Say the version of the run each time that it grows; a page asks again for what it shows.

        A page of no run hears of those that begin.
        """
        run = self._run(request) if self._runs.all else None
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

    async def _tell(self, run: ShownRun | None, follower: Any) -> None:
        told: dict[str, int] = {}
        while True:  # until the page is closed
            runs = await self._in_thread(self._runs.look)
            news = {"version": 0 if run is None else await self._in_thread(run.update), "runs": runs}
            if news != told:
                told = news
                with contextlib.suppress(ConnectionError):
                    await follower.send_json(news)
            await asyncio.sleep(REFRESH_S)


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
