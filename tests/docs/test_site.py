"""The documentation site in a real browser: pages are drawn, without errors and without other hosts."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import threading
from collections.abc import Generator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

SITE = Path(__file__).resolve().parents[2] / "site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGES = {
    "index.html": ["zbmd-node run", "init_process_group"],
    "TUTORIAL.html": ["Kill a rank", "survive.py"],
    "api/zbmd.html": ["zbmd.join", "zbmd.Worker"],
}
BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    *("--disable-extensions", "--disable-default-apps", "--no-pings", "--window-size=1280,1600"),
    *("--enable-logging=stderr", "--virtual-time-budget=5000", "--timeout=30000"),
)
TIMEOUT_S = 120.0

pytestmark = [pytest.mark.site, pytest.mark.optional]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def address() -> Generator[str]:
    """A server of the built site."""
    if not SITE.is_dir():
        pytest.skip("the site is not built: make docs")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
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


def browse(address: str, page: str, directory: Path) -> tuple[str, str, Path]:
    """Open a page; return its DOM, what the browser logged, and where its picture is."""
    picture = directory / "page.png"
    assert CHROMIUM is not None
    command = [CHROMIUM, *BROWSER, f"--user-data-dir={directory / 'profile'}", "--dump-dom"]
    command += [f"--log-net-log={directory / 'net.json'}", f"--screenshot={picture}", f"{address}/{page}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=directory, check=True
    )
    return done.stdout, done.stderr, picture


def requests_of_pages(net_log: Path) -> set[str]:
    """Return the addresses that pages asked for: those of the browser itself have no origin."""
    events = json.loads(net_log.read_text())["events"]
    found: set[str] = set()
    for event in events:
        parameters = event.get("params", {})
        if "url" in parameters and str(parameters.get("initiator", "")).startswith("http"):
            found.add(parameters["url"])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_page_in_a_browser(address: str, page: str, tmp_path: Path) -> None:
    dom, log, picture = browse(address, page, tmp_path)
    for words in PAGES[page]:
        assert words in dom
    errors = [line for line in log.splitlines() if "CONSOLE" in line or "Uncaught" in line]
    assert not errors, errors
    asked = requests_of_pages(tmp_path / "net.json")
    assert any(url.endswith(".css") for url in asked)
    assert not {url for url in asked if not url.startswith((address, "data:", "blob:"))}
    pixels = np.asarray(matplotlib.image.imread(picture))
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50, "the picture is blank"
