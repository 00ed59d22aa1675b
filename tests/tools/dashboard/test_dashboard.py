"""`zbmd dashboard`: what pages ask, who may ask, and the pages in a real browser."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.jobs.profiles import encoded, life, step

from zbmd.tools.dashboard.access import is_local, token_of
from zbmd.tools.dashboard.queries import BINS_MAX, QUESTIONS, SPANS_MAX, timeline
from zbmd.tools.dashboard.server import Dashboard
from zbmd.tools.entry import zbmd as cli
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.training.profiler.lines import lines_path
from zbmd.transport.errors import UserError

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("plotly")
from support.browser import Page, browser, colors_in, in_a_browser  # noqa: E402 (imports aiohttp)

LIMIT_S = 180.0
DRAWN = "Number(document.body.dataset.drawn) > 0"
pytestmark = pytest.mark.optional


def written(directory: Path, ranks: int, steps: int) -> Path:
    """A run of that many ranks and steps of a second, of which odd ones wait for half of it."""
    for rank in range(ranks):
        path = lines_path(directory, rank, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [step(n, n, n + 1, comm=n % 2) for n in range(1, steps + 1)]
        path.write_bytes(b"".join(encoded(life(rank, lines))))
    return directory


# ---- answers


@pytest.mark.parametrize(("ranks", "steps"), [(512, 3), (1, 100_000)])
def test_answers_are_bounded_however_long_and_wide_a_run_is(tmp_path: Path, ranks: int, steps: int) -> None:
    with RunDatabase(written(tmp_path, ranks, steps), step_rows_max=50_000) as database:
        database.update()
        found = {name: ask(database.connection) for name, ask in QUESTIONS.items()}
    assert found["summary"]["ranks"] == ranks and found["summary"]["steps"] == steps
    drawn = found["waterfall"]
    assert len(drawn["step"]) == min(steps, len(drawn["step"])) <= BINS_MAX
    totals = [sum(values) for values in zip(*drawn["phases"].values(), strict=True)]
    assert totals == pytest.approx([1000.0] * len(totals)), "the phases of each bin are a second"
    assert found["summary"]["comm"] == pytest.approx((steps + 1) // 2 / steps)
    heat = found["by_rank"]
    assert heat["rank"] == list(range(ranks)) and len(heat["own_ms"]) == ranks
    assert len(found["cluster"]["rows"]) == ranks


def test_answers_of_a_real_run(killed: Path) -> None:
    with RunDatabase(killed) as database:
        database.update(spans=True)
        found = {name: ask(database.connection) for name, ask in QUESTIONS.items()}
        spans = timeline(database.connection, 2, 4)
    assert found["summary"]["deaths"] == 1 and found["summary"]["recovery_ms"] > 0
    assert found["curves"]["loss"]["step"] == [1, 2, 3, 4, 5, 6]
    assert [row["kind"] for row in found["events"]["rows"] if row["kind"] != "start"] == [
        "death",
        "cut",
        "recovered",
    ]
    assert [row["restarts"] for row in found["cluster"]["rows"]] == [0, 1]
    assert {row["state"] for row in found["cluster"]["rows"]} == {"ended"}
    assert (
        0 < len(spans["rank"]) <= SPANS_MAX
        and set(spans["step"]) == {2, 3, 4}
        and set(spans["rank"]) == {0, 1}
    )
    assert min(spans["begin_ms"]) == 0
    assert found["slowest_ops"]["sampled"]
    ops = found["slowest_ops"]["rows"]
    assert len(ops) == 10 and sum(row["share"] for row in ops) <= 1
    assert {row["pass"] for row in ops} <= {"forward", "backward", "work", "collective"}
    assert all(row["shape"] and row["calls_per_step"] > 0 for row in ops)
    assert all(row["enqueue_ms"] > 0 for row in ops if row["pass"] != "collective")
    linear = "SELECT op FROM op_profile WHERE kind = 'op' AND flops > 0"
    with RunDatabase(killed) as database:
        assert ("linear",) in database.connection.execute(linear).fetchall()


# ---- the server


@asynccontextmanager
async def client(*runs: Path, token: str = "") -> AsyncGenerator[tuple[Any, str]]:
    """A client, and the address of the pages."""
    async with (
        Dashboard(runs, token=token).serving("127.0.0.1", 0) as address,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        yield session, address.partition("?")[0]


@pytest.mark.parametrize(
    ("where", "status", "words"),
    [
        ("", 200, "<title>zbmd</title>"),
        ("profiling", 200, "<title>zbmd</title>"),
        ("assets/app.js", 200, "use strict"),
        ("assets/..%2fserver.py", 404, ""),
        ("assets/%2fetc%2fpasswd", 404, ""),
        ("api/summary?run=1", 404, "there are runs 0 to 0"),
        ("api/summary?run=x", 404, "there are runs 0 to 0"),
        ("api/nothing", 404, "the questions are summary"),
        ("api/timeline?steps=9:2", 400, "expected the first and the last step"),
        ("api/timeline?steps=1e3", 400, "expected the first and the last step"),
        ("api/timeline?steps=99999:99999", 200, '"rank":[]'),
        ("api/trace", 404, "no spans of ranks are kept"),
        ("live", 400, ""),
    ],
)
async def test_what_the_server_answers(tmp_path: Path, where: str, status: int, words: str) -> None:
    async with (
        client(written(tmp_path, 1, 2)) as (session, address),
        session.get(address + where) as response,
    ):
        assert response.status == status and words in await response.text()
        if status == 200:
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]


async def test_only_this_machine_may_ask_on_loopback(tmp_path: Path) -> None:
    async with client(written(tmp_path, 1, 2)) as (session, address):
        for host, status in (
            ("evil.example", 403),
            ("localhost", 200),
            ("127.0.0.1:80", 200),
            ("[::1]", 200),
        ):
            async with session.get(f"{address}api/summary", headers={"Host": host}) as response:
                assert response.status == status, host
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await session.ws_connect(f"{address}live", headers={"Origin": "http://evil.example"})


async def test_elsewhere_a_token_is_needed(tmp_path: Path) -> None:
    token = token_of(b"the cookie of this cluster")
    assert re.fullmatch("[0-9a-f]{32}", token) and token != token_of(b"another cookie")
    async with client(written(tmp_path, 1, 2), token=token) as (session, address):
        for how, status in (
            ({}, 403),
            ({"params": {"token": "wrong"}}, 403),
            ({"params": {"token": "wr\u00f6ng"}}, 403),
            ({"headers": {"Authorization": f"Bearer {token}"}}, 200),
            ({"params": {"token": token}}, 200),
            ({}, 200),  # the browser has the cookie now
        ):
            async with session.get(f"{address}api/summary", **how) as response:
                assert response.status == status, how


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1:7380", True), ("localhost:0", True), ("[::1]:5", True), ("127.8.8.8", True), ("", False),
        ("0.0.0.0:7380", False), ("192.0.2.1", False), ("localhost.evil.example", False), ("[::1", False),
    ],
)  # fmt: skip
def test_which_names_mean_this_machine(host: str, local: bool) -> None:
    assert is_local(host) is local


async def test_a_page_hears_of_what_is_new(tmp_path: Path) -> None:
    run = written(tmp_path, 1, 2)
    async with client(run) as (session, address), session.ws_connect(f"{address}live") as line:
        async with asyncio.timeout(LIMIT_S):
            first = (await line.receive_json())["version"]
            with lines_path(run, 0, 1).open("ab") as file:
                file.write(encoded(life(0, [step(3, 3, 5)]))[1])
            assert (await line.receive_json())["version"] > first
        async with session.get(f"{address}api/summary") as response:
            assert (await response.json())["steps"] == 3


def test_what_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard", str(tmp_path / "nothing")]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    run = written(tmp_path, 1, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["dashboard", str(run), "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]) == 2
    assert "Choose another --listen" in capsys.readouterr().err
    with pytest.raises(UserError):
        Dashboard([tmp_path / "nothing"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    command = [
        sys.executable,
        "-m",
        "zbmd",
        "dashboard",
        str(written(tmp_path, 1, 1)),
        "--listen",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert re.match(r"dashboard: http://127\.0\.0\.1:\d+/ ", process.stdout.readline())
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 0


# ---- pages


async def shown(page: Page) -> str:
    text: str = await page.value("document.body.innerText")
    return text


@in_a_browser
async def test_each_page_of_a_run(killed: Path, tmp_path: Path) -> None:
    with RunDatabase(killed) as database:
        database.update()
        slowest = {row["op"] for row in QUESTIONS["slowest_ops"](database.connection)["rows"]}
    expected = {
        "run": ("Loss", "Goodput", "useful step", "rank 1 died, as rank 0 noticed", "grad norm"),
        "profiling": (
            "Time of a step",
            "Communication and bubble",
            *slowest,
            "rank 1 steps",
            "rank 1 ops",
            "GFLOP/s",
        ),
        "cluster": ("the latest process of each", "ended"),
        "logs": ("rank 0 began on", "goes on"),
    }
    async with Dashboard([killed]).serving("127.0.0.1", 0) as address, browser(tmp_path) as page:
        for name, words in expected.items():
            await page.open(f"{address}{name}")
            await page.until(DRAWN)
            text = await shown(page)
            assert not [word for word in words if word not in text], (name, text)
            assert colors_in(await page.picture()) > 20, name
        assert not page.errors
        assert not [url for url in page.asked if not url.startswith((address, "data:", "blob:", "about:"))]


@in_a_browser
async def test_clicks(killed: Path, tmp_path: Path) -> None:
    async with Dashboard([killed, killed]).serving("127.0.0.1", 0) as address, browser(tmp_path) as page:
        await page.open(f"{address}profiling")
        await page.until(
            f"{DRAWN} && document.querySelector('#timeline .kept').textContent.startsWith('kept')"
        )
        await page.value("(() => { const form = document.querySelector('form.range'); form.first.value = 1; "
                         "form.last.value = 1; })()")  # fmt: skip
        await page.click("form.range button")
        of_step_1 = "document.querySelector('#timeline .plot').data.flatMap((one) => one.text)"
        await page.until(f"{of_step_1}.length && {of_step_1}.every((text) => text.includes(', step 1: '))")
        await page.click("nav a[href^='/logs']")
        await page.until(f"location.pathname === '/logs' && {DRAWN}")
        await page.value("(() => { const one = document.querySelector('#events input'); one.value = 'died'; "
                         "one.dispatchEvent(new Event('input')); })()")  # fmt: skip
        await page.until("document.querySelectorAll('#events tbody tr').length === 1")
        await page.value("(() => { const one = document.getElementById('runs'); one.value = '1'; "
                         "one.dispatchEvent(new Event('change')); })()")  # fmt: skip
        await page.until(f"location.search === '?run=1' && {DRAWN}")
        assert not page.errors


@in_a_browser
async def test_a_run_that_begins_while_the_page_is_open(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    async with Dashboard([run]).serving("127.0.0.1", 0) as address, browser(tmp_path) as page:
        await page.open(f"{address}profiling")
        await page.until(DRAWN)
        assert "no step has ended yet" in await shown(page)
        written(run, 2, 5)
        await page.until("document.querySelector('#summary .tile b').textContent === '5'")
        with lines_path(run, 0, 1).open("ab") as file:
            file.write(encoded(life(0, [step(6, 6, 7)]))[1])
        await page.until("document.querySelector('#summary .tile b').textContent === '6'")
        assert not page.errors


@in_a_browser
@pytest.mark.parametrize(("ranks", "steps"), [(512, 3), (1, 100_000)])
async def test_pages_of_wide_and_of_long_runs(tmp_path: Path, ranks: int, steps: int) -> None:
    run = written(tmp_path / "run", ranks, steps)
    async with Dashboard([run]).serving("127.0.0.1", 0) as address, browser(tmp_path) as page:
        for name in ("profiling", "cluster"):
            await page.open(f"{address}{name}")
            await page.until(DRAWN)
        rows = await page.value("document.querySelectorAll('#processes tbody tr').length")
        assert rows == ranks and not page.errors


def test_names_from_a_run_are_text_and_no_html() -> None:
    """The script has no way to make HTML of data."""
    assets = Path(cli.__file__).parents[1] / "dashboard" / "assets" / "app.js"
    script = assets.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    assert "document.createElement" in script
