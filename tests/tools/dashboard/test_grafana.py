"""The dashboard for Grafana in deploy/grafana: each metric that it names is served, and each query is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zbmd.tools.dashboard.server import Dashboard

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")
pytest.importorskip("plotly")
pytestmark = pytest.mark.optional

BOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "deploy" / "grafana" / "zbmd.json").read_text()
)
VARIABLES = {"$__rate_interval": "1m", "$__range": "1h", "$run": ".*", "$program": ".*"}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def queries() -> Iterator[str]:
    """Every query of the panels and annotations, and of the choices at the top."""
    for panel in BOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (one["expr"] for one in BOARD["annotations"]["list"])


def test_the_file_is_a_dashboard() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    drawn = [panel for panel in panels if panel["type"] != "row"]
    assert all(panel["targets"] and panel["title"] for panel in drawn)
    known = {one["name"] for one in BOARD["templating"]["list"]}
    assert known == {"datasource", "run", "program"}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24
        same = [other["id"] for other in panels if _overlap(place, other["gridPos"])]
        assert same == [panel["id"]], f"{panel['title']} covers another panel"


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    across = one["x"] < other["x"] + other["w"] and other["x"] < one["x"] + one["w"]
    return across and one["y"] < other["y"] + other["h"] and other["y"] < one["y"] + one["h"]


async def test_every_metric_that_it_names_is_served(killed: Path) -> None:
    async with (
        Dashboard([killed]).serving("127.0.0.1", 0) as address,
        aiohttp.ClientSession() as session,
        session.get(f"{address}metrics") as response,
    ):
        text = await response.text()
    types = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    served = {f"{name.removesuffix('_total')}{suffix}" for name, kind in types for suffix in SUFFIXES[kind]}
    choices = [one["definition"] for one in BOARD["templating"]["list"] if one["type"] == "query"]
    named = {name for query in (*queries(), *choices) for name in re.findall(r"\bzbmd_\w+", query)}
    assert named <= served, named - served
    assert len(named) > 20


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)
def test_every_query_is_promql(tmp_path: Path) -> None:
    rules: list[dict[str, str]] = []
    for number, query in enumerate(queries()):
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        assert "$" not in query, query
        rules.append({"record": f"query_{number}", "expr": query})
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "rules.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
