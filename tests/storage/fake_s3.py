"""A small S3 server that can be told to misbehave: for faults that a real one has seldom.

It keeps objects in memory, counts what it is asked, checks no signature, and lacks or breaks what a
test says. Faults hit the next requests that match, so many times.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


PAGE = 1000
"""What a list has at most in one answer."""
SLOW_S = 0.4


@dataclass
class Kept:
    """An object."""

    data: bytes
    meta: dict[str, str]
    made: float

    @property
    def tag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'  # noqa: S324 (that is what servers say)


@dataclass
class Asked:
    """A request, as it was answered."""

    method: str
    key: str
    query: str
    who: str
    """The name of the key that signed it."""
    span: str
    """The range that was asked for."""
    sent_bytes: int = 0

    @property
    def lists(self) -> bool:
        return self.method == "GET" and "list-type" in self.query


@dataclass
class Fault:
    """What happens to the next requests of a kind."""

    kind: str
    """reset, lost (done, but nobody is told), 503, 409, truncated, stalled, denied, held (until
    `released`, and then reset), absent (there is no such bucket), redirect (it is in another
    region), slow (takes a body a MiB at a time), html (a page with status 200)"""
    method: str
    times: int
    key: str = ""
    query: str = ""
    after: int = 0
    """So many matching requests pass first."""


@dataclass
class Server:
    """What a test sees of it."""

    endpoint: str = ""
    lacks: set[str] = field(default_factory=set)
    """Of: if-none-match, if-match, range, list."""
    faults: list[Fault] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    objects: dict[str, Kept] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = field(default_factory=dict)
    mutex: threading.RLock = field(default_factory=threading.RLock)
    released: threading.Event = field(default_factory=threading.Event)
    """Lets those answers end that are stalled or held."""
    holding: threading.Event = field(default_factory=threading.Event)
    """Set when a request is held."""
    connections: list[socket.socket] = field(default_factory=list)

    def fail(
        self,
        kind: str,
        method: str,
        times: int = 1,
        *,
        key: str = "",
        query: str = "",
        after: int = 0,
    ) -> None:
        self.faults.append(Fault(kind, method, times, key, query, after))

    def hang_up(self) -> None:
        """Close the connections that clients keep for their next requests."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def struck(self, method: str, key: str, query: str) -> str:
        """The fault that hits this request; "" for none."""
        with self.mutex:
            for fault in self.faults:
                if (
                    fault.times
                    and fault.method in (method, "*")
                    and fault.key in key
                    and fault.query in query
                ):
                    if fault.after:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault.kind
        return ""


