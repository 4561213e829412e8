"""Finding codecs of blocks by name: ours, those of others, and those that cannot be had."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.codecs.blocks import registry
from laststep.codecs.blocks.codec import Raw
from laststep.codecs.blocks.registry import OURS, codec_named, is_known_everywhere, register
from laststep.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

NEEDY = [name for name in OURS if name != "raw"]


class Theirs(Raw):
    def __init__(self, name: str = "theirs", needs: str | None = None) -> None:
        self.name = name
        self.needs = needs


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered by a test is forgotten after it."""
    monkeypatch.setattr(registry, "_registered", {})


@pytest.mark.parametrize("name", OURS)
def test_ours_are_found_by_the_names_that_they_have(name: str) -> None:
    assert codec_named(name).name == name
    assert codec_named(name).lossless
    assert codec_named(name) is codec_named(name)


def test_what_is_registered_is_found() -> None:
    codec = Theirs()
    register(codec)
    register(codec)
    assert codec_named("theirs") is codec


def test_a_name_that_nobody_has_is_named_with_those_that_there_are() -> None:
    register(Theirs())
    with raises(UsageError, found="'zipped'", expected="patches, planes, raw, subtract, theirs"):
        codec_named("zipped")


def test_two_of_one_name_are_refused() -> None:
    first = Theirs()
    register(first)
    with raises(UsageError, found="'theirs'"):
        register(Theirs())
    assert codec_named("theirs") is first


@pytest.mark.parametrize("name", [*OURS])
def test_our_names_are_ours(name: str) -> None:
    with raises(UsageError, found=repr(name)):
        register(Theirs(name))


def test_of_many_who_register_one_name_exactly_one_does() -> None:
    together = threading.Barrier(8)
    won: list[Theirs] = []

    def contend() -> None:
        mine = Theirs()
        together.wait()
        try:
            register(mine)
        except UsageError:
            return
        won.append(mine)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [codec_named("theirs")]


@pytest.mark.parametrize("name", ["", "Upper", "a b", "a/b", "a_b", "-a", "a\n", "x" * 33])
def test_a_name_that_a_file_cannot_have_is_refused(name: str) -> None:
    with raises(UsageError, expected="32", found=repr(name)):
        register(Theirs(name))


@pytest.mark.parametrize("name", NEEDY)
def test_without_zstandard_the_error_names_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with raises(UsageError, repr(name), "zstandard", remedy="'laststep[compress]'"):
        codec_named(name)
    assert codec_named("raw").encode(memoryview(b"x"), 1, None) == b"x"


def test_what_a_codec_of_others_needs_is_named_too() -> None:
    register(Theirs(needs="not_there_at_all"))
    with raises(UsageError, "'theirs'", remedy="not_there_at_all"):
        codec_named("theirs")


def test_raw_blocks_need_neither_numpy_nor_zstandard() -> None:
    script = (
        "import sys\nfrom laststep.codecs.blocks.registry import codec_named\n"
        "codec_named('raw').encode(memoryview(b'x'), 1, None)\n"
        "print(*sys.modules.keys() & {'numpy', 'zstandard'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_a_codec_that_a_package_brings_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swapping.py").write_text(
        "class Swapped:\n"
        "    name, lossless, needs = 'swapped', True, None\n"
        "    def encode(self, data, element_bytes, before): return bytes(data)[::-1]\n"
        "    def decode(self, data, size_bytes, element_bytes, before): return bytes(data)[::-1]\n"
        "CODEC = Swapped()\n"
    )
    brought = tmp_path / "swapping-1.0.dist-info"
    brought.mkdir()
    (brought / "METADATA").write_text("Metadata-Version: 2.1\nName: swapping\nVersion: 1.0\n")
    (brought / "entry_points.txt").write_text("[laststep.codecs]\nswapped = swapping:CODEC\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_known_everywhere("swapped")
    assert codec_named("swapped").encode(memoryview(b"abc"), 1, None) == b"cba"
    assert not is_known_everywhere("swopped")
