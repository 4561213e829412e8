"""The objects of one bucket, accessed through obstore with retries and without leaking secrets.

This module knows keys, bytes and the two conditions that everything else relies on: put an object
only if its name is free, and replace an object only if it is still the version that was read. A
response may get lost, so that a retry finds the object that the first try made. Every object
therefore carries a random token by which its maker recognizes it. obstore's errors quote server
responses, which may quote keys: only known words are copied from them.

Safe to use from several threads, but not in a forked process: obstore's threads stay in the parent,
and a call would wait for them forever.

`persist` retries requests with growing pauses until a deadline. A `Trouble` describes a failure
without keys or signatures, because its text ends up in errors and logs.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import random
import re
import secrets
import time
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec
import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from laststep.errors import AlreadyExistsError, NotFoundError, StorageError, UsageError
from laststep.storage import aws
from laststep.storage.files import refuse_secrets
from laststep.storage.store import check_name, too_large

if TYPE_CHECKING:
    from collections.abc import Callable

    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config


_Result = TypeVar("_Result")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_LOOK = "check the server and the network, and try again"


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits for a server."""

    deadline_s: float = 300.0
    """Limit for one request with all its retries. The last try may end up to `request_s` later."""
    request_s: float = 120.0
    """Limit for one try, including its body."""
    idle_s: float = 20.0
    """Limit for a pause between two reads of a response."""


class Trouble(Exception):
    """A failed try of a request; `transient` if the next try may succeed."""

    def __init__(self, found: str, *, transient: bool, remedy: str = _LOOK) -> None:
        super().__init__(found)
        self.found = found
        self.transient = transient
        self.remedy = remedy


def persist(
    attempt: Callable[[], _Result], *, what: str, where: str, patience: Patience
) -> _Result:
    """Call `attempt` until it raises no transient `Trouble`, and return its result. Raise
    `StorageError` if the trouble is not transient or the deadline passes."""
    began = time.monotonic()
    tries = 0
    while True:
        tries += 1
        try:
            return attempt()
        except Trouble as error:
            trouble = error
        spent = time.monotonic() - began
        pause = min(_FIRST_PAUSE_S * 2 ** min(tries - 1, 10), _LONGEST_PAUSE_S)
        pause *= random.uniform(0.5, 1.0)  # noqa: S311 (so that ranks do not all retry at once)
        if not trouble.transient or spent + pause > patience.deadline_s:
            break
        time.sleep(pause)
    # Raised outside of `except`: the client's own error may quote secrets, and would be kept as the
    # context of this one.
    often = f", {tries} times in {spent:.1f} s" if tries > 1 else ""
    failure = StorageError(
        f"cannot {what}", where=where, found=f"{trouble.found}{often}", remedy=trouble.remedy
    )
    failure.transient = trouble.transient
    raise failure


TOKEN = "laststeptoken"  # noqa: S105 (letters only: Azure allows no others)
"""Metadata key of the token by which the maker of an object recognizes it."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_KIND = re.compile(r"kind: (Connect|Timeout|Request|Decode|Interrupted|Unknown)\b")
_PARTS_AT_ONCE = 8
_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}

_Client = AzureStore | GCSStore | S3Store
_OTHERS: dict[str, type[AzureStore | GCSStore]] = {"gs": GCSStore, "az": AzureStore}
_RIGHTS = (
    "check the credentials and their rights in this bucket; `aws sso login` renews an expired login"
)
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired")
"""Error codes that Amazon sends with status 400."""
_ELSEWHERE = ("PermanentRedirect", "AuthorizationHeaderMalformed")


_used_by: int | None = None
"""The process that has started obstore's threads, which its forked children do not have."""


class Missing(Exception):
    """The object does not exist."""


