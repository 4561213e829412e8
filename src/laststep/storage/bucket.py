"""The objects of one bucket, over obstore: each call is tried again, and tells no secrets.

Knows keys, bytes and the two conditions that everything else rests on: put a name only if it is
free, and replace an object only if it is still the one that was read. An answer may get lost on its
way, and the second try then finds what the first one made, so every object carries a random token
by which its maker knows it again. Errors of obstore quote answers of servers, which may quote keys:
what is told of them is picked word by word.

Safe to use from several threads. Not in a forked process: the threads that obstore works with stay
in its parent, and a call would wait for them for ever.

Requests are tried again with growing pauses until a deadline (`persist`). `Trouble` says what was
found, in words without keys or signatures: they end in errors and logs.
"""

from __future__ import annotations

import contextvars
import datetime as dt
import math
import os
import random
import re
import secrets
import time
from typing import IO, TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from laststep.errors import CorruptError, StorageError, UsageError
from laststep.storage.files import refuse_secrets
from laststep.storage.store import check_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config


_Result = TypeVar("_Result")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_LOOK = "look at the server and at the network, and try again"


_until: contextvars.ContextVar[float] = contextvars.ContextVar("_until", default=math.inf)
"""When the request ends that this one is a part of."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a server is waited for."""

    deadline_s: float = 300.0
    """For one request, with all that is tried again, and asked meanwhile; the last try may end up
    to `request_s` later."""
    request_s: float = 120.0
    """For one request, with its body."""
    idle_s: float = 20.0
    """For the next bytes of one."""


class Trouble(Exception):
    """One try failed; `transient` says that the next may not."""

    def __init__(
        self, found: str, *, transient: bool, expected: str | None = None, remedy: str = _LOOK
    ) -> None:
        super().__init__(found)
        self.found = found
        self.transient = transient
        self.expected = expected
        self.remedy = remedy


def persist(
    attempt: Callable[[], _Result], *, what: str, where: str, patience: Patience
) -> _Result:
    """What `attempt` returns, once it raises no `Trouble`; `StorageError` when it is in vain."""
    began = time.monotonic()
    until = min(began + patience.deadline_s, _until.get())
    tries = 0
    while True:
        tries += 1
        outer = _until.set(until)
        try:
            return attempt()
        except Trouble as error:
            trouble = error
        finally:
            _until.reset(outer)
        spent = time.monotonic() - began
        pause = min(_FIRST_PAUSE_S * 2 ** min(tries - 1, 10), _LONGEST_PAUSE_S)
        pause *= random.uniform(0.5, 1.0)  # noqa: S311 (ranks must not come back all at once)
        if not trouble.transient or began + spent + pause > until:
            break
        time.sleep(pause)
    # Outside of `except`: a client's own error may quote what must not be told, and an error keeps
    # the one that was being handled when it was raised.
    often = f", {tries} times in {spent:.1f} s" if tries > 1 else ""
    failure = StorageError(
        f"cannot {what}",
        where=where,
        expected=trouble.expected,
        found=f"{trouble.found}{often}",
        remedy=trouble.remedy,
    )
    failure.transient = trouble.transient
    raise failure


try:
    import obstore
    from obstore import exceptions
    from obstore.store import AzureStore, GCSStore, S3Store
except ImportError as error:
    raise ImportError(f"{error}: pip install 'laststep[cloud]'") from error

TOKEN = "laststeptoken"  # noqa: S105 (letters only: Azure takes no others)
"""Under what an object's metadata tell who made it."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_KIND = re.compile(r"kind: (Connect|Timeout|Request|Decode|Interrupted|Unknown)\b")
_SYSTEM = re.compile(r'message: "([A-Z][a-z ]{3,40})"')
_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}

_Client = AzureStore | GCSStore | S3Store
_OTHERS: dict[str, type[AzureStore | GCSStore]] = {"gs": GCSStore, "az": AzureStore}
_RIGHTS = "check the credentials in the environment, and what they allow in this bucket"
_NO_BUCKET = "make the bucket, or check its name and the endpoint"
_REGION = "set AWS_REGION to the region of the bucket"
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired")
"""Answered with status 400 by Amazon."""
_ELSEWHERE = ("PermanentRedirect", "AuthorizationHeaderMalformed")


class _Clients:
    """Whether this process, or the one that it was forked from, has made obstore's threads."""

    used = False
    left_in_parent = False

    @classmethod
    def in_child(cls) -> None:
        cls.left_in_parent = cls.used


