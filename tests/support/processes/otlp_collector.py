"""An OTLP/HTTP collector: a process that decodes what it is sent, and adds each request to a file.

It prints its port, and writes a line of JSON for each request to the file that its argument names.
"""

from __future__ import annotations

import gzip
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1 import (  # pyright: ignore[reportMissingTypeStubs]
    logs_service_pb2,
)
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

REQUESTS: dict[str, Any] = {
    "/v1/traces": trace_service_pb2.ExportTraceServiceRequest,
    "/v1/metrics": metrics_service_pb2.ExportMetricsServiceRequest,
    "/v1/logs": logs_service_pb2.ExportLogsServiceRequest,
}


class Collector(BaseHTTPRequestHandler):
    """Takes what is posted."""

    def do_POST(self) -> None:
        kind = REQUESTS.get(self.path)
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if kind is None or self.headers["Content-Type"] != "application/x-protobuf":
            self.send_error(404)
            return
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        message = kind()
        message.ParseFromString(data)
        line = json.dumps({"path": self.path, "request": MessageToDict(message)})
        with Path(sys.argv[1]).open("a") as file:
            file.write(f"{line}\n")
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def main() -> None:
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