@contextlib.contextmanager
def running() -> Iterator[Server]:
    """A server on loopback."""
    state = Server()

    class Bound(_Handler):
        server_state = state

    http = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    http.daemon_threads = True
    # What is sent has to be taken, and does not lie about in the system.
    http.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.endpoint = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield state
    finally:
        state.released.set()
        http.shutdown()
        http.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server_state.connections.append(self.connection)

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def _handle(self) -> None:
        state = self.server_state
        parts = urlsplit(self.path)
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        fault = state.struck(self.command, key, parts.query)
        signer = re.search(r"Credential=([^/]+)", self.headers.get("authorization", ""))
        who = "" if signer is None else signer[1]
        span = self.headers.get("range", "")
        self.asked = Asked(self.command, key, parts.query, who, span)
        with state.mutex:
            state.asked.append(self.asked)
        body = self._body(int(self.headers.get("content-length", 0)), slow=fault == "slow")
        if fault == "409":
            return self._answer(409, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
        if fault == "absent":
            return self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        if fault == "redirect":
            return self._answer(301, b"<Error><Code>PermanentRedirect</Code></Error>")
        if fault == "html":
            return self._answer(200, b"<html><body>Please sign in</body></html>")
        if fault == "503":
            return self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
        if fault == "denied":
            return self._answer(
                403,
                b"<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>"
                + who.encode()
                + b"</AWSAccessKeyId><StringToSign>"
                + self.headers["authorization"].encode()
                + b"</StringToSign></Error>",
            )
        if fault == "held":
            state.holding.set()
            state.released.wait(60)
        if fault in ("reset", "held"):
            return reset(self)
        self.broken = fault
        with state.mutex:
            answer = self._done(state, key, parse_qs(parts.query, keep_blank_values=True), body)
        if fault == "lost":
            return reset(self)
        return self._answer(*answer)

    def _body(self, size: int, *, slow: bool) -> bytes:
        if not slow:
            return self.rfile.read(size)
        body = bytearray()
        while len(body) < size:
            time.sleep(SLOW_S)  # that is what is slow about it
            if not (more := self.rfile.read(min(1 << 20, size - len(body)))):
                raise ConnectionAbortedError
            body += more
        return bytes(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

    def _done(
        self, state: Server, key: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        meta = {k.lower(): v for k, v in self.headers.items() if k.lower().startswith("x-amz-meta")}
        if "delete" in query:
            names = re.findall(r"<Key>[^<]*</Key>", body.decode())
            for name in names:
                state.objects.pop(name[5:-6], None)
            deleted = "".join(f"<Deleted>{name}</Deleted>" for name in names)
            return 200, f"<DeleteResult>{deleted}</DeleteResult>".encode(), {}
        if "uploads" in query or "uploadId" in query:
            return self._multipart(state, key, query, body, meta)
        if self.command == "PUT":
            there = state.objects.get(key)
            if (
                self.headers.get("if-none-match")
                and there is not None
                and "if-none-match" not in state.lacks
            ):
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
            wanted = self.headers.get("if-match")
            if wanted and there is None and "if-match" not in state.lacks:
                return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}  # as Amazon does
            if (
                wanted
                and there is not None
                and there.tag != wanted
                and "if-match" not in state.lacks
            ):
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
            state.objects[key] = kept = Kept(body, meta, time.time())
            return 200, b"", {"ETag": kept.tag}
        if self.command == "DELETE":
            state.objects.pop(key, None)
            return 204, b"", {}
        if not key or "list-type" in query:
            return 200, _listed(state, query), {"Content-Type": "application/xml"}
        return self._got(state, key)

    def _got(self, state: Server, key: str) -> tuple[int, bytes, dict[str, str]]:
        kept = state.objects.get(key)
        if kept is None:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        headers = {
            **kept.meta,
            "ETag": kept.tag,
            "Last-Modified": formatdate(kept.made, usegmt=True),
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if span is None or "range" in state.lacks:
            return 200, kept.data, headers
        low, high = int(span[1]), min(int(span[2]) + 1, len(kept.data))
        headers["Content-Range"] = f"bytes {low}-{high - 1}/{len(kept.data)}"
        return 206, kept.data[low:high], headers

    def _multipart(
        self,
        state: Server,
        key: str,
        query: dict[str, list[str]],
        body: bytes,
        meta: dict[str, str],
    ) -> tuple[int, bytes, dict[str, str]]:
        name = query.get("uploadId", [""])[0]
        if self.command == "GET":
            return 200, _uploads_listed(state, query), {}
        if "uploads" in query:
            name = f"u{len(state.asked)}"
            state.uploads[name] = key, meta, {}
            return 200, f"<R><UploadId>{name}</UploadId></R>".encode(), {}
        if name not in state.uploads:
            return 404, b"<Error><Code>NoSuchUpload</Code></Error>", {}
        if self.command == "PUT":
            state.uploads[name][2][int(query["partNumber"][0])] = body
            return 200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}  # noqa: S324
        _, begun_with, pieces = state.uploads.pop(name)
        if self.command == "POST":
            data = b"".join(pieces[number] for number in sorted(pieces))
            state.objects[key] = Kept(data, begun_with, time.time())
            tag = escape(state.objects[key].tag)
            return (
                200,
                f"<CompleteMultipartUploadResult><ETag>{tag}</ETag>"
                "</CompleteMultipartUploadResult>".encode(),
                {},
            )
        return 204, b"", {}

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        broken = getattr(self, "broken", "")
        if broken in ("truncated", "stalled"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if broken == "stalled":
                self.server_state.released.wait(60)
            self.close_connection = True
            return
        self.asked.sent_bytes = len(body)  # before the client has it, and counts
        self.wfile.write(body)


def reset(handler: BaseHTTPRequestHandler) -> None:
    """Close so that the other side sees a reset."""
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.close_connection = True
    handler.connection.close()


def _listed(state: Server, query: dict[str, list[str]]) -> bytes:
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    keys = [] if "list" in state.lacks else sorted(k for k in state.objects if k.startswith(prefix))
    keys = [k for k in keys if k > query.get("continuation-token", [""])[0]]
    rest, keys = keys[PAGE:], keys[:PAGE]
    direct = [k for k in keys if not delimiter or delimiter not in k[len(prefix) :]]
    folders = sorted(
        {prefix + k[len(prefix) :].partition("/")[0] + "/" for k in {*keys} - {*direct}}
    )
    more = f"<NextContinuationToken>{escape(keys[-1])}</NextContinuationToken>" if rest else ""
    contents = "".join(
        f"<Contents><Key>{escape(k)}</Key><Size>{len(state.objects[k].data)}</Size>"
        f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(state.objects[k].tag)}</ETag></Contents>"
        for k in direct
    )
    prefixes = "".join(
        f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders
    )
    return (
        f'<?xml version="1.0"?><ListBucketResult><IsTruncated>{str(bool(rest)).lower()}'
        f"</IsTruncated>{more}{contents}{prefixes}</ListBucketResult>"
    ).encode()


def _uploads_listed(state: Server, query: dict[str, list[str]]) -> bytes:
    prefix = query.get("prefix", [""])[0]
    last = query.get("key-marker", [""])[0], query.get("upload-id-marker", [""])[0]
    found = sorted((k, u) for u, (k, _, _) in state.uploads.items() if k.startswith(prefix))
    found = [upload for upload in found if upload > last]
    rest, found = found[PAGE:], found[:PAGE]
    listed = "".join(
        f"<Upload><Key>{escape(k)}</Key><UploadId>{u}</UploadId></Upload>" for k, u in found
    )
    if rest:
        key, name = found[-1]
        listed += f"<IsTruncated>true</IsTruncated><NextKeyMarker>{escape(key)}</NextKeyMarker>"
        listed += f"<NextUploadIdMarker>{name}</NextUploadIdMarker>"
    return f"<ListMultipartUploadsResult>{listed}</ListMultipartUploadsResult>".encode()


@contextlib.contextmanager
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that the usual variables name, and that nobody has probed yet."""
    with running() as state:
        monkeypatch.setattr("laststep.storage.objects._probed", set())
        for name, value in {
            "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": "hidden-from-all",
            "AWS_ENDPOINT_URL": state.endpoint,
            "AWS_REGION": "x",
        }.items():
            monkeypatch.setenv(name, value)
        yield state
