"""`zbmd plan serve`: an HTTP server of the page, on the loopback interface unless told otherwise."""

from __future__ import annotations

import argparse
import ipaddress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Final, cast
from urllib.parse import parse_qsl, urlsplit

import msgspec

from zbmd.tools.cli.options import add_command
from zbmd.tools.plan.page.designs import OPTIONS, PRESETS, answer, design_text
from zbmd.transport.errors import UserError

HOST: Final = "127.0.0.1"
PORT: Final = 8765
QUERY_MAX: Final = 4_096
DESIGN_NAME: Final = "design.toml"
_POLICY: Final = (
    "default-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'"
)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET: the page, its presets, what follows from a design, and the design as a file."""

    protocol_version = "HTTP/1.1"
    timeout = 30.0

    def do_GET(self) -> None:
        """Answer one request."""
        asked = urlsplit(self.path)
        bound = cast("tuple[str, int]", self.server.server_address)[0]
        if not _is_ours(self.headers.get("Host", ""), bound):
            # A page of another site, whose name was made to mean this host, is to read nothing here.
            self._send(HTTPStatus.FORBIDDEN, b"expected this server's own address as Host\n", "text/plain")
            return
        try:
            if len(asked.query) > QUERY_MAX:
                raise UserError(f"expected a query of at most {QUERY_MAX} characters, got {len(asked.query)}")
            given = dict(parse_qsl(asked.query, keep_blank_values=True))
            match asked.path:
                case "/":
                    page = (files("zbmd.tools.plan.page") / "page.html").read_bytes()
                    self._send(HTTPStatus.OK, page, "text/html; charset=utf-8")
                case "/presets":
                    self._json({"options": OPTIONS, "presets": PRESETS})
                case "/answer":
                    self._json(answer(given))
                case "/design":
                    text = design_text(answer(given)).encode()
                    self._send(HTTPStatus.OK, text, "application/toml", file=DESIGN_NAME)
                case _:
                    words = b"expected /, /presets, /answer or /design\n"
                    self._send(HTTPStatus.NOT_FOUND, words, "text/plain")
        except UserError as error:
            self._json({"error": str(error)}, HTTPStatus.BAD_REQUEST)

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, msgspec.json.encode(value), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, *, file: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        if file:
            self.send_header("Content-Disposition", f'attachment; filename="{file}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: one user moves sliders."""


def _is_ours(host: str, bound: str) -> bool:
    """Return whether a request names this server: by its address, or a name if it is not on loopback."""
    name = urlsplit(f"//{host}").hostname or ""
    if name in ("localhost", bound):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return not ipaddress.ip_address(bound).is_loopback and bool(name)
    return True


def page_server(host: str, port: int) -> ThreadingHTTPServer:
    """Return a server that is bound. port: 0 for any free one. Raises `UserError` if it is not free."""
    try:
        return ThreadingHTTPServer((host, port), _Handler)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Give another --port, or 0 for any."
        ) from error
    except OverflowError:
        raise UserError(f"--port: expected 0 to 65535, got {port}") from None


def add_serve(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the planners of `zbmd plan`."""
    made = add_command(
        kinds,
        "serve",
        "both planners as a page, with sliders and a design to save",
        examples=("zbmd plan serve", "zbmd plan serve --port 0"),
    )
    made.add_argument("--host", default=HOST, metavar="ADDRESS", help="to listen on (default: %(default)s)")
    made.add_argument(
        "--port", type=int, default=PORT, metavar="N", help="0: any that is free (default: %(default)s)"
    )
    made.set_defaults(run_command=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    with page_server(arguments.host, arguments.port) as server:
        host, port = server.server_address[:2]
        print(f"the planners are at http://{host!s}:{port}/ (Ctrl-C ends)", flush=True)
        server.serve_forever()
    return 0