os.register_at_fork(after_in_child=_Clients.in_child)


class Missing(Exception):
    """There is no such object; or no such bucket, where a name must be free or is a prefix."""


class _Refused(Exception):
    """The condition of a request does not hold."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a server tells of an object."""

    size_bytes: int
    modified_s: float
    version: tuple[str | None, str | None]
    """What tells it from others under the same key: the ETag, and the version where there is one"""
    token: str | None = None


class Bucket:
    """The objects below a URL's bucket; keys are whole, with the URL's prefix."""

    def __init__(self, url: str, patience: Patience) -> None:
        self.scheme, self.name, self.prefix = parse(url)
        self.patience = patience
        self.client = self._opened()

    def create(self, key: str, data: bytes | memoryview) -> Found | None:
        """Put an object if its name is free, and tell of it; None where it is not."""
        return self._put(key, data, "create")

    def replace(
        self, key: str, data: bytes, version: tuple[str | None, str | None]
    ) -> Found | None:
        """Put an object in the place of that version; None where another one is there by now."""
        named = zip(("e_tag", "version"), version, strict=True)
        return self._put(key, data, {name: value for name, value in named if value is not None})

    def head(self, key: str) -> Found | None:
        """What is told of an object; None where there is none."""
        try:
            answer = self._ask(
                "get the metadata",
                key,
                lambda: obstore.get(self.client, key, options={"head": True}),
            )
        except Missing:
            return None
        return _found(answer.meta, answer.attributes.get(TOKEN))

    def read(self, key: str, *, limit_bytes: int) -> tuple[bytes, Found]:
        """All of a small object; `Missing`, or `CorruptError` where it is larger."""

        def attempt() -> tuple[bytes | None, Found]:
            answer = obstore.get(self.client, key)
            found = _found(answer.meta, answer.attributes.get(TOKEN))
            if found.size_bytes > limit_bytes:
                return None, found
            data = bytes(answer.bytes())
            _check_whole(len(data), found.size_bytes)
            return data, found

        data, found = self._ask("read", key, attempt)
        if data is None:
            raise CorruptError(
                "a file is too large to be what it should be",
                where=self.where(key),
                expected=f"at most {limit_bytes} bytes",
                found=f"{found.size_bytes} bytes",
                remedy="restore it from a copy, or take another checkpoint",
            )
        return data, found

    def read_range(self, key: str, start: int, size_bytes: int) -> memoryview:
        """So many bytes from `start` on, which MUST be there, in memory of their own."""

        def attempt() -> memoryview:
            got = obstore.get_range(self.client, key, start=start, length=size_bytes)
            _check_whole(len(got), size_bytes)
            return memoryview(got)

        return self._ask("read", key, attempt)

    def names(self, prefix: str) -> list[ObjectMeta]:
        """The objects whose keys have no further `/` behind `prefix/`."""
        answer = self._ask_there(
            "list", prefix, lambda: obstore.list_with_delimiter(self.client, prefix or None)
        )
        # Some servers keep an empty object for a prefix, and list it as what is below itself.
        return [meta for meta in answer["objects"] if meta["path"] != prefix]

    def below(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix/`."""
        found = self._ask_there("list", prefix, lambda: obstore.list(self.client, prefix).collect())
        return [meta["path"] for meta in found if meta["path"] != prefix]

    def delete(self, keys: list[str]) -> None:
        """Delete objects; absent ones are fine."""
        if not keys:
            return
        try:
            self._ask("delete", keys[0], lambda: obstore.delete(self.client, keys))
        except Missing:  # said by some servers, and then the others are still there
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def upload(self, key: str, file: IO[bytes], part_bytes: int) -> None:
        """Put all of an open file, in parts, several at a time. obstore tries each part again: we
        could only begin anew."""
        client = self._opened(retries=10)
        token = secrets.token_hex(8)

        def put() -> None:
            file.seek(0)
            obstore.put(
                client,
                key,
                file,
                chunk_size=part_bytes,
                max_concurrency=12,
                attributes={TOKEN: token},
            )

        def attempt() -> None:
            try:
                self._once(put)
            except Missing:  # the upload is, which may be complete: an answer may have got lost
                there = self.head(key)
                if there is None or there.token != token:
                    raise Trouble("the upload is gone", transient=True) from None

        self._ask("write", key, attempt)

    def where(self, key: str) -> str:
        """A key as a person names it."""
        return f"{self.scheme}://{self.name}/{key}"

    def front(self) -> str:
        """A URL of the server that answers, if only by a refusal."""
        if self.scheme == "s3":
            return self.signed().partition("?")[0]
        if self.scheme == "gs":
            return "https://storage.googleapis.com/"
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        return f"https://{account}.blob.core.windows.net/"

    def signed(self) -> str:
        """A URL for an object `x`, signed by obstore, which tells where the bucket is. A secret."""
        second = dt.timedelta(seconds=1)
        return self._ask("sign", "", lambda: obstore.sign(self.client, "GET", "x", second))

    def _put(self, key: str, data: bytes | memoryview, mode: str | dict[str, str]) -> Found | None:
        token = secrets.token_hex(8)
        tries = 0

        def attempt() -> Found | None:
            nonlocal tries
            tries += 1
            try:
                put = self._once(
                    lambda: obstore.put(
                        self.client,
                        key,
                        data,
                        mode=mode,  # type: ignore[arg-type]
                        attributes={TOKEN: token},
                        use_multipart=False,
                    )
                )
            except _Refused:
                # Only an earlier try of our own can have made what is in its own way.
                there = self.head(key) if tries > 1 else None
                return there if there is not None and there.token == token else None
            version = put["e_tag"], put["version"]
            return Found(size_bytes=len(data), modified_s=0.0, version=version, token=token)

        return self._ask_there("write", key, attempt)

    def _ask_there(self, what: str, key: str, call: Callable[[], _Result]) -> _Result:
        """Where no object has to be there: what is missing is the bucket."""

        def attempt() -> _Result:
            try:
                return self._once(call)
            except Missing:
                raise trouble_of(404) from None

        return persist(attempt, what=what, where=self.where(key), patience=self.patience)

    def _ask(self, what: str, key: str, call: Callable[[], _Result]) -> _Result:
        return persist(
            lambda: self._once(call), what=what, where=self.where(key), patience=self.patience
        )

    def _once(self, call: Callable[[], _Result]) -> _Result:
        """One try, with obstore's errors as ours."""
        if _Clients.left_in_parent:
            raise UsageError(
                "cannot reach an object store in a forked process",
                where=f"{self.scheme}://{self.name}",
                expected="a process that was started by itself, or forked before its parent used "
                "an object store",
                remedy="start it by the method `spawn` or `forkserver`",
            )
        _Clients.used = True
        try:
            return call()
        except FileNotFoundError as error:
            gone = "<Code>NoSuchBucket</Code>" in str(error)
            trouble: Exception = trouble_of(404, "NoSuchBucket") if gone else Missing()
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            # Amazon's 409 is not a refusal: two conditional puts came at once.
            both = self.scheme == "s3" and "status code: 409" in str(error)
            trouble = Trouble("409", transient=True) if both else _Refused()
        except (exceptions.BaseError, ValueError, OSError) as error:
            trouble = _trouble(error)
        raise trouble

    def _opened(self, *, retries: int = 0) -> _Client:
        """A client that tries each request again so often by itself."""
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        options: ClientConfig = {
            "connect_timeout": "5s",
            "read_timeout": dt.timedelta(seconds=self.patience.idle_s),
            "timeout": dt.timedelta(seconds=self.patience.request_s),
            # Whoever names an endpoint without TLS has chosen so.
            "allow_http": endpoint.startswith("http://"),
        }
        retry: RetryConfig = {
            "max_retries": retries,
            "retry_timeout": dt.timedelta(seconds=self.patience.deadline_s),
        }
        url = f"{self.scheme}://{self.name}"
        try:
            if self.scheme != "s3":
                return _OTHERS[self.scheme].from_url(
                    url, client_options=options, retry_config=retry
                )
            named: S3Config = {"endpoint": endpoint} if endpoint else {}
            return S3Store.from_url(url, config=named, client_options=options, retry_config=retry)
        except (exceptions.BaseError, ValueError) as error:
            kind = type(error).__name__
        raise UsageError(
            "cannot open an object store",
            where=self.where(self.prefix),
            expected="settings of the provider in the environment",
            found=f"{kind} of obstore",
            remedy="docs/guides/object-storage.md has the variables",
        )


def parse(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix of a URL; `UsageError` for one that says more, or less."""
    refuse_secrets(url)
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    if not parts.netloc or parts.query or parts.fragment or parts.scheme not in ("s3", *_OTHERS):
        raise UsageError(
            "this URL names no place in an object store",
            where=f"{parts.scheme}://{parts.netloc}{parts.path}",
            expected=f"{parts.scheme or 's3'}://BUCKET/PREFIX, and nothing behind it",
        )
    return parts.scheme, parts.netloc, check_name(prefix) if prefix else ""


def trouble_of(status: int, code: str = "") -> Trouble:
    """What a server's answer means: whether the next try may get another, and what to do else.
    `code` is the server's word for it, and left out where it is no word."""
    code = code if code.isalnum() and len(code) <= 64 else ""
    said = f"{status} {code}".strip()
    if status in (401, 403) or code in _EXPIRED:
        return Trouble(said, transient=False, expected="the right to do so", remedy=_RIGHTS)
    if status == 301 or code in _ELSEWHERE:
        return Trouble(f"{said}: it is in another region", transient=False, remedy=_REGION)
    if status == 404:
        return Trouble(said, transient=False, remedy=_NO_BUCKET)
    again = status in _AGAIN or code in ("RequestTimeout", "SlowDown", "InternalError")
    return Trouble(said, transient=again)


def _trouble(error: Exception) -> Trouble:
    """What may be told of an error: a status, the server's word for it, the kind of failure."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        return trouble_of(int(status[1]), "" if code is None else code[1])
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        said = "access denied"
        return Trouble(said, transient=False, expected="the right to do so", remedy=_RIGHTS)
    if "redirect without LOCATION" in text:
        return trouble_of(301)
    if isinstance(error, (exceptions.NotSupportedError, ValueError)) or "NotPartial" in text:
        why = "an answer without ranges" if "NotPartial" in text else type(error).__name__
        return Trouble(why, transient=False)
    if "HttpError" not in text and "reqwest" not in text:
        return Trouble("an answer that obstore does not understand", transient=False)
    kind, system = _KIND.search(text), _SYSTEM.search(text)
    words = ["the connection failed" if kind is None else f"{kind[1].lower()} failed"]
    words += [] if system is None else [system[1]]
    return Trouble(": ".join(words), transient=True)


def _check_whole(got: int, wanted: int) -> None:
    if got != wanted:
        raise Trouble(f"{got} of {wanted} bytes", transient=True)


def _found(meta: ObjectMeta, token: str | None) -> Found:
    return Found(
        size_bytes=meta["size"],
        modified_s=meta["last_modified"].timestamp(),
        version=(meta["e_tag"], meta["version"]),
        token=token,
    )
