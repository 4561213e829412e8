"""What a later laststep wrote is refused with a sentence that says which version reads it."""

from __future__ import annotations

import json

import msgspec
import pytest

from expect import names
from laststep.codecs.digests import digest
from laststep.constants import FORMAT_VERSION
from laststep.errors import CorruptError, UsageError
from laststep.format import index, manifest
from laststep.format.manifest import seal
from laststep.version import VERSION

Fields = dict[str, object]


def read_manifest(fields: Fields) -> None:
    content = json.dumps({"format": 9, "decision": "commit", **fields}).encode()
    manifest.decode(seal(content), where="here")


@pytest.mark.parametrize(
    ("writer", "found", "remedy"),
    [
        ({"laststep": "7.1.0"}, "7.1.0", "7.1.0"),
        ({}, "9", "9"),
        ({"laststep": "\x1b[2J"}, "9", "9"),
        ({"laststep": ["7"]}, "9", "9"),
    ],
    ids=["named", "unnamed", "hostile", "nonsense"],
)
def test_a_later_format_is_refused_with_who_reads_it(
    writer: Fields, found: str, remedy: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_manifest({**writer, "new": [1]})
    error = caught.value
    assert error.where == "here"
    assert names(error.expected, FORMAT_VERSION, VERSION)
    assert names(error.found, "9")
    assert found in error.found
    assert "\x1b" not in str(error)
    assert error.remedy is not None
    assert "`pip install --upgrade laststep`" in error.remedy
    assert remedy in error.remedy


@pytest.mark.parametrize("members", [[9], [9, {"other": 1}], [9, 0, [], [], [], {}]])
def test_an_index_of_a_later_format_is_refused_whatever_else_is_in_it(members: list) -> None:
    payload = msgspec.msgpack.encode(members)
    with pytest.raises(UsageError) as caught:
        index.decode(digest(payload) + payload, where="here")
    assert (caught.value.where, caught.value.found) == ("here", "format 9")


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "1", None])
def test_an_index_of_no_format_is_corrupt(number: object) -> None:
    payload = msgspec.msgpack.encode([number, 0, [], [], [], {}])
    with pytest.raises(CorruptError):
        index.decode(digest(payload) + payload, where="here")
