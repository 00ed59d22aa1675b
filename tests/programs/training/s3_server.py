"""An S3-compatible server at a port of its own, which it prints; with a bucket `bucket`; ends with its stdin.

argv: port (0: any), and what it does: `well`, `dies:N` at the N-th part of an upload, `refuses:N` requests,
or `slow`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import urllib.request
from typing import Any

from werkzeug.serving import make_server

port, (mode, _, number) = int(sys.argv[1]), sys.argv[2].partition(":")
moto: Any = importlib.import_module("moto.moto_server.werkzeug_app")
served: Any = moto.DomainDispatcherApplication(moto.create_backend_app)
left, lock, is_open = int(number or 0), threading.Lock(), False


def app(environ: dict[str, Any], start_response: Any) -> Any:
    global left
    if not is_open:
        return served(environ, start_response)
    if mode == "dies" and "partNumber=" in environ["QUERY_STRING"]:
        with lock:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    if mode == "refuses":
        with lock:
            left -= 1
            if left >= 0:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("403 Forbidden", [("Content-Length", "0")])
                return []
    if mode == "slow":
        threading.Event().wait(0.1)  # no test depends on how slow it is
    return served(environ, start_response)


server = make_server("127.0.0.1", port, app, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
bucket = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/bucket", method="PUT")
urllib.request.urlopen(bucket).close()
is_open = True
print(server.server_port, flush=True)
sys.stdin.read()
server.shutdown()
