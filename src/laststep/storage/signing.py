"""Keys of S3, and what they sign: Amazon's Signature Version 4.

The keys are those of the environment, or whatever botocore finds where that is installed: roles of
instances, containers and pods, and profiles. Those it renews in time, so they are asked for at each
request. Nothing here is ever shown: `Keys` has no repr of what it holds.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
