"""The documentation site in a real browser: pages are drawn, without errors and without other hosts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Generator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
from support.browser import browser, colors_in, in_a_browser

SITE = Path(__file__).resolve().parents[2] / "site"
PAGES = {
    "index.html": ["zbmd-node run", "init_process_group"],
    "TUTORIAL.html": ["Kill a rank", "survive.py"],
    "api/zbmd.html": ["zbmd.join", "zbmd.Worker"],
}
pytestmark = [pytest.mark.site, pytest.mark.optional]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def address() -> Generator[str]:
    """A server of the built site."""
    if not SITE.is_dir():
        pytest.skip("the site is not built: make docs")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    server.daemon_threads = False
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


@in_a_browser
@pytest.mark.parametrize("where", PAGES)
async def test_a_page_in_a_browser(address: str, where: str, tmp_path: Path) -> None:
    async with browser(tmp_path) as page:
        await page.open(f"{address}/{where}")
        await page.until("document.readyState === 'complete'")
        text = await page.value("document.body.textContent")
        assert colors_in(await page.picture()) > 50, "the picture is blank"
        assert not page.errors
    assert all(words in text for words in PAGES[where])
    assert any(url.endswith(".css") for url in page.asked)
    assert not {url for url in page.asked if not url.startswith((address, "data:", "blob:"))}
