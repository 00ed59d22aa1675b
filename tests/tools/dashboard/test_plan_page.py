"""The page of the planners: a real server, a real browser, and a run that a saved design starts."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

from zbmd.tools.dashboard.server import Dashboard
from zbmd.tools.plan.designs import OPTIONS, PRESETS, answer, design_text
from zbmd.training.checkpoint.intervals import exact_s
from zbmd.transport.errors import UserError

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("plotly")
from support.browser import browser, in_a_browser  # noqa: E402 (imports aiohttp)

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

pytestmark = pytest.mark.optional


async def get(where: str, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Ask a dashboard without runs; return status, headers, and JSON or text."""
    async with (
        Dashboard([]).serving("127.0.0.1", 0) as address,
        aiohttp.ClientSession() as session,
        session.get(address + where, headers=headers, allow_redirects=False) as response,
    ):
        is_json = response.content_type == "application/json"
        return (
            response.status,
            dict(response.headers),
            await (response.json() if is_json else response.text()),
        )


@in_a_browser
@pytest.mark.parametrize("preset", ["", "405B on 16,384 H100"])
async def test_a_browser_draws_what_python_computes(preset: str, tmp_path: Path) -> None:
    found = answer(PRESETS.get(preset, {}))
    async with Dashboard([]).serving("127.0.0.1", 0) as address, browser(tmp_path) as page:
        await page.open(f"{address}plan?{urlencode({'preset': preset})}")
        await page.until("document.body.dataset.ready")
        assert await page.value("document.getElementById('summary').textContent") == found.summary
        assert await page.value("document.querySelectorAll('input[type=range]').length") == 6
        names = await page.value("[...document.querySelectorAll('#presets button')].map(b => b.textContent)")
        assert names == list(PRESETS)
        for curve in ("total", "io", "rework"):
            points = await page.value(f"document.querySelector('#curve #{curve}').getAttribute('points')")
            assert len(points.split()) == len(found.curve.total) and len(set(points.split())) > 20
        rows = await page.value("document.querySelectorAll('#strategies tr').length")
        assert rows == len(found.cluster.strategies) + 2
        await page.click("#presets button")  # another design is drawn in its place
        other = answer(PRESETS[next(iter(PRESETS))]).summary
        await page.until(f"document.getElementById('summary').textContent === {other!r}")
        assert not page.errors
        assert all(url.startswith((address, "data:")) for url in page.asked)


def test_a_saved_design_starts_a_run(launcher: Launcher) -> None:
    (launcher.directory / "text").write_text("".join(f"line {i} of a text\n" for i in range(2000)))
    status, headers, text = asyncio.run(get(f"api/plan/design?{urlencode(PRESETS['this machine'])}"))
    assert status == 200 and headers["Content-Disposition"] == 'attachment; filename="design.toml"'
    (launcher.directory / "design.toml").write_text(text)
    run = ("-m", "zbmd", "train", "--plan", "design.toml", "--data", "text", "--steps", "3", "--out", "run")
    small = ("--layers", "1", "--width", "32", "--warmup", "1", "--evaluate-windows", "2")
    done = launcher.run("run", "-n", "2", *run, *small)
    assert done.code == 0, done
    recipe = (launcher.directory / "run/recipe.toml").read_text()
    assert 'mesh = "fsdp=2"\n' in recipe and "zero = 1\n" in recipe and "layers = 1\n" in recipe
    assert 'checkpoint_every = "auto"\n' in recipe


async def test_an_answer_is_that_of_the_planners() -> None:
    status, headers, found = await get("api/plan/answer?interval=30min&mtbf=200h&accelerators=64")
    assert status == 200 and headers["X-Content-Type-Options"] == "nosniff"
    plan = found["checkpoint"]
    assert plan["exact_s"] == pytest.approx(exact_s(plan["stall_s"], 200 * 3600 / 64))
    assert plan["yours"]["interval_s"] == pytest.approx(1800, rel=0.05)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("mtbf=often", "--mtbf: "),
        ("accelerators=0", "--accelerators: expected a whole number of at least 1, got '0'"),
        ("accelerators=1000001", "--accelerators: expected 1 to 1,000,000"),
        ("shell=1", "'shell' is no option of a design"),
        ("mtbf=" + "9" * 99, "--mtbf: expected at most 64 characters, got 99"),
        ("x" * 5000, "expected a query of at most 4096 characters"),
    ],
)
async def test_a_bad_option_is_named(query: str, words: str) -> None:
    status, _, found = await get(f"api/plan/answer?{query}")
    assert status == 400 and words in found["error"], found


async def test_without_runs_all_pages_lead_to_the_planners() -> None:
    for page in ("", "run", "profiling"):
        status, headers, _ = await get(page)
        assert (status, headers["Location"]) == (302, "/plan")
    assert (await get("api/summary"))[2] == "no run was named\n"
    assert (await get("api/plan/elsewhere"))[0] == 404
    assert (await get("api/plan/presets", Host="evil.example"))[0] == 403


def test_a_design_without_a_run_says_why() -> None:
    with pytest.raises(UserError, match="no strategy fits, so there is no run to start"):
        design_text(answer({"parameters": "405B", "accelerators": "1"}))
    own = design_text(answer({"interval": "5min"}))
    assert re.search(r"^checkpoint_every = \d+$", own, re.MULTILINE), own
    assert all(design_text(answer(preset)) for preset in PRESETS.values())
    assert set(OPTIONS) >= {name for preset in PRESETS.values() for name in preset}
