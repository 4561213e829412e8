"""Opening stores: by a path, by the URL of a folder, by a scheme that somebody has registered."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep.errors import NotFoundError, UsageError
from laststep.storage import registry
from laststep.storage.directory import DirectoryStore
from laststep.storage.registry import open_parent, open_store, register_store
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHELF = """
from laststep.storage.directory import DirectoryStore


class Shelf(DirectoryStore):
    url = property(lambda self: "shelf://" + super().url.lstrip("/"))


def open_shelf(url):
    return Shelf("/" + url.removeprefix("shelf://"))
"""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered by a test is forgotten after it."""
    monkeypatch.setattr(registry, "_openers", dict(registry._openers))


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The import path of a store of somebody else's, in a module of its own."""
    (tmp_path / "shelf_store.py").write_text(SHELF)
    monkeypatch.syspath_prepend(tmp_path)
    return "shelf_store:open_shelf"


@pytest.mark.parametrize("place", ["{}", "file://{}", "file://localhost{}", "FILE://{}/"])
def test_a_path_and_the_url_of_a_file_are_the_same_folder(place: str, tmp_path: Path) -> None:
    store = open_store(place.format(tmp_path))
    assert isinstance(store, DirectoryStore)
    assert store.url == str(tmp_path)
    assert isinstance(open_store(tmp_path), DirectoryStore)


def test_the_url_of_a_file_is_decoded_and_a_path_is_not(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/a%20b%3Fc").url == f"{tmp_path}/a b?c"
    assert open_store(f"{tmp_path}/a%20b").url == f"{tmp_path}/a%20b"


@pytest.mark.parametrize("place", ["file://elsewhere/run", "file://", "file://run"])
def test_the_url_of_another_machines_file_is_refused(place: str) -> None:
    with raises(UsageError, found=repr(place)):
        open_store(place)


@pytest.mark.parametrize(
    "use",
    [
        open_store,
        open_parent,
        laststep.open,
        laststep.load,
        lambda url: laststep.Checkpointer(url, s={"a": 1}),
    ],
)
def test_an_unknown_scheme_says_what_is_known_and_how_to_register(
    use: Callable[[str], object],
) -> None:
    with pytest.raises(UsageError) as caught:
        use("ftp://bucket/run")
    assert "file://, gs://, s3://" in caught.value.expected
    assert "laststep.register_store('ftp', …)" in caught.value.remedy


@pytest.mark.parametrize(
    ("scheme", "opener"),
    [
        ("file", DirectoryStore),
        ("", DirectoryStore),
        ("a b", DirectoryStore),
        ("x", "nowhere"),
        ("x", None),
        ("x", "__main__:open_it"),
        ("x", "module:"),
    ],
)
def test_what_cannot_open_a_store_is_not_registered(scheme: str, opener: object) -> None:
    with pytest.raises(UsageError):
        register_store(scheme, opener)  # type: ignore[arg-type]
    assert scheme not in registry._openers


def test_a_store_is_opened_with_its_url_whoever_registered_it(shelf: str, tmp_path: Path) -> None:
    register_store("shelf", shelf)
    store = open_store(f"shelf:/{tmp_path}/run/")
    assert store.url == f"shelf:/{tmp_path}/run"
    store.create("x", b"1")
    assert (tmp_path / "run" / "x").read_bytes() == b"1"
    parent, name = open_parent(store.url)
    assert (parent.url, name) == (f"shelf:/{tmp_path}", "run")


def test_what_cannot_be_imported_says_so() -> None:
    register_store("shelf", "no_such_module:open")
    with raises(UsageError, where="shelf://", found="'no_such_module'"):
        open_store("shelf://x")


def test_a_whole_store_has_no_parent() -> None:
    with raises(UsageError, where="s3://here"):
        open_parent("s3://here")


def test_an_installed_package_brings_its_scheme_along(
    shelf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint(name="shelf", value=shelf, group="laststep.stores")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: [point])
    assert open_store(f"shelf:/{tmp_path}/run").url == f"shelf:/{tmp_path}/run"
    with raises(UsageError, expected="file://, gs://, s3://, shelf://"):
        open_store("ftp://x")


def test_the_flushers_process_opens_a_store_of_somebody_elses(shelf: str, tmp_path: Path) -> None:
    register_store("shelf", shelf)
    url = f"shelf:/{tmp_path}/run"
    state = {"w": torch.arange(6.0)}
    with laststep.Checkpointer(
        url, s=state, options=laststep.Options(progress=False)
    ) as checkpointer:
        assert checkpointer.path == url
        checkpointer.save(3).wait(PATIENCE_S)
        assert checkpointer._client.helper_pid is not None
    assert (tmp_path / "run" / "step-00000003.1-1" / "manifest.json").exists()
    found = laststep.load(url)
    assert torch.equal(found["s"]["w"], state["w"])
    alone = laststep.load(f"{url}/step-00000003.1-1")
    assert torch.equal(alone["s"]["w"], state["w"])
    with raises(NotFoundError, where=f"{url}/step-00000003.1-1"):
        laststep.open(f"{url}/step-00000003.1-1")
    with raises(UsageError, where=f"{url}/step-00000003.1-1", remedy=url):
        laststep.Checkpointer(f"{url}/step-00000003.1-1", s=state)


def test_a_store_of_this_process_alone_is_refused_for_a_flusher_of_its_own() -> None:
    register_store("shelf", DirectoryStore)
    with raises(UsageError, where="shelf://refused", remedy="flush='thread'"):
        laststep.Checkpointer("shelf://refused", s={"a": 1})


def test_what_is_written_to_a_folder_is_refused_for_a_store() -> None:
    with raises(UsageError, found="'shm://one-off'"):
        laststep.save({"a": 1}, "shm://one-off")
