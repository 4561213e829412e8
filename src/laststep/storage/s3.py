"""Multipart uploads of an S3 bucket, part by part in any order: what obstore does not offer.

obstore numbers parts in the order in which it is given them, and the header of a data file, which
is its beginning, is known last. So these five requests are made here: over `http.client`, which
sends straight from the memory that it is handed. Where obstore alone has the keys to sign them
with, `of_bucket` is None. No error of this module quotes an answer beyond its status and code.

Safe to use from several threads: each request has a connection of its own while it lasts.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import re
import ssl
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qs, quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec
import obstore

from laststep.storage.bucket import TOKEN, Missing, is_transient
from laststep.storage.retrying import Trouble, persist
from laststep.storage.signing import authorization, known_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.storage.bucket import Bucket
    from laststep.storage.signing import Keys

_Result = TypeVar("_Result")

_UNSIGNED = "UNSIGNED-PAYLOAD"
_ANSWER_BYTES = 1 << 20
_KEPT_CONNECTIONS = 32
_UPLOAD = re.compile(r"<Upload>.*?</Upload>", re.DOTALL)


class _Answer(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    text: str

    def field(self, name: str, text: str | None = None) -> str:
        """What stands between the tags of that name; "" where there are none."""
        found = re.search(rf"<{name}>([^<]*)</{name}>", self.text if text is None else text)
        if found is None:
            return ""
        return found[1].replace("&quot;", '"').replace("&lt;", "<").replace("&amp;", "&")


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
                raise Trouble(answer.field("Code"), transient=True)
            return True

        return self._persist("make durable", key, attempt)

    def abort(self, key: str, upload: str) -> None:
        """Give an upload up; one that is gone is fine."""

        def attempt() -> None:
            with contextlib.suppress(Missing):
                self._send("DELETE", key, {"uploadId": upload})

        self._persist("give up", key, attempt)

    def pending(self, prefix: str) -> list[tuple[str, str]]:
        """Keys and names of the first thousand uploads below `prefix/` that nobody has ended."""

        def attempt() -> list[tuple[str, str]]:
            answer = self._send("GET", "", {"uploads": "", "prefix": f"{prefix}/"})
            uploads = _UPLOAD.findall(answer.text)
            return [(answer.field("Key", u), answer.field("UploadId", u)) for u in uploads]

        found = self._persist("list uploads", prefix, attempt)
        return [(key, upload) for key, upload in found if key.startswith(f"{prefix}/")]

    def _persist(self, what: str, key: str, attempt: Callable[[], _Result]) -> _Result:
        bucket = self._bucket
        return persist(attempt, what=what, where=bucket.where(key), patience=bucket.patience)

    def _send(
        self, method: str, key: str, query: Mapping[str, str], data: memoryview | None = None, *,
        headers: Mapping[str, str] | None = None,
    ) -> _Answer:  # fmt: skip
        """One request; `Missing`, `_Taken`, or `Trouble` for an answer that is not a success."""
        path = f"{self._path}/{quote(key, safe='/-._~')}" if key else self._path or "/"
        asked = "&".join(f"{name}={quote(query[name], safe='-._~')}" for name in sorted(query))
        signed = self._signed(method, path, asked, headers or {})
        signed["content-length"] = str(0 if data is None else data.nbytes)
        connection = self._idle.pop() if self._idle else self._connected()
        # To complete an upload takes a server long, before it says anything.
        patience = self._bucket.patience
        connection.timeout = patience.request_s if method == "POST" else patience.idle_s
        try:
            if connection.sock is not None:
                connection.sock.settimeout(connection.timeout)
            connection.request(method, f"{path}?{asked}", body=data, headers=signed)
            reply = connection.getresponse()
            text = reply.read(_ANSWER_BYTES).decode(errors="replace")
            complete = reply.isclosed()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            why = type(error).__name__
        else:
            if complete and not reply.will_close and len(self._idle) < _KEPT_CONNECTIONS:
                self._idle.append(connection)
            else:
                connection.close()
            names = {name.lower(): value for name, value in reply.getheaders()}
            return _checked(_Answer(reply.status, names, text))
        raise Trouble(f"the connection failed: {why}", transient=True)

    def _connected(self) -> http.client.HTTPConnection:
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
    signed = urlsplit(obstore.sign(bucket.client, "GET", "x", dt.timedelta(seconds=1)))
    if signed.scheme in getproxies() and not proxy_bypass(signed.hostname or ""):
        return None
    region = parse_qs(signed.query)["X-Amz-Credential"][0].split("/")[2]
    base = f"{signed.scheme}://{signed.netloc}{signed.path.removesuffix('/x')}"
    return Uploads(bucket, base, region, keys)


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


class _Taken(Exception):
    """The name of an upload is taken."""


def _checked(answer: _Answer) -> _Answer:
    if 200 <= answer.status < 300:
        return answer
    if answer.status == 404:
        raise Missing
    if answer.status == 412:
        raise _Taken
    code = answer.field("Code")
    code = code if code.isalnum() and len(code) <= 64 else ""
    raise Trouble(f"{answer.status} {code}".strip(), transient=is_transient(answer.status, code))
