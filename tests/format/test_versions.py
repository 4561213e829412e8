"""What a later laststep wrote is refused with a sentence that says which version reads it."""

from __future__ import annotations

import json

import msgspec
import pytest

from laststep.codecs.digests import digest
from laststep.errors import CorruptError, UsageError
from laststep.format import index, manifest
from laststep.format.manifest import seal
from laststep.terms import FORMAT_VERSION
from laststep.version import VERSION

Fields = dict[str, object]


def read_manifest(fields: Fields) -> None:
    content = json.dumps({"format": 9, "decision": "commit", **fields}).encode()
    manifest.decode(seal(content, member="manifest"), where="here")


@pytest.mark.parametrize(
    ("writer", "found", "remedy"),
    [
        ({"laststep": "7.1.0"}, "format 9, written by laststep 7.1.0", "version 7.1.0 or a later"),
        ({}, "format 9", "a version that writes format 9"),
        ({"laststep": "\x1b[2J"}, "format 9", "a version that writes format 9"),
        ({"laststep": ["7"]}, "format 9", "a version that writes format 9"),
    ],
    ids=["named", "unnamed", "hostile", "nonsense"],
)
def test_a_later_format_is_refused_with_who_reads_it(
    writer: Fields, found: str, remedy: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_manifest({**writer, "new": [1]})
    error = caught.value
    assert (error.what, error.where) == ("cannot read a manifest of a later format", "here")
    assert error.expected == f"format {FORMAT_VERSION}, the latest that laststep {VERSION} reads"
    assert error.found == found
    assert error.remedy is not None
    assert error.remedy.startswith("upgrade laststep (`pip install --upgrade laststep`) to ")
    assert remedy in error.remedy


@pytest.mark.parametrize("members", [[9], [9, {"other": 1}], [9, 0, [], [], [], {}]])
def test_an_index_of_a_later_format_is_refused_whatever_else_is_in_it(members: list) -> None:
    payload = msgspec.msgpack.encode(members)
    with pytest.raises(UsageError) as caught:
        index.decode(digest(payload) + payload, where="here")
    assert (caught.value.what, caught.value.found) == (
        "cannot read an index of a later format",
        "format 9",
    )


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "1", None])
def test_an_index_of_no_format_is_corrupt(number: object) -> None:
    payload = msgspec.msgpack.encode([number, 0, [], [], [], {}])
    with pytest.raises(CorruptError):
        index.decode(digest(payload) + payload, where="here")
