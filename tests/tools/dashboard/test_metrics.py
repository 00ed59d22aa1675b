"""`/metrics`: what Prometheus reads of a run, and a real Prometheus that reads it."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from support.cluster.etcd_server import free_ports
from support.jobs.profiles import encoded, life, step
from support.processes.polling import pause

from zbmd.tools.dashboard.server import Dashboard
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.tools.telemetry.measures import SECONDS, Counts, Measure, RunMeasures
from zbmd.training.profiler.lines import lines_path

aiohttp = pytest.importorskip("aiohttp")
parser = pytest.importorskip("prometheus_client.parser")
pytest.importorskip("plotly")
pytestmark = pytest.mark.optional

LIMIT_S = 180.0
TOKEN = "0123456789abcdef0123456789abcdef"
with_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"
)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The values of an answer by name and labels, as Prometheus' own parser reads it."""
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in parser.text_string_to_metric_families(text)
        for one in family.samples
    }


def sample(text: str, name: str, /, **labels: str) -> float:
    return samples(text)[name, frozenset(labels.items())]


async def scraped(address: str, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as session, session.get(f"{address}metrics", headers=headers) as found:
        assert found.status == 200 and found.headers["Content-Type"].startswith("text/plain")
        text: str = await found.text()
        return text


async def test_what_is_scraped_of_a_run_with_a_loss(killed: Path) -> None:
    async with Dashboard([killed]).serving("127.0.0.1", 0) as address:
        text = await scraped(address)
    with RunDatabase(killed) as database:
        [(steps, wall_ns)] = database.connection.execute(
            "SELECT count(*), sum(wall_ns) FROM step_timing WHERE rank = 0"
        ).fetchall()
        [(forward_ns,)] = database.connection.execute("SELECT sum(forward_ns) FROM step_timing").fetchall()
        [(loss,)] = database.connection.execute(
            "SELECT value FROM metrics WHERE name = 'loss' AND step = 6"
        ).fetchall()
    assert sample(text, "zbmd_steps_total", run="run", rank="0") == steps >= 6
    assert sample(text, "zbmd_step_seconds_count", run="run", rank="0") == steps
    assert sample(text, "zbmd_step_seconds_sum", run="run", rank="0") == pytest.approx(wall_ns / 1e9)
    assert sample(text, "zbmd_step_seconds_bucket", run="run", rank="0", le="+Inf") == steps
    found = sample(text, "zbmd_step_phase_seconds_sum", run="run", phase="forward")
    assert found == pytest.approx(forward_ns / 1e9)
    assert sample(text, "zbmd_run_metric", run="run", name="loss") == loss
    assert sample(text, "zbmd_deaths_total", run="run", cause="unknown") == 1
    assert sample(text, "zbmd_recovery_seconds_count", run="run") >= 1
    assert sample(text, "zbmd_restarts_total", run="run", rank="1") == 1
    assert sample(text, "zbmd_restarts_total", run="run", rank="0") == 0
    assert sample(text, "zbmd_step", run="run", rank="1") == 6
    assert sample(text, "zbmd_tokens_total", run="run") == 6 * 4 * 2 * 8, "steps, shards, sequences, context"


def values(measures: list[Measure], name: str) -> dict[str, float | Counts]:
    (one,) = [each for each in measures if each.name == f"zbmd_{name}"]
    return {",".join(value for _, value in labels[1:]): value for labels, value in one.samples}


def test_counters_go_on_while_old_steps_are_added_up(tmp_path: Path) -> None:
    """Rows that leave `step_timing` stay counted; an exporter that begins later counts them, too."""
    path = lines_path(tmp_path, 0, 1)
    path.parent.mkdir(parents=True)
    lines = encoded(life(0, [step(n, n, n + 1, comm=n % 2) for n in range(1, 1001)]))
    measures = RunMeasures("run", tmp_path)
    counted: list[float] = []
    with RunDatabase(tmp_path, step_rows_max=300) as database:
        for first, last in ((0, 201), (201, 601), (601, 1001)):
            with path.open("ab") as file:
                file.writelines(lines[first:last])
            database.update()
            counted.append(values(measures.collect(database.connection), "steps")["0"])  # type: ignore[arg-type]
        assert counted[0] == 200 and counted == sorted(counted)
        later = RunMeasures("run", tmp_path).collect(database.connection)
    assert values(later, "steps")["0"] == 1000
    of_steps = values(later, "step_seconds")["0"]
    assert isinstance(of_steps, Counts) and of_steps.total == pytest.approx(1000)
    assert of_steps.counts[SECONDS.index(1.0)] == sum(of_steps.counts) == 1000
    phases = values(later, "rank_phase_seconds")
    assert phases["0,comm"] == pytest.approx(500) and phases["0,forward"] == pytest.approx(500)


async def test_two_runs_of_one_name_are_told_apart_and_a_token_is_needed(tmp_path: Path) -> None:
    runs = [tmp_path / "monday" / "run", tmp_path / "tuesday" / "run"]
    for number, run in enumerate(runs, 1):
        lines_path(run, 0, 1).parent.mkdir(parents=True)
        lines_path(run, 0, 1).write_bytes(b"".join(encoded(life(0, [step(1, 1, 1 + number)]))))
    async with Dashboard(runs, token=TOKEN).serving("127.0.0.1", 0) as address:
        address = address.partition("?")[0]
        async with aiohttp.ClientSession() as session, session.get(f"{address}metrics") as refused:
            assert refused.status == 403
        text = await scraped(address, TOKEN)
    assert sample(text, "zbmd_step_seconds_sum", run="run", rank="0") == 1
    assert sample(text, "zbmd_step_seconds_sum", run=str(runs[1]), rank="0") == 2


@with_prometheus
async def test_promtool_finds_nothing_wrong(killed: Path) -> None:
    async with Dashboard([killed]).serving("127.0.0.1", 0) as address:
        text = await scraped(address)
    checking = await asyncio.create_subprocess_exec(
        *("promtool", "check", "metrics"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await checking.communicate(text.encode())
    assert checking.returncode == 0 and not said, said.decode()


CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: zbmd
    authorization: {{credentials: {token}}}
    static_configs: [{{targets: ["{target}"]}}]
"""


@with_prometheus
async def test_a_prometheus_scrapes_a_run_and_answers_queries(killed: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with Dashboard([killed], token=TOKEN).serving("127.0.0.1", 0) as address:
        target = address.removeprefix("http://").partition("/")[0]
        (tmp_path / "prometheus.yml").write_text(CONFIG.format(token=TOKEN, target=target))
        server = await asyncio.create_subprocess_exec(
            *(
                "prometheus",
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
            ),
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as session:
                found = await _queried(session, port, 'zbmd_run_metric{run="run", name="loss"}')
                middle = await _queried(
                    session,
                    port,
                    'histogram_quantile(0.5, sum by (le) (zbmd_step_seconds_bucket{run="run"}))',
                )
                deaths = await _queried(session, port, "sum(zbmd_deaths_total)")
        finally:
            server.send_signal(signal.SIGTERM)
            await server.wait()
    assert math.isfinite(float(found["value"][1])) and found["metric"]["job"] == "zbmd"
    assert 0 < float(middle["value"][1]) < 300 and deaths["value"][1] == "1"


async def _queried(session: Any, port: int, query: str) -> dict[str, Any]:
    """The first series of an answer, once there is one."""
    while True:  # until the test's time is up
        try:
            where = f"http://127.0.0.1:{port}/api/v1/query"
            async with session.get(where, params={"query": query}) as response:
                answer: dict[str, Any] = json.loads(await response.text())
            if answer["status"] == "success" and answer["data"]["result"]:
                first: dict[str, Any] = answer["data"]["result"][0]
                return first
        except (aiohttp.ClientConnectionError, json.JSONDecodeError):
            pass  # it is still starting
        await pause()
