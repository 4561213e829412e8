"""Multipart uploads of an S3 bucket, part by part in any order: what obstore does not offer.

obstore numbers parts in the order in which it is given them, and the header of a data file, which
is its beginning, is known last. So these five requests are made here: over `http.client`, which
sends straight from the memory that it is handed. Where obstore alone has the keys to sign them
with, `of_bucket` is None. No error of this module quotes an answer beyond its status and code.

Safe to use from several threads: each request has a connection of its own while it lasts.

Keys are those of the environment, or what botocore finds; no repr shows them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import hashlib
import hmac
import html
import http.client
import importlib
import os
import re
import select
import ssl
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from laststep.storage.bucket import TOKEN, Missing, Trouble, persist, trouble_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from laststep.storage.bucket import Bucket


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are signed with."""

    name: str
    secret: str
    session: str | None

    def __repr__(self) -> str:
        return "Keys(…)"


def known_keys() -> Callable[[], Keys] | None:
    """What tells the keys that count now; None where only obstore can have some."""
    name, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if name and secret:
        session = os.environ.get("AWS_SESSION_TOKEN") or None
        keys = Keys(name=name, secret=secret, session=session)
        return lambda: keys
    try:
        botocore: Any = importlib.import_module("botocore.session")
    except ImportError:
        return None
    found = botocore.get_session().get_credentials()

    def frozen() -> Keys:
        now = found.get_frozen_credentials()
        return Keys(name=now.access_key, secret=now.secret_key, session=now.token)

    return None if found is None else frozen


