"""Signatures of S3: Amazon's published example, and where keys come from."""

from __future__ import annotations

import hashlib
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

from laststep.storage.s3 import Keys, authorization, known_keys

if TYPE_CHECKING:
    import pytest

NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def test_a_request_is_signed_as_in_amazons_example() -> None:
    """ "GET Object" of "Signature Calculations for the Authorization Header" in the S3 API."""
    keys = Keys(
        name="AKIAIOSFODNN7EXAMPLE",
        secret="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",  # noqa: S106
        session=None,
    )
    headers = {
        "host": "examplebucket.s3.amazonaws.com",
        "range": "bytes=0-9",
        "x-amz-content-sha256": hashlib.sha256(b"").hexdigest(),
        "x-amz-date": "20130524T000000Z",
    }
    signed = authorization(keys, "us-east-1", "GET\n/test.txt\n", headers)
    assert signed.endswith("f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41")
    assert "SECRET" not in repr(keys)
    assert keys.secret not in repr(keys)


def test_without_keys_in_the_environment_those_count_that_botocore_has_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    assert known_keys() is None
    now = SimpleNamespace(access_key="a", secret_key="b", token="c")  # noqa: S106
    found = SimpleNamespace(get_frozen_credentials=lambda: now)
    session = SimpleNamespace(get_credentials=lambda: found)
    module = SimpleNamespace(get_session=lambda: session)
    monkeypatch.setitem(sys.modules, "botocore.session", module)  # type: ignore[arg-type]
    keys = known_keys()
    assert keys is not None
    assert keys() == Keys(name="a", secret="b", session="c")  # noqa: S106
    now.token = "d"  # noqa: S105 (renewed meanwhile)
    assert keys().session == "d"
    session.get_credentials = lambda: None
    assert known_keys() is None


def test_keys_of_the_environment_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("x", "y", "z"), strict=True):
        monkeypatch.setenv(name, value)
    keys = known_keys()
    assert keys is not None
    assert keys() == Keys(name="x", secret="y", session="z")  # noqa: S106
