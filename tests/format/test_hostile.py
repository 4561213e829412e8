"""Every hostile file is refused with the error that its list names, and by nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from laststep import errors
from laststep.codecs import objects
from laststep.codecs.digests import digest_text
from laststep.format import group, manifest
from laststep.format.header import decode_header
from laststep.format.safetensors import decode_plain, region_bytes_of

FOLDER = Path(__file__).parent.parent / "hostile"
# Lets this import what makes the files by its name, as make.py does.
sys.path.insert(0, str(FOLDER))

import hostile_headers as headers  # noqa: E402
import hostile_manifests as manifests  # noqa: E402
import make  # noqa: E402

CASES = make.cases()


def read(name: str, data: bytes) -> object:
    if name.startswith("object-"):
        return objects.decode(data, where=name)
    if name.startswith("manifest-"):
        return manifest.decode(data, where=name)
    if name.startswith("group-"):
        # The manifest has the digest of exactly this content: what is refused is the content.
        content = data[len(manifests.sealed(b"", "group")) - 1 : -1]
        record = manifest.GroupRecord(
            name="groups/r00002.json", digest=digest_text(content), first=2, ranks=2, files=2,
            size_bytes=9000,
        )  # fmt: skip
        return group.decode(data, record, where=name)
    if name.startswith("plain-"):
        size = region_bytes_of(data, size_bytes=len(data), where=name)
        return decode_plain(data[:size], data_bytes=len(data) - size, where=name)
    # The manifest says how long the header region is; here all but the data is.
    region = data if len(data) < 100 else data[: -len(headers.DATA)]
    return decode_header(region, data_bytes=len(headers.DATA), where=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_file_is_refused(case: object) -> None:
    name, raises = case.name, case.raises  # type: ignore[attr-defined]
    with pytest.raises(errors.LaststepError) as caught:
        read(name, (FOLDER / name).read_bytes())
    assert type(caught.value).__name__ == raises, str(caught.value)
    assert name in str(caught.value)


def test_what_the_hostile_files_are_derived_from_is_sound() -> None:
    read("header-sound", headers.sound_header())
    read("header-coded", headers.sound_coded())
    read("header-coded-lends", headers.sound_coded(lends=True))
    read("manifest-sound", manifests.sealed(json.dumps(manifests.manifest()).encode()))
    read("manifest-grouped", manifests.sealed(json.dumps(manifests.grouped()).encode()))
    read("group-sound", manifests.sealed(json.dumps(manifests.group()).encode(), "group"))


def test_the_files_are_what_the_maker_makes() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    stored = {path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".safetensors")}
    assert stored == {case.name for case in CASES}
    assert all((FOLDER / case.name).read_bytes() == case.data for case in CASES)
    assert (FOLDER / "README.md").read_text() == make.readme()