def authorization(keys: Keys, region: str, request: str, headers: Mapping[str, str]) -> str:
    """The header that signs a request, its method, path and query on three lines, and `headers`."""
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in sorted(headers))
    canonical = f"{request}\n{lines}\n{names}\n{headers['x-amz-content-sha256']}"
    date = headers["x-amz-date"]
    scope = f"{date[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    told = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{digest}"
    signature = hmac.digest(key, told.encode(), "sha256").hex()
    return (
        f"AWS4-HMAC-SHA256 Credential={keys.name}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )


_Result = TypeVar("_Result")

_UNSIGNED = "UNSIGNED-PAYLOAD"
_ANSWER_BYTES = 8 << 20
_SENT_BYTES = 1 << 18
"""What must be taken before a standstill counts: a timeout is for all of a send."""
_KEPT_CONNECTIONS = 32
_UPLOAD = re.compile(r"<Upload>.*?</Upload>", re.DOTALL)


class _Answer(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    text: str

    def field(self, name: str, text: str | None = None) -> str:
        """What stands between the tags of that name; "" where there are none."""
        found = re.search(rf"<{name}>([^<]*)</{name}>", self.text if text is None else text)
        return "" if found is None else html.unescape(found[1])


class Uploads:
    """The multipart uploads of one bucket."""

    def __init__(self, bucket: Bucket, base: str, region: str, keys: Callable[[], Keys]) -> None:
        self._bucket = bucket
        self._region = region
        self._keys = keys
        parts = urlsplit(base)
        self._host, self._path, self._secure = parts.netloc, parts.path, parts.scheme == "https"
        self._idle: list[http.client.HTTPConnection] = []
        weakref.finalize(self, _close_all, self._idle)
        self._tls = ssl.create_default_context() if self._secure else None

    def begin(self, key: str, token: str) -> str:
        """Begin an upload, and return its name."""

        def attempt() -> str:
            headers = {f"x-amz-meta-{TOKEN}": token}
            name = self._send("POST", key, {"uploads": ""}, headers=headers).field("UploadId")
            if not name:
                raise Trouble("an upload without a name", transient=False)
            return name

        return self._persist("begin to write", key, attempt)

    def put(self, key: str, upload: str, number: int, data: memoryview) -> str:
        """Upload one part, and return its tag."""
        query = {"partNumber": str(number), "uploadId": upload}

        def attempt() -> str:
            answer = self._send("PUT", key, query, data)
            if "etag" not in answer.headers:
                raise Trouble("a part without a tag", transient=True)
            return answer.headers["etag"]

        return self._persist("write", key, attempt)

    def complete(self, key: str, upload: str, tags: Sequence[str], token: str) -> bool:
        """Make the object of its parts; False where its name is taken by another one."""
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = memoryview(f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode())

        tries = 0

        def attempt() -> bool:
            nonlocal tries
            tries += 1
            try:
                # `If-None-Match`: servers that do not know it here ignore it.
                answer = self._send(
                    "POST", key, {"uploadId": upload}, body, headers={"if-none-match": "*"}
                )
            except (Missing, _Taken):
                there = self._bucket.head(key)  # ours, where only the answer got lost
                if there is None:  # an earlier try may still be at work there
                    raise Trouble("the upload is gone", transient=tries > 1) from None
                return there.token == token
            if "<Error>" in answer.text:  # sent after the status, which was 200 by then
                raise Trouble(trouble_of(200, answer.field("Code")).found, transient=True)
            return True

        return self._persist("make durable", key, attempt)

    def abort(self, key: str, upload: str) -> None:
        """Give an upload up; one that is gone is fine."""

        def attempt() -> None:
            with contextlib.suppress(Missing):
                self._send("DELETE", key, {"uploadId": upload})

        self._persist("give up", key, attempt)

    def pending(self, prefix: str) -> list[tuple[str, str]]:
        """Keys and names of the uploads below `prefix/` that nobody has ended."""
        query = {"uploads": "", "prefix": f"{prefix}/"}
        found: list[tuple[str, str]] = []
        while True:
            ask = functools.partial(self._send, "GET", "", query)
            answer = self._persist("list uploads", prefix, ask)
            uploads = _UPLOAD.findall(answer.text)
            found += [(answer.field("Key", u), answer.field("UploadId", u)) for u in uploads]
            last = {
                "key-marker": answer.field("NextKeyMarker"),
                "upload-id-marker": answer.field("NextUploadIdMarker"),
            }
            if answer.field("IsTruncated") != "true" or last.items() <= query.items():
                return [upload for upload in found if upload[0].startswith(f"{prefix}/")]
            query = {**query, **last}

    def _persist(self, what: str, key: str, attempt: Callable[[], _Result]) -> _Result:
        bucket = self._bucket

        def told() -> _Result:
            try:
                return attempt()
            except Missing as missing:
                code = str(missing)
            raise trouble_of(404, code)

        return persist(told, what=what, where=bucket.where(key), patience=bucket.patience)

    def _send(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        data: memoryview | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> _Answer:
        """One request; `Missing`, `_Taken`, or `Trouble` for an answer that is not a success."""
        path = f"{self._path}/{quote(key, safe='/-._~')}" if key else self._path or "/"
        asked = "&".join(f"{name}={quote(query[name], safe='-._~')}" for name in sorted(query))
        signed = self._signed(method, path, asked, headers or {})
        signed["content-length"] = str(0 if data is None else data.nbytes)
        connection = self._connected()
        patience = self._bucket.patience
        try:
            connection.timeout = patience.idle_s
            if connection.sock is not None:
                connection.sock.settimeout(patience.idle_s)
            sent = None if data is None else _slices(data)
            connection.request(method, f"{path}?{asked}", body=sent, headers=signed)
            # What is on its way still has to arrive, and to complete an upload takes long.
            connection.sock.settimeout(patience.request_s)
            reply = connection.getresponse()
            text = reply.read(_ANSWER_BYTES).decode(errors="replace")
            if reply.length or not reply.isclosed():
                raise http.client.IncompleteRead(b"")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            _close_all(self._idle)  # which are older, and would fail one after the other
            why = type(error).__name__
        else:
            if not reply.will_close and len(self._idle) < _KEPT_CONNECTIONS:
                self._idle.append(connection)
            else:
                connection.close()
            names = {name.lower(): value for name, value in reply.getheaders()}
            return _checked(_Answer(reply.status, names, text))
        raise Trouble(f"the connection failed: {why}", transient=True)

    def _connected(self) -> http.client.HTTPConnection:
        """A connection that was kept and that the server has not closed, or a new one."""
        with contextlib.suppress(IndexError):  # another thread may take the last
            while True:
                connection = self._idle.pop()
                news = select.poll()
                news.register(connection.sock, select.POLLIN)
                if not news.poll(0):
                    return connection
                connection.close()
        if self._tls is None:
            return http.client.HTTPConnection(self._host)
        return http.client.HTTPSConnection(self._host, context=self._tls)

    def _signed(
        self, method: str, path: str, asked: str, extra: Mapping[str, str]
    ) -> dict[str, str]:
        now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {
            "host": self._host,
            "x-amz-content-sha256": _UNSIGNED,
            "x-amz-date": now,
            **extra,
        }
        keys = self._keys()
        if keys.session is not None:
            headers["x-amz-security-token"] = keys.session
        request = f"{method}\n{path}\n{asked}"
        headers["authorization"] = authorization(keys, self._region, request, headers)
        return headers


def of_bucket(bucket: Bucket) -> Uploads | None:
    """What makes uploads in a bucket; None where it is none of S3, its keys are not known here, or
    a proxy stands between. Where the bucket is, is told by a URL that obstore signs: so all its
    settings count here too."""
    keys = known_keys() if bucket.scheme == "s3" else None
    if keys is None:
        return None
    signed = urlsplit(bucket.signed())
    if signed.scheme in getproxies() and not proxy_bypass(signed.hostname or ""):
        return None
    region = parse_qs(signed.query)["X-Amz-Credential"][0].split("/")[2]
    base = f"{signed.scheme}://{signed.netloc}{signed.path.removesuffix('/x')}"
    return Uploads(bucket, base, region, keys)


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            connections.pop().close()


def _slices(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, _SENT_BYTES):
        with data[start : start + _SENT_BYTES] as piece:
            yield piece


class _Taken(Exception):
    """The name of an upload is taken."""


def _checked(answer: _Answer) -> _Answer:
    if 200 <= answer.status < 300:
        return answer
    if answer.status == 404:
        raise Missing(answer.field("Code"))
    if answer.status == 412:
        raise _Taken
    raise trouble_of(answer.status, answer.field("Code"))
