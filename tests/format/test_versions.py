"""What a later laststep wrote is refused with a sentence that says which version reads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from laststep.codecs.digests import digest_text
from laststep.errors import Usage
from laststep.format import group, manifest
from laststep.format.envelope import seal
from laststep.format.header import decode_header
from laststep.terms import FORMAT_VERSION
from laststep.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

Fields = dict[str, object]


def read_manifest(fields: Fields) -> None:
    content = json.dumps({"format": 9, "decision": "commit", **fields}).encode()
    manifest.decode(seal(content, member="manifest"), where="here")


def read_group(fields: Fields) -> None:
    content = json.dumps({"format": 9, **fields}).encode()
    record = manifest.GroupRecord(
        name="groups/r00000.json", digest=digest_text(content), first=0, ranks=2, files=2,
        size_bytes=0,
    )  # fmt: skip
    group.decode(seal(content, member="group"), record, where="here")


def read_data_file(fields: Fields) -> None:
    document = json.dumps({"version": 9, **fields})
    text = json.dumps({"__metadata__": {"format": "pt", "laststep": document}}).encode()
    region = (4096 - 8).to_bytes(8, "little") + text.ljust(4096 - 8)
    decode_header(region, data_bytes=0, where="here")


READERS = {"manifest": read_manifest, "group manifest": read_group, "data file": read_data_file}


@pytest.mark.parametrize("what", READERS)
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
    what: str, writer: Fields, found: str, remedy: str
) -> None:
    read: Callable[[Fields], None] = READERS[what]
    with pytest.raises(Usage) as caught:
        read({**writer, "new": [1]})
    error = caught.value
    assert (error.what, error.where) == (f"cannot read a {what} of a later format", "here")
    assert error.expected == f"format {FORMAT_VERSION}, the latest that laststep {VERSION} reads"
    assert error.found == found
    assert error.remedy is not None
    assert error.remedy.startswith("upgrade laststep (`pip install --upgrade laststep`) to ")
    assert remedy in error.remedy
