"""A server of objects at a port of its own, which it prints; with a bucket `bucket`; ends with its stdin.

argv: port (0: any); what it does: `well`, `dies:N` at the N-th part of an upload, with its process group,
`drops:N` connections in the middle of a part, `refuses:N` requests, or `slow`; for Azure, the command of
Azurite, to which it passes requests. The default is moto: S3, and the requests of Google Cloud Storage's
XML API that are those of S3.
"""

from __future__ import annotations

import base64
import hmac
import http.client
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from email.utils import formatdate
from typing import Any

from werkzeug.serving import make_server


class Azurite:
    """Azurite, with the account of the environment."""

    def __init__(self, command: str) -> None:
        self.account = os.environ["AZURE_STORAGE_ACCOUNT_NAME"]
        self.key = os.environ["AZURE_STORAGE_ACCOUNT_KEY"]
        options = ["--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry", "--silent"]
        self.process = subprocess.Popen(
            [command, *options, "--skipApiVersionCheck"],  # the library's version may be newer
            env={**os.environ, "AZURITE_ACCOUNTS": f"{self.account}:{self.key}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        found = (re.search(r"listens on http://127\.0\.0\.1:(\d+)", line) for line in lines)
        self.port = next(int(match[1]) for match in found if match is not None)

    def bucket(self, url: str) -> urllib.request.Request:
        """Return the signed request that makes the container."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        listed = "".join(f"{name}:{value}\n" for name, value in headers.items())
        text = "PUT" + "\n" * 12 + f"{listed}/{self.account}/{self.account}/bucket\nrestype:container"
        mac = base64.b64encode(hmac.digest(base64.b64decode(self.key), text.encode(), "sha256")).decode()
        headers["Authorization"] = f"SharedKey {self.account}:{mac}"
        target = f"{url}/{self.account}/bucket?restype=container"
        return urllib.request.Request(target, method="PUT", headers=headers)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        """Pass a request on, as it is: it is signed."""
        sent = {
            name.removeprefix("HTTP_").replace("_", "-"): value
            for name, value in environ.items()
            if name.startswith("HTTP_") or (name in ("CONTENT_TYPE", "CONTENT_LENGTH") and value)
        }
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        passed = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            passed.request(environ["REQUEST_METHOD"], environ["RAW_URI"], body, sent)
            reply = passed.getresponse()
            data = reply.read()
        finally:
            passed.close()
        about = [
            (k, v) for k, v in reply.getheaders() if k.lower() not in ("connection", "transfer-encoding")
        ]
        if environ["REQUEST_METHOD"] != "HEAD" and reply.headers["Content-Length"] is None:
            about.append(("Content-Length", str(len(data))))
        start_response(f"{reply.status} {reply.reason}", about)
        return [data]


class Moto:
    """moto, for any account."""

    def __init__(self) -> None:
        moto: Any = importlib.import_module("moto.moto_server.werkzeug_app")
        self._served: Any = moto.DomainDispatcherApplication(moto.create_backend_app)

    def bucket(self, url: str) -> urllib.request.Request:
        """Return the request that makes the bucket."""
        return urllib.request.Request(f"{url}/bucket", method="PUT")

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        return self._served(environ, start_response)


port, (mode, _, number) = int(sys.argv[1]), sys.argv[2].partition(":")
served: Azurite | Moto = Azurite(sys.argv[3]) if len(sys.argv) > 3 else Moto()
left, lock, is_open = int(number or 0), threading.Lock(), False


def app(environ: dict[str, Any], start_response: Any) -> Any:
    global left
    if not is_open:
        return served(environ, start_response)
    if mode in ("dies", "drops") and re.search("partNumber=|blockid=", environ["QUERY_STRING"]):
        with lock:
            left -= 1
            if left == 0 and mode == "dies":
                os.killpg(0, signal.SIGKILL)
            dropped = left >= 0 and mode == "drops"
        if dropped:
            environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]) // 2)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
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


try:
    server = make_server("127.0.0.1", port, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlopen(served.bucket(f"http://127.0.0.1:{server.server_port}")).close()
    is_open = True
    print(server.server_port, flush=True)
    sys.stdin.read()
    server.shutdown()
finally:
    if isinstance(served, Azurite):
        served.process.kill()
        served.process.communicate()
