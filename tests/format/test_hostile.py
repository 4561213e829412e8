"""Every hostile file is refused with the error that its list names, and by nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from laststep import errors
from laststep.codecs import objects
from laststep.format import index, manifest
from laststep.format.layout import decode_plain, region_bytes_of

FOLDER = Path(__file__).parent.parent / "hostile"
# Lets this import what makes the files by its name, as make.py does.
sys.path.insert(0, str(FOLDER))

import hostile_indexes as indexes  # noqa: E402
import hostile_manifests as manifests  # noqa: E402
import hostile_plain as plain  # noqa: E402
import make  # noqa: E402

CASES = make.cases()


def read(name: str, data: bytes) -> object:
    if name.startswith("object-"):
        return objects.decode(data, where=name)
    if name.startswith("manifest-"):
        return manifest.decode(data, where=name)
    if name.startswith("index-"):
        return index.decode(data, where=name)
    size = region_bytes_of(data, size_bytes=len(data), where=name)
    return decode_plain(data[:size], data_bytes=len(data) - size, where=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_file_is_refused(case: object) -> None:
    name, raises = case.name, case.raises  # type: ignore[attr-defined]
    with pytest.raises(errors.LaststepError) as caught:
        read(name, (FOLDER / name).read_bytes())
    assert type(caught.value).__name__ == raises, str(caught.value)
    assert name in str(caught.value)


def test_what_the_hostile_files_are_derived_from_is_sound() -> None:
    read("manifest-sound", manifests.sealed(json.dumps(manifests.manifest()).encode()))
    read("manifest-ranks", manifests.sealed(json.dumps(manifests.of_ranks()).encode()))
    read("index-sound", indexes.sound())
    read("plain-sound", plain.sound())


def test_every_hostile_index_says_another_thing() -> None:
    found = [case.data for case in CASES if case.name.startswith("index-")]
    assert len(set(found) - {indexes.sound()}) == len(found)


def test_the_files_are_what_the_maker_makes() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    stored = {
        path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".bin", ".safetensors")
    }
    assert stored == {case.name for case in CASES}
    assert all((FOLDER / case.name).read_bytes() == case.data for case in CASES)
    assert (FOLDER / "README.md").read_text() == make.readme()
