"""Export of a run to an OpenTelemetry collector: its metrics, its events as logs, its steps and operations as
spans, and messages of captured processes as spans under the trace ids of their frames.

All ranks' spans of a step are one trace. Ids follow from the run, so what is exported again is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from zbmd import __version__
from zbmd.tools.replay.run import open_logs
from zbmd.tools.replay.story import clock_offsets, stream_names
from zbmd.tools.replay.trace import frame_name
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.tools.telemetry.measures import AGAIN_STEPS, Counts, Kind, Measure, RunMeasures, merged
from zbmd.transport.capture import merged as merged_entries
from zbmd.transport.capture.records import FrameIn, FrameOut
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.frames import HEADER_BYTES, unpack_header

BATCH: Final = 512
"""Spans or logs of one request."""
UNMATCHED_MAX: Final = 65_536
"""Frames whose arrival is awaited."""
SCOPE: Final = "zbmd"
TIMEOUT_S: Final = 10.0
WARNINGS: Final = ("death", "cut", "lost_lines")

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Exported:
    """The numbers of what was exported."""

    spans: int = 0
    logs: int = 0
    metrics: int = 0

    def __add__(self, other: Exported) -> Exported:
        return Exported(self.spans + other.spans, self.logs + other.logs, self.metrics + other.metrics)


def _library() -> Any:
    """Return the parts of the SDK that are used. Raises `UserError` without it."""
    http = "opentelemetry.exporter.otlp.proto.http"
    names = {
        "trace": "opentelemetry.trace",
        "sdk_trace": "opentelemetry.sdk.trace",
        "resources": "opentelemetry.sdk.resources",
        "scope": "opentelemetry.sdk.util.instrumentation",
        "points": "opentelemetry.sdk.metrics.export",
        "logs": "opentelemetry._logs",
        "sdk_logs": "opentelemetry.sdk._logs",
        "spans_out": f"{http}.trace_exporter",
        "metrics_out": f"{http}.metric_exporter",
        "logs_out": f"{http}._log_exporter",
    }
    try:
        return SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})
    except ImportError as error:
        raise UserError('OTLP needs the OpenTelemetry SDK: pip install "zbmd[otlp]".') from error


class OtlpExport:
    """Exports the run in `directory` to the collector at `endpoint`, a URL such as http://localhost:4318.

    What has been exported is not sent again. Headers, such as a token, are read from
    OTEL_EXPORTER_OTLP_HEADERS. Raises `UserError` without the SDK.
    """

    def __init__(self, directory: Path, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise UserError(f"--endpoint {endpoint}: expected a URL such as http://localhost:4318")
        self._sdk = _library()
        self._endpoint, base = endpoint, endpoint.rstrip("/")
        self._spans = self._sdk.spans_out.OTLPSpanExporter(f"{base}/v1/traces", timeout=TIMEOUT_S)
        self._metrics = self._sdk.metrics_out.OTLPMetricExporter(f"{base}/v1/metrics", timeout=TIMEOUT_S)
        self._logs = self._sdk.logs_out.OTLPLogExporter(f"{base}/v1/logs", timeout=TIMEOUT_S)
        self._scope = self._sdk.scope.InstrumentationScope(SCOPE, __version__)
        self.name = directory.absolute().name
        self._measures = RunMeasures(self.name, directory)
        self._resources: dict[int, Any] = {}
        self._identity = b""
        self._steps_to: dict[int, tuple[int, int]] = {}
        self._timeline_to = 0
        self._events: set[str] = set()

    def close(self) -> None:
        """Close the connections."""
        for exporter in (self._spans, self._metrics, self._logs):
            exporter.shutdown()

    # ---- what there is

    def export(self, database: RunDatabase) -> Exported:
        """Send what is new since the last time.

        Raises `UserError` if the collector does not take it; the next call sends all of it again.
        """
        before = dict(self._steps_to), self._timeline_to, set(self._events)
        try:
            return self._export(database.connection)
        except UserError:
            self._steps_to, self._timeline_to, self._events = before
            raise

    def _export(self, connection: sqlite3.Connection) -> Exported:
        run = connection.execute("SELECT directory, began_ns FROM runs").fetchone()
        self._identity = repr(run).encode()
        spans = self._send(self._spans, self._step_spans(connection))
        spans += self._send(self._spans, self._operation_spans(connection))
        logs = self._send(self._logs, self._event_logs(connection))
        measures = merged(self._measures.collect(connection))
        data = self._metrics_data(measures, 0 if run is None else run[1])
        self._taken(self._metrics.export(data))
        return Exported(spans, logs, sum(len(one.samples) for one in measures))

    def _send(self, exporter: Any, items: Iterable[Any]) -> int:
        sent = 0
        for batch in _batches(items):
            self._taken(exporter.export(batch))
            sent += len(batch)
        return sent

    def _taken(self, result: Any) -> None:
        if result.name != "SUCCESS":
            raise UserError(
                f"the collector at {self._endpoint} did not take what was sent. Check the address, and that "
                "it receives OTLP over HTTP (port 4318 by default)."
            )

    def _resource(self, **attributes: object) -> Any:
        given = {"service.name": SCOPE, "service.version": __version__, "zbmd.run": self.name, **attributes}
        return self._sdk.resources.Resource(given)

    def _process(self, connection: sqlite3.Connection, number: int) -> Any:
        """Return the resource of a process that was a rank."""
        if number not in self._resources:
            rank, incarnation, host, pid = connection.execute(
                "SELECT rank, incarnation, host, pid FROM incarnations WHERE incarnation_id = ?", (number,)
            ).fetchone()
            self._resources[number] = self._resource(
                **{"service.instance.id": f"rank{rank}#{incarnation}", "host.name": host, "process.pid": pid},
                **{"zbmd.rank": rank, "zbmd.incarnation": incarnation},
            )
        return self._resources[number]

    # ---- spans

    def _id(self, size: int, *what: object) -> int:
        digest = hashlib.blake2b(self._identity + repr(what).encode(), digest_size=size).digest()
        return int.from_bytes(digest) or 1

    def _context(self, trace_id: int, span_id: int) -> Any:
        flags = self._sdk.trace.TraceFlags(self._sdk.trace.TraceFlags.SAMPLED)
        return self._sdk.trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)

    def _step_spans(self, connection: sqlite3.Connection) -> Iterator[Any]:
        known = connection.execute("SELECT incarnation_id FROM incarnations").fetchall()
        for (number,) in known:
            step, begin_ns = self._steps_to.get(number, (0, -1))
            cursor = connection.execute(
                f"SELECT step, begin_ns, wall_ns, flops, {_ATTEMPT} FROM step_timing AS s "
                "WHERE incarnation_id = ? AND step >= ? AND begin_ns > ? ORDER BY begin_ns",
                (number, step - AGAIN_STEPS, begin_ns),
            )
            for step, begin_ns, wall_ns, flops, attempt in cursor:
                self._steps_to[number] = step, begin_ns
                yield self._sdk.sdk_trace.ReadableSpan(
                    f"step {step}",
                    context=self._context(self._id(16, step), self._id(8, number, step, attempt)),
                    resource=self._process(connection, number),
                    attributes={"zbmd.step": step, "zbmd.flops": flops},
                    start_time=begin_ns,
                    end_time=begin_ns + wall_ns,
                    instrumentation_scope=self._scope,
                )

    def _operation_spans(self, connection: sqlite3.Connection) -> Iterator[Any]:
        cursor = connection.execute(
            "SELECT rowid, incarnation_id, step, track, name, category, begin_ns, duration_ns, bytes, "
            f"{_ATTEMPT} FROM gpu_timeline AS s WHERE rowid > ? ORDER BY rowid",
            (self._timeline_to,),
        )
        for rowid, number, step, track, name, category, begin_ns, duration_ns, nbytes, attempt in cursor:
            self._timeline_to = rowid
            trace_id = self._id(16, step)
            attributes: dict[str, object] = {
                "zbmd.step": step,
                "zbmd.track": track,
                "zbmd.category": category,
            }
            if nbytes is not None:
                attributes["zbmd.bytes"] = nbytes
            yield self._sdk.sdk_trace.ReadableSpan(
                name,
                context=self._context(trace_id, self._id(8, number, track, name, begin_ns)),
                parent=self._context(trace_id, self._id(8, number, step, attempt)),
                resource=self._process(connection, number),
                attributes=attributes,
                start_time=begin_ns,
                end_time=begin_ns + duration_ns,
                instrumentation_scope=self._scope,
            )

    def messages(self, capture: Path) -> Exported:
        """Send the messages in a capture: spans from their sending to their arrival.

        Their trace ids are those of the frames, so a question and all that follows from it are one trace.
        Raises `UserError`.
        """
        logs, problems = open_logs(capture, ())
        if not logs:
            raise UserError(f"{capture}: {'; '.join(problems) or 'there is no log of a process'}")
        offset_ns = {name: skew.offset_ns for name, skew in clock_offsets(logs).items()}
        links, sent = stream_names(logs), dict[tuple[str, bytes], int]()
        resources = {log.name: self._resource(**{"service.instance.id": log.name}) for log in logs}

        def spans() -> Iterator[Any]:
            for entry in merged_entries(logs):
                record, name = entry.record, entry.log.name
                at_ns = entry.wall_ns - offset_ns.get(name, 0)
                if isinstance(record, FrameOut):
                    sent[name, record.header] = at_ns
                    if len(sent) > UNMATCHED_MAX:
                        del sent[next(iter(sent))]
                elif isinstance(record, FrameIn):
                    declared = links.get((name, record.stream))
                    sender = "" if declared is None else declared.name
                    begin_ns = sent.pop((sender, record.frame[:HEADER_BYTES]), at_ns)
                    with contextlib.suppress(RemoteProtocolError):  # a damaged frame ended its link
                        yield self._message(record, sender, min(begin_ns, at_ns), at_ns, resources[name])

        return Exported(spans=self._send(self._spans, spans()))

    def _message(self, record: FrameIn, sender: str, begin_ns: int, end_ns: int, resource: Any) -> Any:
        header = unpack_header(record.frame)
        trace_id = header.trace_id or self._id(16, record.frame[:HEADER_BYTES])
        return self._sdk.sdk_trace.ReadableSpan(
            frame_name(record),
            context=self._context(trace_id, self._id(8, record.frame[:HEADER_BYTES])),
            resource=resource,
            attributes={
                "zbmd.sender": sender,
                "zbmd.bytes": header.payload_bytes,
                "zbmd.epoch": header.epoch,
            },
            kind=self._sdk.trace.SpanKind.CONSUMER,
            start_time=begin_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
        )

    # ---- logs and metrics

    def _event_logs(self, connection: sqlite3.Connection) -> Iterator[Any]:
        severities = self._sdk.logs.SeverityNumber
        rows = connection.execute(
            "SELECT identity, at_ns, kind, rank, incarnation, step, duration_ns, text FROM events "
            "ORDER BY at_ns"
        )
        for identity, at_ns, kind, rank, incarnation, step, duration_ns, text in rows:
            if identity in self._events:
                continue
            self._events.add(identity)
            number = severities.WARN if kind in WARNINGS else severities.INFO
            known = {"rank": rank, "incarnation": incarnation, "step": step, "duration_ns": duration_ns}
            attributes = {f"zbmd.{name}": value for name, value in known.items() if value is not None}
            record = self._sdk.logs.LogRecord(
                timestamp=at_ns,
                observed_timestamp=at_ns,
                trace_id=None if step is None else self._id(16, step),
                severity_number=number,
                severity_text=number.name,
                body=text,
                attributes={"zbmd.event": kind, **attributes},
                event_name=f"zbmd.{kind}",
            )
            yield self._sdk.sdk_logs.ReadableLogRecord(record, self._resource(), self._scope)

    def _metrics_data(self, measures: Sequence[Measure], began_ns: int) -> Any:
        points = self._sdk.points
        now_ns = time.time_ns()
        found = [self._metric(one, began_ns, now_ns) for one in measures if one.samples]
        scope = points.ScopeMetrics(scope=self._scope, metrics=found, schema_url="")
        resource = points.ResourceMetrics(resource=self._resource(), scope_metrics=[scope], schema_url="")
        return points.MetricsData(resource_metrics=[resource])

    def _metric(self, one: Measure, began_ns: int, now_ns: int) -> Any:
        points = self._sdk.points
        cumulative = points.AggregationTemporality.CUMULATIVE
        data: list[Any] = []
        for labels, value in one.samples:
            times = {"start_time_unix_nano": began_ns, "time_unix_nano": now_ns, "attributes": dict(labels)}
            if isinstance(value, Counts):
                bounds = {"bucket_counts": value.counts, "explicit_bounds": value.bounds}
                count = sum(value.counts)
                data.append(
                    points.HistogramDataPoint(
                        **times, **bounds, count=count, sum=value.total, min=None, max=None
                    )
                )
            else:
                data.append(points.NumberDataPoint(**times, value=value))
        match one.kind:
            case Kind.HISTOGRAM:
                shown = points.Histogram(data_points=data, aggregation_temporality=cumulative)
            case Kind.COUNTER:
                shown = points.Sum(data_points=data, aggregation_temporality=cumulative, is_monotonic=True)
            case Kind.GAUGE:
                shown = points.Gauge(data_points=data)
        unit = "s" if one.name.endswith("seconds") else "By" if one.name.endswith("bytes") else "1"
        return points.Metric(name=one.name, description=one.about, unit=unit, data=shown)


_ATTEMPT: Final = (
    "(SELECT count(*) FROM step_timing AS b WHERE b.incarnation_id = s.incarnation_id AND b.step = s.step "
    "AND b.begin_ns + b.wall_ns <= s.begin_ns)"
)
"""The number of times that the same process had ended the step before: it is repeated after a loss."""


def _batches(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    batch: list[ItemT] = []
    for item in items:
        batch.append(item)
        if len(batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
