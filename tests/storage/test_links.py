"""Files that several folders of a bucket share, and what deletions, crashes and races leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake_s3
import pytest
import torch

import laststep
from expect import raises
from laststep.errors import AlreadyExistsError, NotFoundError, UsageError
from laststep.storage.bucket import Bucket
from laststep.storage.objects import ObjectStore
from laststep.testing.stores import write_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

URL = "s3://bucket/run"
DATA = b"what several checkpoints share" * 1000


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_s3.Server]:
    with fake_s3.named(monkeypatch) as state:
        yield state


def content(store: ObjectStore, name: str) -> bytes:
    reader = store.open_reader(name)
    data = bytearray(reader.size_bytes)
    reader.read_into(0, memoryview(data))
    return bytes(data)


def chain(store: ObjectStore, count: int = 3) -> None:
    """Folders `1`, `2`, … of which each shares the file of the one before it."""
    store.make_folder("1/deep")
    write_file(store, "1/deep/x", DATA)
    for number in range(2, count + 1):
        store.make_folder(f"{number}/deep")
        assert store.link(f"{number - 1}/deep/x", f"{number}/deep/x")


def test_a_file_lives_as_long_as_any_folder_shares_it(s3: str, tmp_path: Path) -> None:
    store = ObjectStore(f"{s3}{tmp_path}")
    chain(store)
    write_file(store, "1/own", b"1")
    for left in (("1", "2", "3"), ("2", "3"), ("3",)):
        reader = ObjectStore(store.url)
        assert reader.folder_names("") == left
        for folder in left:
            [entry] = reader.list(f"{folder}/deep")
            assert (entry.name, entry.size_bytes) == ("x", len(DATA))
            assert content(reader, f"{folder}/deep/x") == DATA
        store.delete_folder(left[0])
    assert store._bucket.below(store._bucket.prefix) == []


def test_a_name_that_is_taken_or_absent_is_not_linked(server: fake_s3.Server) -> None:
    store = ObjectStore(URL)
    chain(store, 2)
    for taken in ("1/deep/x", "2/deep/x"):
        with pytest.raises(AlreadyExistsError):
            store.link("1/deep/x", taken)
    with pytest.raises(NotFoundError):
        store.link("1/nothing", "2/y")
    with pytest.raises(NotFoundError):
        store.link("1/deep/x", "3/y")
    for name in ("1/.x.5.link", "1/.x.0123456789abcdef.linked"):
        with pytest.raises(UsageError):
            store.create(name, b"")


def test_a_link_that_is_deleted_takes_only_itself(server: fake_s3.Server) -> None:
    store = ObjectStore(URL)
    chain(store)
    ObjectStore(URL).delete("2/deep/x")
    assert store.file_names("2/deep") == ()
    store.delete_folder("1")
    assert content(store, "3/deep/x") == DATA
    ObjectStore(URL).delete("3/deep/x")
    assert not [key for key in server.objects if key.startswith("run/1")]


def test_a_file_that_others_link_to_is_not_deleted(server: fake_s3.Server) -> None:
    """Whoever copies a checkpoint anew deletes what an earlier copy has left in its folder."""
    store = ObjectStore(URL)
    chain(store, 2)
    store.delete_folder("1")
    store.make_folder("1/deep")
    store.delete("1/deep/x")
    assert content(store, "2/deep/x") == DATA
    store.delete_folder("2")
    store.delete("1/deep/x")
    assert store.file_names("1/deep") == ()


def saved(tmp_path: Path) -> tuple[str, str]:
    """Two checkpoints of a run in a bucket, of which the second shares a file of the first; their
    folders. `tmp_path / "run"` is their original."""
    model, other = torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)
    with laststep.Checkpointer(tmp_path / "run", model=model, other=other) as checkpointer:
        for step in range(2):
            checkpointer.save(step).wait()
            model.weight.data += 1
    laststep.copy(tmp_path / "run", URL)
    catalog = laststep.open(URL)
    return catalog[0].folder, catalog[1].folder


def test_a_copy_of_some_items_leaves_what_others_share(
    server: fake_s3.Server, tmp_path: Path
) -> None:
    first, second = saved(tmp_path)
    assert any(key.startswith(f"run/{second}/.other.") for key in server.objects)
    ObjectStore(URL).delete_folder(first, first="manifest.json")
    laststep.copy(tmp_path / "run", URL, 0, items=["model"])
    assert laststep.open(URL)[1].tensor("other/weight")[:].shape == (200, 200)


def test_a_link_that_has_lost_its_file_is_damage(server: fake_s3.Server, tmp_path: Path) -> None:
    saved(tmp_path)
    [link] = [key for key in server.objects if key.endswith(".link")]
    server.objects[link].data = b"../nowhere"
    model, other = torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)
    with laststep.Checkpointer(URL, model=model, other=other) as checkpointer:
        restored = checkpointer.restore()
    assert (restored.step, [skipped.step for skipped in restored.skipped]) == (0, [1])


def test_a_folder_that_is_made_again_keeps_what_others_share_of_the_old_one(
    server: fake_s3.Server,
) -> None:
    store = ObjectStore(URL)
    chain(store, 2)
    store.create("1/y", b"1")
    store.delete_folder("1")
    store.make_folder("1/deep")
    assert store.file_names("1") == ()
    assert content(store, "2/deep/x") == DATA
    store.delete_folder("1")
    assert content(store, "2/deep/x") == DATA
    store.delete_folder("2")
    assert server.objects == {}


def test_a_run_that_was_copied_without_metadata_shares_files_all_the_same(
    server: fake_s3.Server,
) -> None:
    """Tools that copy objects need not copy what these carry beside their bytes."""
    chain(ObjectStore(URL), 2)
    for kept in server.objects.values():
        kept.meta.clear()
    store = ObjectStore(URL)
    store.delete_folder("1")
    assert content(store, "2/deep/x") == DATA
    store.make_folder("3")
    assert store.link("2/deep/x", "3/x")
    store.delete_folder("2")
    assert content(store, "3/x") == DATA


def test_a_copy_of_a_run_ends_its_own_deletions_alone(
    server: fake_s3.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is copied with all its objects while a deletion in it is cut off."""
    store = ObjectStore(URL)
    chain(store, 2)
    with monkeypatch.context() as patched:
        crashing(patched, 2)  # the second marker is there, the first has gone
        with pytest.raises(_Crash):
            store.delete_folder("1")
    for key, kept in list(server.objects.items()):
        server.objects[key.replace("run/", "copy/", 1)] = kept
    clean(ObjectStore("s3://bucket/copy"))
    assert content(ObjectStore(URL), "2/deep/x") == DATA
    assert content(ObjectStore("s3://bucket/copy"), "2/deep/x") == DATA
    assert ObjectStore("s3://bucket/copy").folder_names("") == ("2",)


