"""Every hostile file is refused with the error that its list names, and by nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from laststep import errors
from laststep.codecs import objects
from laststep.codecs.digests import digest_text
from laststep.format import group, manifest
from laststep.format.header import decode_header, decode_plain, region_bytes_of

if TYPE_CHECKING:
    from types import ModuleType

FOLDER = Path(__file__).parent.parent / "hostile"


def _load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hostile_make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


maker = _load_maker()
CASES = maker.cases()


def read(name: str, data: bytes) -> object:
    if name.startswith("object-"):
        return objects.decode(data, where=name)
    if name.startswith("manifest-"):
        return manifest.decode(data, where=name)
    if name.startswith("group-"):
        # The manifest has the digest of exactly this content: what is refused is the content.
        content = data[len(maker.sealed(b"", "group")) - 1 : -1]
        record = manifest.GroupRecord(
            name="groups/r00002.json", digest=digest_text(content), first=2, ranks=2, files=2,
            size_bytes=9000,
        )  # fmt: skip
        return group.decode(data, record, where=name)
    if name.startswith("plain-"):
        size = region_bytes_of(data, size_bytes=len(data), where=name)
        return decode_plain(data[:size], data_bytes=len(data) - size, where=name)
    # The manifest says how long the header region is; here all but the data is.
    region = data if len(data) < 100 else data[: -len(maker.DATA)]
    return decode_header(region, data_bytes=len(maker.DATA), where=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_file_is_refused(case: object) -> None:
    name, raises = case.name, case.raises  # type: ignore[attr-defined]
    with pytest.raises(errors.LaststepError) as caught:
        read(name, (FOLDER / name).read_bytes())
    assert type(caught.value).__name__ == raises, str(caught.value)
    assert name in str(caught.value)


def test_what_the_hostile_files_are_derived_from_is_sound() -> None:
    read("header-sound", maker.sound_header())
    read("manifest-sound", maker.sealed(maker.json.dumps(maker.manifest()).encode()))
    read("manifest-grouped", maker.sealed(maker.json.dumps(maker.grouped()).encode()))
    read("group-sound", maker.sealed(maker.json.dumps(maker.group()).encode(), "group"))


def test_the_files_are_what_the_maker_makes() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    stored = {path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".safetensors")}
    assert stored == {case.name for case in CASES}
    assert all((FOLDER / case.name).read_bytes() == case.data for case in CASES)
    assert (FOLDER / "README.md").read_text() == maker.readme()
