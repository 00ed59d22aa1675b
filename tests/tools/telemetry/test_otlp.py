"""`zbmd export --format otlp`: a collector process receives what a run recorded, also while it goes on."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import pytest
from programs import PROGRAMS
from support.jobs.profiles import encoded, life, step
from support.jobs.two_ranks import killed_run

from zbmd.tools.entry import zbmd as cli
from zbmd.tools.replay.run import open_logs
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.training.profiler.lines import lines_path
from zbmd.transport.capture import merged
from zbmd.transport.capture.records import FrameIn
from zbmd.transport.frames import unpack_header

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
pytestmark = pytest.mark.optional

COLLECTOR = Path(__file__).parents[2] / "support" / "processes" / "otlp_collector.py"


class Collector:
    """A collector that runs. requests: what it has been sent, by path."""

    def __init__(self, process: subprocess.Popen[str], lines: TextIO) -> None:
        assert process.stdout is not None
        self._process, self._lines, self._part = process, lines, ""
        self.endpoint = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        self.requests: dict[str, list[Any]] = defaultdict(list)

    def read(self) -> str:
        """Take the next request, once it is there; return its path."""
        looking = threading.Event()
        while not self._part.endswith("\n"):
            self._part += self._lines.readline()
            assert self._process.poll() is None and not looking.wait(0.0 if self._part else 0.02)
        line, self._part = json.loads(self._part), ""
        self.requests[line["path"]].append(line["request"])
        path: str = line["path"]
        return path

    def spans(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Each span, and the attributes of its resource."""
        for request in self.requests["/v1/traces"]:
            for resource in request["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        yield span, attributes(resource["resource"])

    def values(self, name: str) -> dict[str, Any]:
        """The last data points of a metric, by their labels but the run."""
        (resource,) = self.requests["/v1/metrics"][-1]["resourceMetrics"]
        (metric,) = [each for each in resource["scopeMetrics"][0]["metrics"] if each["name"] == name]
        (kind,) = metric.keys() & {"sum", "gauge", "histogram"}
        points = {}
        for point in metric[kind]["dataPoints"]:
            labels = {key: value for key, value in attributes(point).items() if key != "run"}
            points[",".join(labels.values())] = point
        return points


def attributes(of: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in of["attributes"]}


@contextlib.contextmanager
def collector() -> Generator[Collector]:
    with (
        tempfile.NamedTemporaryFile("r") as lines,
        subprocess.Popen(
            [sys.executable, str(COLLECTOR), lines.name], stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            yield Collector(process, cast("TextIO", lines))
        finally:
            process.kill()


def test_a_run_with_a_loss_arrives_as_spans_logs_and_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = killed_run(tmp_path)
    with collector() as found:
        assert cli.main(["export", str(run), "--format", "otlp", "--endpoint", found.endpoint]) == 0
        while found.read() != "/v1/metrics":
            pass
        spans = list(found.spans())
    with RunDatabase(run) as database:
        (steps,) = database.connection.execute("SELECT count(*) FROM step_timing").fetchone()
        (operations,) = database.connection.execute("SELECT count(*) FROM gpu_timeline").fetchone()
    assert f"{steps + operations} spans" in capsys.readouterr().out and len(spans) == steps + operations
    of_steps = {span["spanId"]: span for span, _ in spans if "parentSpanId" not in span}
    assert len(of_steps) == steps, "a step that is repeated has a span of its own"
    traces = defaultdict(set[str])
    for span, resource in spans:
        traces[attributes(span)["zbmd.step"]].add(span["traceId"])
        assert resource["zbmd.run"] == "run" and resource["service.instance.id"][:4] == "rank"
    assert all(len(ids) == 1 for ids in traces.values()), "all ranks' spans of a step are one trace"
    assert len(set.union(*traces.values())) == len(traces)
    inside = [span for span, _ in spans if span.get("parentSpanId") in of_steps]
    assert len(inside) > operations / 2
    for span in inside:
        parent = of_steps[span["parentSpanId"]]
        assert parent["startTimeUnixNano"] <= span["startTimeUnixNano"] < parent["endTimeUnixNano"]
        assert parent["traceId"] == span["traceId"]
    (logs,) = [
        resource["scopeLogs"][0]["logRecords"] for resource in found.requests["/v1/logs"][0]["resourceLogs"]
    ]
    told = {attributes(one)["zbmd.event"]: one for one in logs}
    assert told["death"]["severityText"] == "WARN" and "rank 1 died" in told["death"]["body"]["stringValue"]
    assert told["recovered"]["severityText"] == "INFO"
    assert int(found.values("zbmd_step_seconds")["0"]["count"]) >= 6
    assert float(found.values("zbmd_run_metric")["loss"]["asDouble"]) > 0
    assert int(found.values("zbmd_restarts")["1"]["asInt"]) == 1


def test_what_is_new_follows_until_it_is_stopped(tmp_path: Path) -> None:
    path = lines_path(tmp_path, 0, 1)
    path.parent.mkdir()
    first, *others = encoded(life(0, [step(n, n, n + 1) for n in range(1, 4)]))
    path.write_bytes(first + others[0])
    with collector() as found:
        command = [*(sys.executable, "-m", "zbmd", "export", str(tmp_path)), "--format", "otlp", "--follow"]
        with subprocess.Popen([*command, "--endpoint", found.endpoint], stdout=subprocess.PIPE) as export:
            while found.read() != "/v1/metrics":
                pass
            assert [span["name"] for span, _ in found.spans()] == ["step 1"]
            with path.open("ab") as file:
                file.writelines(others[1:])
            while sum(1 for _ in found.spans()) < 3:
                found.read()
            export.send_signal(signal.SIGTERM)
            assert export.wait(180) == 0
        assert [span["name"] for span, _ in found.spans()] == ["step 1", "step 2", "step 3"], "each once"


def test_captured_messages_have_the_trace_ids_of_their_frames(launcher: Launcher) -> None:
    arguments = ("-n", "2", "--capture", "log", str(PROGRAMS / "node" / "joins.py"), "ends")
    ended = launcher.run("run", *arguments)
    assert ended.code == 0, str(ended)
    capture = launcher.directory / "log"
    logs, _ = open_logs(capture, ())
    frames = [entry.record.frame for entry in merged(logs) if isinstance(entry.record, FrameIn)]
    ids = {unpack_header(frame).trace_id for frame in frames} - {0}
    run = launcher.directory / "profiled"
    lines_path(run, 0, 1).parent.mkdir(parents=True)
    lines_path(run, 0, 1).write_bytes(b"".join(encoded(life(0, [step(1, 1, 2)]))))
    with collector() as found:
        more = ["--endpoint", found.endpoint, "--capture", str(capture)]
        assert cli.main(["export", str(run), "--format", "otlp", *more]) == 0
        while sum(1 for _ in found.spans()) < 1 + len(frames):
            found.read()
        messages = [(span, resource) for span, resource in found.spans() if "zbmd.sender" in attributes(span)]
    assert len(messages) == len(frames) > 0 and ids
    assert ids <= {int.from_bytes(base64.b64decode(span["traceId"])) for span, _ in messages}
    assert any("zbmd.host.join" in span["name"] for span, _ in messages), [
        span["name"] for span, _ in messages
    ]
    assert all(span["startTimeUnixNano"] <= span["endTimeUnixNano"] for span, _ in messages)


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [("{}/wrong", "did not take what was sent"), ("localhost:4318", "expected a URL such as")],
)
def test_a_collector_that_is_none(
    endpoint: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines_path(tmp_path, 0, 1).parent.mkdir()
    lines_path(tmp_path, 0, 1).write_bytes(b"".join(encoded(life(0, [step(1, 1, 2)]))))
    with collector() as found:
        given = ["--endpoint", endpoint.format(found.endpoint)]
        assert cli.main(["export", str(tmp_path), "--format", "otlp", *given]) == 2
    assert words in capsys.readouterr().err
