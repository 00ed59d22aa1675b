"""The page of the planners: a real server, a real browser, and a run that a saved design starts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zbmd.tools.plan.page.designs import OPTIONS, PRESETS, answer, design_text
from zbmd.tools.plan.page.server import page_server
from zbmd.training.checkpoint.intervals import exact_s
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    *("--disable-extensions", "--disable-default-apps", "--no-pings", "--window-size=1280,1300"),
    *("--enable-logging=stderr", "--virtual-time-budget=8000", "--timeout=60000"),
)
TIMEOUT_S = 120.0


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """A server of the page on a free port."""
    server = page_server("127.0.0.1", 0)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield "127.0.0.1", server.server_port
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


def get(address: tuple[str, int], path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection(*address, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def browse(address: tuple[str, int], query: str, directory: Path) -> tuple[str, str]:
    """Open the page; return its DOM and what the browser logged."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    command = [CHROMIUM, *BROWSER, f"--user-data-dir={directory / 'profile'}", "--dump-dom"]
    command += [f"--log-net-log={directory / 'net.json'}", f"--screenshot={directory / 'page.png'}"]
    command.append(f"http://{address[0]}:{address[1]}/?{query}")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=directory, check=True
    )
    return done.stdout, done.stderr


@pytest.mark.site
@pytest.mark.optional
@pytest.mark.parametrize("preset", ["", "405B on 16,384 H100"])
def test_a_browser_draws_what_python_computes(address: tuple[str, int], preset: str, tmp_path: Path) -> None:
    dom, log = browse(address, "preset=" + preset.replace(" ", "+"), tmp_path)
    found = answer(PRESETS.get(preset, {}))
    assert found.summary in dom, dom[-3000:]
    assert dom.count('type="range"') == 6 and all(f">{name}</button>" in dom for name in PRESETS)
    for curve in ("total", "io", "rework"):
        (points,) = re.findall(rf'id="{curve}"[^>]*points="([^"]*)"', dom)
        drawn = [tuple(map(float, point.split(","))) for point in points.split()]
        assert len(drawn) == len(found.curve.total) and len(set(drawn)) > 20
    assert dom.count("<tr") == len(found.cluster.strategies) + 2
    errors = [line for line in log.splitlines() if "CONSOLE" in line or "Uncaught" in line]
    assert not errors, errors
    events: list[dict[str, Any]] = json.loads((tmp_path / "net.json").read_text())["events"]
    asked = [event["params"] for event in events if "url" in event.get("params", {})]
    pages = {one["url"] for one in asked if str(one.get("initiator", "")).startswith("http")}
    assert any("/answer?" in url for url in pages)
    assert not {url for url in pages if not url.startswith((f"http://127.0.0.1:{address[1]}/", "data:"))}


def test_a_saved_design_starts_a_run(launcher: Launcher, address: tuple[str, int]) -> None:
    (launcher.directory / "text").write_text("".join(f"line {i} of a text\n" for i in range(2000)))
    query = "&".join(f"{name}={value}" for name, value in PRESETS["this machine"].items())
    status, headers, body = get(address, f"/design?{query}")
    assert status == 200 and headers["Content-Disposition"] == 'attachment; filename="design.toml"'
    (launcher.directory / "design.toml").write_bytes(body)
    run = ("-m", "zbmd", "train", "--plan", "design.toml", "--data", "text", "--steps", "3", "--out", "run")
    small = ("--layers", "1", "--width", "32", "--warmup", "1", "--evaluate-windows", "2")
    done = launcher.run("run", "-n", "2", *run, *small)
    assert done.code == 0, done
    recipe = (launcher.directory / "run/recipe.toml").read_text()
    assert 'mesh = "fsdp=2"\n' in recipe and "zero = 1\n" in recipe and "layers = 1\n" in recipe
    assert 'checkpoint_every = "auto"\n' in recipe


def test_an_answer_is_that_of_the_planners_and_a_bad_option_is_named(address: tuple[str, int]) -> None:
    status, headers, body = get(address, "/answer?interval=30min&mtbf=200h&accelerators=64")
    found = json.loads(body)
    assert status == 200 and headers["X-Content-Type-Options"] == "nosniff"
    plan = found["checkpoint"]
    assert plan["exact_s"] == pytest.approx(exact_s(plan["stall_s"], 200 * 3600 / 64))
    assert plan["yours"]["interval_s"] == pytest.approx(1800, rel=0.05)
    for query, words in (
        ("mtbf=often", "--mtbf: "),
        ("accelerators=0", "--accelerators: expected a whole number of at least 1, got '0'"),
        ("accelerators=1000001", "--accelerators: expected 1 to 1,000,000"),
        ("shell=1", "'shell' is no option of a design"),
        ("mtbf=" + "9" * 99, "--mtbf: expected at most 64 characters, got 99"),
        ("x" * 5000, "expected a query of at most 4096 characters"),
    ):
        status, _, body = get(address, f"/answer?{query}")
        assert status == 400 and words in json.loads(body)["error"], body
    assert get(address, "/elsewhere")[0] == 404


def test_a_page_of_another_name_reads_nothing(address: tuple[str, int]) -> None:
    """A site whose name is made to mean this host (DNS rebinding) is refused; addresses are not names."""
    assert get(address, "/presets", Host="evil.example")[0] == 403
    assert get(address, "/presets", Host=f"localhost:{address[1]}")[0] == 200
    assert get(address, "/presets", Host=f"127.0.0.1:{address[1]}")[0] == 200


def test_a_port_that_is_taken_is_said(address: tuple[str, int]) -> None:
    with pytest.raises(UserError, match=r"cannot listen on 127.0.0.1:\d+: Address already in use"):
        page_server(*address)
    with pytest.raises(UserError, match="--port: expected 0 to 65535, got 70000"):
        page_server("127.0.0.1", 70_000)


def test_a_design_without_a_run_says_why() -> None:
    with pytest.raises(UserError, match="no strategy fits, so there is no run to start"):
        design_text(answer({"parameters": "405B", "accelerators": "1"}))
    own = design_text(answer({"interval": "5min"}))
    assert re.search(r"^checkpoint_every = \d+$", own, re.MULTILINE), own
    assert all(design_text(answer(preset)) for preset in PRESETS.values())
    assert set(OPTIONS) >= {name for preset in PRESETS.values() for name in preset}