class _Refused(Exception):
    """The condition of a conditional put does not hold."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    modified_s: float
    version: tuple[str | None, str | None]
    """ETag, and version ID if there is one, of this object among others under its key."""
    token: str | None = None


class Bucket:
    """The objects of a URL's bucket. Keys are complete: they include the URL's prefix."""

    def __init__(self, url: str, patience: Patience) -> None:
        self.scheme, self.name, self.prefix = parse(url)
        self.patience = patience
        self.client = self._opened()

    @functools.cached_property
    def uploader(self) -> _Client:
        """A client that retries parts itself until the deadline, since the caller that hands over a
        part cannot. Its idle limit is `request_s`, because a part has no response while it is being
        sent."""
        return self._opened(retries=1000, idle_s=self.patience.request_s)

    def create(self, key: str, data: bytes | memoryview) -> Found | None:
        """Put an object and return its metadata; return None if the name is taken."""
        return self._put(key, data, "create")

    def replace(
        self, key: str, data: bytes, version: tuple[str | None, str | None]
    ) -> Found | None:
        """Replace that version of an object; return None if there is another version by now."""
        named = zip(("e_tag", "version"), version, strict=True)
        return self._put(key, data, {name: value for name, value in named if value is not None})

    def head(self, key: str) -> Found | None:
        """Return the metadata of an object; None if it does not exist."""
        return persist(
            lambda: self.head_once(key),
            what="get the metadata",
            where=self.where(key),
            patience=self.patience,
        )

    def head_once(self, key: str) -> Found | None:
        """Do the same in one try, for requests that are tried again themselves."""
        call = functools.partial(obstore.get, self.client, key, options={"head": True})
        try:
            answer = self._once(call, may_miss=True)
        except Missing:
            return None
        return _found(answer.meta, answer.attributes.get(TOKEN))

    def read(self, key: str, *, limit_bytes: int) -> tuple[bytes, Found]:
        """Read a small object. Raise `Missing`, or `CorruptError` if it exceeds `limit_bytes`."""

        def attempt() -> tuple[bytes, Found]:
            answer = obstore.get(self.client, key)
            found = _found(answer.meta, answer.attributes.get(TOKEN))
            if found.size_bytes > limit_bytes:
                raise too_large(self.where(key), limit_bytes, found.size_bytes)
            data = bytes(answer.bytes())
            _check_whole(len(data), found.size_bytes)
            return data, found

        return self._ask("read", key, attempt)

    def read_range(self, key: str, start: int, size_bytes: int) -> memoryview:
        """Read `size_bytes` bytes from `start`, which MUST exist, into new memory."""

        def attempt() -> memoryview:
            got = obstore.get_range(self.client, key, start=start, length=size_bytes)
            _check_whole(len(got), size_bytes)
            return memoryview(got)

        return self._ask("read", key, attempt)

    def names(self, prefix: str) -> list[ObjectMeta]:
        """Return the objects directly below `prefix/`, without those in deeper prefixes."""
        call = functools.partial(obstore.list_with_delimiter, self.client, prefix or None)
        answer = self._ask("list", prefix, call, may_miss=False)
        # Some servers store an empty object for a prefix and list it below itself.
        return [meta for meta in answer["objects"] if meta["path"] != prefix]

    def below(self, prefix: str) -> list[str]:
        """Return all keys that start with `prefix/`."""
        found = self._ask(
            "list", prefix, lambda: obstore.list(self.client, prefix).collect(), may_miss=False
        )
        return [meta["path"] for meta in found if meta["path"] != prefix]

    def delete(self, keys: list[str]) -> None:
        """Delete objects; missing ones are ignored."""
        if not keys:
            return
        try:
            self._ask("delete", keys[0], lambda: obstore.delete(self.client, keys))
        except Missing:  # some servers answer so and leave the other keys
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def upload(self, key: str, first: bytes | memoryview, part_bytes: int) -> Upload:
        """Start a multipart upload, front to back, with the first bytes of an object."""

        def attempt() -> Upload:
            upload = Upload(self, key, part_bytes)
            try:
                upload.file.write(first)
            except BaseException:
                upload.abort()
                raise
            return upload

        return self._ask("begin to write", key, attempt, may_miss=False)

    def where(self, key: str) -> str:
        return f"{self.scheme}://{self.name}/{key}"

    def taken(self, key: str) -> AlreadyExistsError:
        return AlreadyExistsError("the name is taken", where=self.where(key))

    def absent(self, key: str) -> NotFoundError:
        return NotFoundError(
            "there is no such file or folder",
            where=self.where(key),
            remedy="it was deleted, or never existed",
        )

    def front(self) -> str:
        """Return a URL at which the server answers, even if only with a refusal."""
        if self.scheme == "s3":
            second = dt.timedelta(seconds=1)
            signed = self._ask("sign", "", lambda: obstore.sign(self.client, "GET", "x", second))
            return signed.partition("?")[0]  # the rest is a secret
        if self.scheme == "gs":
            return "https://storage.googleapis.com/"
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        return f"https://{account}.blob.core.windows.net/"

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
                    ),
                    may_miss=False,
                )
            except _Refused:
                # The name may be taken by an earlier try of this call whose response was lost.
                found = self.head_once(key) if tries > 1 else None
                return found if found is not None and found.token == token else None
            version = put["e_tag"], put["version"]
            return Found(size_bytes=len(data), modified_s=0.0, version=version, token=token)

        return self._ask("write", key, attempt, may_miss=False)

    def ask_once(self, what: str, key: str, call: Callable[[], _Result]) -> _Result:
        """Make a call that must not be repeated; raise `StorageError` if it fails."""
        return self._ask(what, key, call, Patience(deadline_s=0), may_miss=False)

    def _ask(
        self,
        what: str,
        key: str,
        call: Callable[[], _Result],
        patience: Patience | None = None,
        *,
        may_miss: bool = True,
    ) -> _Result:
        """Make a call until it succeeds, as `_once` does."""
        return persist(
            lambda: self._once(call, may_miss=may_miss),
            what=what,
            where=self.where(key),
            patience=patience or self.patience,
        )

    def _once(self, call: Callable[[], _Result], *, may_miss: bool) -> _Result:
        """Make one try and translate errors into `Missing`, `_Refused` or `Trouble`. If no object
        need exist, the bucket or upload is missing: that is trouble."""
        global _used_by  # noqa: PLW0603 (of the process)
        _used_by = _used_by or os.getpid()
        if _used_by != os.getpid():
            raise UsageError(
                "cannot reach an object store in a forked process",
                where=f"{self.scheme}://{self.name}",
                expected="a spawned process, or one forked before its parent used an object store",
                remedy="start it by the method `spawn` or `forkserver`",
            )
        try:
            return call()
        except FileNotFoundError as error:
            is_missing = may_miss and "<Code>NoSuchBucket</Code>" not in str(error)
            trouble: Exception = Missing() if is_missing else _trouble(error)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            # Amazon's 409 is not a refusal: two conditional puts collided.
            both = self.scheme == "s3" and "status code: 409" in str(error)
            trouble = Trouble("409", transient=True) if both else _Refused()
        except (exceptions.BaseError, ValueError, OSError) as error:
            trouble = _trouble(error)
        raise trouble

    def _opened(self, *, retries: int = 0, idle_s: float | None = None) -> _Client:
        """Open a client that retries each request itself up to `retries` times."""
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        options: ClientConfig = {
            "connect_timeout": "5s",
            "read_timeout": dt.timedelta(seconds=idle_s or self.patience.idle_s),
            "timeout": dt.timedelta(seconds=self.patience.request_s),
            # An explicit http:// endpoint is the user's choice.
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
            # Blocks have their own digests; signing bodies would digest every byte again.
            of_profile, credentials = aws.profile()
            named: S3Config = {"unsigned_payload": True, **of_profile}
            if endpoint:
                named["endpoint"] = endpoint
            return S3Store.from_url(
                url,
                config=named,
                client_options=options,
                retry_config=retry,
                credential_provider=credentials,
            )
        except (exceptions.BaseError, ValueError) as error:
            kind = type(error).__name__
        raise UsageError(
            "cannot open an object store",
            where=self.where(self.prefix),
            expected="settings of the provider in the environment",
            found=f"{kind} of obstore",
            remedy="docs/guides/object-storage.md has the variables",
        )


class Upload:
    """A multipart upload with several parts in flight; used by one thread at a time.

    The object is not visible before `finish`. obstore retries each part until the deadline. Data
    must not be a view of memory that will be reused, because obstore sends from it later.
    """

    def __init__(self, bucket: Bucket, key: str, part_bytes: int) -> None:
        self._bucket, self._key = bucket, key
        self._token = secrets.token_hex(8)
        self.file = obstore.open_writer(
            bucket.uploader,
            key,
            buffer_size=part_bytes,
            max_concurrency=_PARTS_AT_ONCE,
            attributes={TOKEN: self._token},
        )

    def write(self, data: bytes | memoryview) -> None:
        self._bucket.ask_once("write", self._key, lambda: self.file.write(data))

    def finish(self) -> None:
        """Complete the upload, which makes the object visible."""

        def close() -> None:
            try:
                self.file.close()
            except FileNotFoundError:  # already complete if only the response was lost
                found = self._bucket.head_once(self._key)
                if found is None or found.token != self._token:
                    raise

        self._bucket.ask_once("make durable", self._key, close)

    def abort(self) -> None:
        """Abandon the upload. Parts of a writer that died stay until the bucket's lifecycle rule
        for incomplete uploads removes them."""
        with contextlib.suppress(exceptions.BaseError, OSError):
            self.file.__exit__(BaseException, None, None)


def parse(url: str) -> tuple[str, str, str]:
    """Split a URL into scheme, bucket and prefix; raise `UsageError` for any other URL."""
    refuse_secrets(url)
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    if not parts.netloc or parts.query or parts.fragment or parts.scheme not in ("s3", *_OTHERS):
        raise UsageError(
            "invalid URL of an object store",
            where=f"{parts.scheme}://{parts.netloc}{parts.path}",
            expected=f"{parts.scheme or 's3'}://BUCKET/PREFIX, and nothing behind it",
        )
    return parts.scheme, parts.netloc, check_name(prefix) if prefix else ""


def _trouble(error: Exception) -> Trouble:
    """Translate an obstore error into a `Trouble`: whether to retry, else the remedy. Only safe
    parts are copied: status, the server's error code, kind of failure."""
    text = str(error)
    found_status, found_code, kind = _STATUS.search(text), _CODE.search(text), _KIND.search(text)
    status = 0 if found_status is None else int(found_status[1])
    if isinstance(error, FileNotFoundError):
        status = 404
    elif "redirect without LOCATION" in text:
        status = 301
    code = "" if found_code is None else found_code[1]
    said = f"{status} {code}".strip()
    if status in (401, 403) or code in _EXPIRED:
        return Trouble(said, transient=False, remedy=_RIGHTS)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return Trouble("access denied", transient=False, remedy=_RIGHTS)
    if status == 301 or code in _ELSEWHERE:
        remedy = "set AWS_REGION to the region of the bucket"
        return Trouble(f"{said}: it is in another region", transient=False, remedy=remedy)
    if status == 404:
        remedy = "make the bucket, or check its name and the endpoint"
        return Trouble(said, transient=False, remedy=remedy)
    if status:
        again = status in _AGAIN or code in ("RequestTimeout", "SlowDown", "InternalError")
        return Trouble(said, transient=again)
    if isinstance(error, (exceptions.NotSupportedError, ValueError)) or "NotPartial" in text:
        why = "an answer without ranges" if "NotPartial" in text else type(error).__name__
        return Trouble(why, transient=False)
    if not any(word in text for word in ("HttpError", "HTTP error", "reqwest")):
        return Trouble("an answer that obstore does not understand", transient=False)
    return Trouble("the connection failed" if kind is None else f"{kind[1]} failed", transient=True)


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