def test_a_link_that_was_changed_deletes_nothing_elsewhere(server: fake_s3.Server) -> None:
    store = ObjectStore(URL)
    chain(store, 2)
    for foreign in ("other/precious", "run/1/precious"):
        server.objects[foreign] = fake_s3.Kept(b"1", {}, 0.0)
    [link] = [key for key in server.objects if key.endswith(".link")]
    for way in (b"../../../other/precious", b"../../1/precious", b"/", b"\xff", b"../" * 50):
        server.objects[link].data = way
        ObjectStore(URL).delete("2/deep/x")
        server.objects[link] = fake_s3.Kept(way, {}, 0.0)
        with raises(NotFoundError, where="2/deep/x"):
            content(ObjectStore(URL), "2/deep/x")
    store.delete_folder("1")
    store.delete_folder("2")
    assert "other/precious" in server.objects


class _Crash(Exception):
    pass


def crashing(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Let so many changes of the bucket be made, and none after them."""
    for name in ("create", "delete"):
        change: Callable[..., object] = getattr(Bucket, name)

        def counted(self: Bucket, *given: object, change: Callable[..., object] = change) -> object:
            nonlocal left
            if not left:
                raise _Crash
            left -= 1
            return change(self, *given)

        monkeypatch.setattr(Bucket, name, counted)


def clean(store: ObjectStore) -> None:
    """What a cleaning does: end deletions that were begun."""
    for name in store.folder_names(""):
        if ".tmp-" in name:
            store.delete_folder(name)


@pytest.mark.parametrize("order", ["123", "213", "321", "231"])
def test_no_crash_loses_a_file_or_leaves_one_behind(
    server: fake_s3.Server, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Each deletion is cut off after any number of changes, and done again by somebody else."""
    for changes in range(100):
        store = ObjectStore(URL)
        chain(store)
        crashes = 0
        for turn, folder in enumerate(order):
            with monkeypatch.context() as patched:
                crashing(patched, changes)
                try:
                    ObjectStore(URL).delete_folder(folder)
                except _Crash:
                    crashes += 1
            for other in order[turn + 1 :]:
                assert content(ObjectStore(URL), f"{other}/deep/x") == DATA
            again = ObjectStore(URL)
            again.delete_folder(folder)
            clean(again)
        assert server.objects == {}, changes
        if not crashes:
            return
    raise AssertionError("a deletion has no end")


def test_a_link_that_was_cut_off_is_none_and_leaves_nothing(
    server: fake_s3.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes in range(3):
        store = ObjectStore(URL)
        chain(store, 1)
        store.make_folder("2")
        with monkeypatch.context() as patched:
            crashing(patched, changes)
            if changes < 2:
                with pytest.raises(_Crash):
                    store.link("1/deep/x", "2/x")
            else:
                store.link("1/deep/x", "2/x")
        for folder in ("1", "2"):
            ObjectStore(URL).delete_folder(folder)
        assert server.objects == {}


def test_whoever_links_while_a_folder_is_deleted_has_the_file_or_is_told(
    server: fake_s3.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion happens in the middle of the link, before each of its requests."""
    once = Bucket._once
    for moment in range(100):
        store = ObjectStore(URL)
        chain(store, 2)
        store.delete_folder("1")
        store.make_folder("3")
        seen = 0

        def ask(
            self: Bucket,
            call: Callable[[], object],
            *,
            may_miss: bool,
            moment: int = moment,
            store: ObjectStore = store,
        ) -> object:
            nonlocal seen
            if self is store._bucket:
                seen += 1
                if seen == moment + 1:
                    ObjectStore(URL).delete_folder("2")
            return once(self, call, may_miss=may_miss)

        with monkeypatch.context() as patched:
            patched.setattr(Bucket, "_once", ask)
            try:
                linked = store.link("2/deep/x", "3/x")
            except NotFoundError:
                linked = False
        assert not linked or content(ObjectStore(URL), "3/x") == DATA
        ObjectStore(URL).delete_folder("2")
        ObjectStore(URL).delete_folder("3")
        assert server.objects == {}, moment
        if seen <= moment:
            return
    raise AssertionError("a link has no end")
