"""A real browser, spoken to by the DevTools protocol: pages are loaded, clicked and looked at."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import matplotlib.image
import numpy as np
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"
)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    *("--disable-extensions", "--disable-default-apps", "--no-pings", "--window-size=1280,1600"),
    *("--remote-debugging-port=0", "about:blank"),
)
TIMEOUT_S = 180.0
# What the protocol answers to who waits on a page that is left for another.
LEFT = ("Inspected target navigated", "Cannot find context", "Execution context was destroyed", "collected")


class PageFailed(AssertionError):
    """A page has thrown, or has not become what was waited for."""


@dataclass
class Page:
    """A tab. errors: what its console has shown as errors, and what it threw. asked: addresses it loaded."""

    _line: aiohttp.ClientWebSocketResponse
    errors: list[str] = field(default_factory=list[str])
    asked: list[str] = field(default_factory=list[str])
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict[int, "asyncio.Future[Any]"])

    async def read(self) -> None:
        """Take what the browser says, until it is gone."""
        async for message in self._line:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._waiting.pop(said["id"])
                if not waiting.done():
                    waiting.set_result(said)
                continue
            parameters = said.get("params", {})
            match said["method"]:
                case "Runtime.exceptionThrown":
                    self.errors.append(json.dumps(parameters["exceptionDetails"])[:2000])
                case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                    self.errors.append(json.dumps(parameters["entry"])[:2000])
                case "Network.requestWillBeSent":
                    self.asked.append(parameters["request"]["url"])
                case _:
                    pass

    async def call(self, method: str, **parameters: Any) -> Any:
        """Ask the browser for something, and return its answer."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._line.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(TIMEOUT_S):
            said = await answer
        if "error" in said:
            raise PageFailed(f"{method}: {said['error']}")
        return said["result"]

    async def open(self, address: str) -> None:
        """Load a page."""
        await self.call("Page.navigate", url=address)

    async def value(self, expression: str) -> Any:
        """Return what a JavaScript expression is, once its promise, if it is one, is kept."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise PageFailed(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript condition holds, also if the page is left for another meanwhile."""
        wait = (
            "new Promise((done) => { const look = () => { try { if (" + condition + ") return done(true); } "
            "catch (error) { } requestAnimationFrame(look); }; look(); })"
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    try:
                        await self.value(wait)
                        return
                    except PageFailed as error:
                        if not any(words in str(error) for words in LEFT):
                            raise
        except (PageFailed, TimeoutError) as error:
            told = await self.value("document.body?.innerText")
            raise PageFailed(f"never was {condition}: {error}\n{self.errors}\n{told}") from None

    async def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        await self.until(f"document.querySelector({json.dumps(selector)})")
        where = await self.value(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.scrollIntoView(); "
            "const box = one.getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        at = {"x": where[0], "y": where[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, **at)

    async def picture(self) -> bytes:
        """Return what the whole page looks like, as PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(found["data"])


def colors_in(picture: bytes) -> int:
    """Return the number of colors of a PNG."""
    pixels = (255 * matplotlib.image.imread(io.BytesIO(picture))).astype(np.uint32)
    return len(np.unique(pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]))


@contextlib.asynccontextmanager
async def browser(directory: Path) -> AsyncGenerator[Page]:
    """A browser with one page, whose files are in `directory`; gone at the end."""
    # It leaves a folder in TMPDIR, with a socket, whose path may not be long.
    with tempfile.TemporaryDirectory(prefix="zbmd-test-browser-") as scratch:
        async with _browser(directory, scratch) as page:
            yield page


@contextlib.asynccontextmanager
async def _browser(directory: Path, scratch: str) -> AsyncGenerator[Page]:
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        *(CHROMIUM, f"--user-data-dir={directory / 'profile'}", *OPTIONS),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": scratch},
        start_new_session=True,
    )
    draining: asyncio.Future[bytes] | None = None
    try:
        assert process.stderr is not None
        async with asyncio.timeout(TIMEOUT_S):
            while not (line := await process.stderr.readline()).startswith(b"DevTools listening on ws://"):
                assert line, "the browser ended before it listened"
        draining = asyncio.ensure_future(process.stderr.read())
        port = int(line.split(b":")[2].split(b"/")[0])
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                pages = [one for one in await response.json() if one["type"] == "page"]
            at = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(at, max_msg_size=1 << 28) as line_to_page:
                page = Page(line_to_page)
                reading = asyncio.ensure_future(page.read())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                try:
                    yield page
                finally:
                    await line_to_page.close()
                    await reading
    finally:
        process.terminate()  # it ends its own processes
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        if draining is not None:
            await draining  # the end of all that hold it
