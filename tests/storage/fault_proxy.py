"""A proxy before a real S3 server that breaks some of what passes through it.

Requests go on as they are, with the `Host` that the client has signed. Faults hit the next requests
that match, as those of the fake do.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import fake_s3

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("reset", "503", "slow", "truncated", "lost")
_SLICE_BYTES = 1 << 16


@contextlib.contextmanager
def before(endpoint: str) -> Iterator[fake_s3.Server]:
    """A proxy on loopback; of the state only the endpoint, the faults and what was asked count."""
    state = fake_s3.Server()

    class Bound(_Handler):
        server_state = state
        behind = urlsplit(endpoint).netloc

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
    try:
        yield state
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: fake_s3.Server
    behind: str

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        key, span = unquote(parts.path), self.headers.get("range", "")
        fault = self.server_state.struck(self.command, key, parts.query)
        self.server_state.asked.append(fake_s3.Asked(self.command, key, parts.query, fault, span))
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if fault == "reset":
            return fake_s3.reset(self)
        if fault == "503":
            return self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>", fault)
        status, headers, answer = self._passed_on(body)
        if fault == "lost":
            return fake_s3.reset(self)
        return self._answer(status, headers, answer, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

    def _passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        server = http.client.HTTPConnection(self.behind, timeout=60)
        with contextlib.closing(server):
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                server.putheader(name, value)
            server.endheaders(body or None)
            reply = server.getresponse()
            return reply.status, reply.getheaders(), reply.read()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, fault: str) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if self.command == "HEAD" and name.lower() == "content-length":
                length = value
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault == "truncated":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        step = _SLICE_BYTES if fault == "slow" else max(len(body), 1)
        for start in range(0, len(body), step):
            self.wfile.write(body[start : start + step])
            self.wfile.flush()
            if fault == "slow":
                time.sleep(0.01)  # that is what is slow about it
