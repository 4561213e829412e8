"""Object stores whose server refuses, is somewhere else, hangs up, or has more than one answer's
worth: on the fake, which does so on request."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import fake_s3
import pytest
from obstore import exceptions

from expect import raises
from laststep.errors import NotFoundError, StorageError
from laststep.storage import objects, transfers
from laststep.storage.bucket import Patience, Trouble, persist
from laststep.storage.objects import ObjectStore
from laststep.testing.stores import write_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


URL = "s3://bucket/run"
PATIENCE = Patience(deadline_s=120, request_s=60, idle_s=30)
"""Longer than any answer takes on a busy machine: nothing is asked twice because of that."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_s3.Server]:
    with fake_s3.named(monkeypatch) as state:
        yield state


@pytest.fixture
def store(server: fake_s3.Server) -> ObjectStore:
    opened = ObjectStore(URL, PATIENCE)
    opened.create("first", b"1")
    server.asked.clear()
    return opened


# Who is not there, or elsewhere


CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "list": lambda store: store.list(""),
    "create": lambda store: store.create("x", b"1"),
    "write": lambda store: write_file(store, "x", bytes(2 * transfers.PART_BYTES)),
    "lock": lambda store: store.lock("x.lock"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("kind", "said"), [("absent", "404"), ("redirect", "region")])
def test_a_bucket_that_is_not_there_or_elsewhere_is_named_at_once(
    store: ObjectStore, server: fake_s3.Server, call: str, kind: str, said: str
) -> None:
    for method in ("PUT", "POST", "GET", "DELETE"):
        server.fail(kind, method, 1000)
    with raises(StorageError, found=said) as caught:
        CALLS[call](store)
    assert not caught.value.transient


def test_a_file_that_is_deleted_while_it_is_read_is_not_found(store: ObjectStore) -> None:
    store.create("x", b"123")
    reader = store.open_reader("x")
    store.delete("x")
    with pytest.raises(NotFoundError):
        reader.read_into(0, memoryview(bytearray(3)))


def test_a_part_of_an_upload_that_somebody_has_aborted_fails_with_that(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    size = 4 * transfers.PART_BYTES
    writer = store.open_writer("x", expected_bytes=size)
    writer.write_at(0, memoryview(bytes(size // 2)))
    wait_until(lambda: [len(pieces) for _, _, pieces in server.uploads.values()] == [2])
    server.uploads.clear()
    writer.write_at(size // 2, memoryview(bytes(size // 2)))
    with raises(StorageError, found="404 NoSuchUpload"):
        writer.finish(size)


# Connections


def test_a_part_that_goes_up_slowly_is_waited_for_as_long_as_it_goes(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    """All of it takes more than 3 s, a MiB 0.4 s, and a standstill may take 2.5."""
    store = ObjectStore(URL, Patience(deadline_s=120, request_s=60, idle_s=2.5))
    server.fail("slow", "PUT", query="partNumber=1")
    data = os.urandom(2 * transfers.PART_BYTES)
    write_file(store, "x", data)
    assert server.objects["run/x"].data == data
    parts = [asked for asked in server.asked if "partNumber=1&" in asked.query]
    assert len(parts) == 1, "it was tried again"


def test_parts_of_a_write_go_up_side_by_side(store: ObjectStore, server: fake_s3.Server) -> None:
    """The first is held back until the others have arrived."""
    server.fail("held", "PUT", query="partNumber=1&")
    data = os.urandom(4 * transfers.PART_BYTES)
    writer = store.open_writer("x", expected_bytes=len(data))
    write = threading.Thread(target=writer.write_at, args=(0, memoryview(data)))
    write.start()
    wait_until(lambda: [len(pieces) for _, _, pieces in server.uploads.values()] == [3])
    server.released.set()
    write.join()
    writer.finish(len(data))
    assert server.objects["run/x"].data == data


def test_an_answer_that_is_cut_off_is_not_believed(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    server.fail("truncated", "POST", 1, query="uploads")
    server.fail("truncated", "POST", 1, query="uploadId")
    data = os.urandom(2 * transfers.PART_BYTES)
    write_file(store, "x", data)
    assert server.objects["run/x"].data == data


def test_a_file_of_too_many_parts_is_refused(
    store: ObjectStore, server: fake_s3.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack may become larger than its writer was told."""
    monkeypatch.setattr(transfers, "MOST_PARTS", 2)
    writer = store.open_writer("x", expected_bytes=1)
    part = memoryview(bytes(transfers.PART_BYTES))
    for number in range(2):
        writer.write_at(number * len(part), part)
    with raises(StorageError, where="s3://bucket/run/x", found=str(3 * len(part))):
        writer.write_at(2 * len(part), part)
    with pytest.raises(StorageError):
        writer.finish(3 * len(part))
    assert server.uploads == {}


# More than one answer holds


def test_lists_and_deletions_go_past_a_thousand_names(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    store.make_folder("f")
    names = [f"x{number:04}" for number in range(2 * fake_s3.PAGE + 10)]
    for name in names:
        server.objects[f"run/f/{name}"] = fake_s3.Kept(b"", {}, 0.0)
    assert [entry.name for entry in store.list("f")] == names
    store.delete_folder("f")
    assert set(server.objects) == {"run/first"}


def test_a_run_may_be_all_of_a_bucket(server: fake_s3.Server) -> None:
    store = ObjectStore("s3://bucket", PATIENCE)
    store.make_folder("f/g")
    data = os.urandom(transfers.PART_BYTES + 1)
    write_file(store, "f/g/x", data)
    store.create("y", b"1")
    assert [(entry.name, entry.is_folder) for entry in store.list("")] == [
        ("f", True),
        ("y", False),
    ]
    assert store.file_names("f/g") == ("x",)
    assert store.read("f/g/x", limit_bytes=len(data)) == data
    store.delete_folder("f")
    store.delete("y")
    assert server.objects == {}


# Two at once


def test_what_another_puts_into_a_folder_that_was_just_made_stays(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one found the folder made, and goes on, before its maker does."""
    other = ObjectStore(URL)
    create = store._bucket.create

    def create_and_sleep(key: str, data: bytes) -> object:
        made = create(key, data)
        if key.endswith(".terms.folder"):
            other.create("terms/1", b"other's")
        return made

    monkeypatch.setattr(store._bucket, "create", create_and_sleep)
    store.make_folder("terms")
    assert store.file_names("terms") == ("1",)


def test_a_folder_that_is_made_again_while_a_deleter_sleeps_keeps_what_it_has(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ObjectStore(URL)
    store.make_folder("f")
    store.create("f/old", b"1")

    def head_and_sleep(key: str) -> object:
        found = head(key)
        if key.endswith("/.f.folder") and found is None and not made:
            made.append(key)
            other.make_folder("f")
            other.create("f/new", b"2")
        return found

    head, made = store._bucket.head, list[str]()
    monkeypatch.setattr(store._bucket, "head", head_and_sleep)
    store.delete_folder("f")
    assert made
    assert other.file_names("f") == ("new",)


def test_a_lease_that_was_renewed_after_a_look_at_it_is_not_taken(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that call equal bytes by the same tag must not take a renewal for no change."""
    lock = store.lock("x.lock")
    found = store._bucket.head(store._key("x.lock"))
    assert found is not None
    lock._renew_now()
    assert store._bucket.replace(store._key("x.lock"), b"{}", found.version) is None
    lock._renew_now()
    assert not lock._over.is_set()
    lock.close()


def test_a_lease_whose_renewal_came_through_though_it_failed_is_not_lost(
    server: fake_s3.Server, store: ObjectStore
) -> None:
    hasty = ObjectStore(URL, Patience(deadline_s=0.0, request_s=60, idle_s=30))
    lock = hasty.lock("x.lock")
    server.fail("lost", "PUT", 1, key="x.lock")
    with pytest.raises(StorageError):
        lock._renew_now()
    lock._renew_now()
    assert not lock._over.is_set()
    lock._renew_now()
    lock.close()
    assert not store.is_locked("x.lock")


def test_a_lease_that_somebody_has_removed_is_lost(store: ObjectStore) -> None:
    lock = store.lock("x.lock")
    store.delete("x.lock")
    lock._renew_now()
    assert lock._over.is_set()
    store.lock("x.lock").close()


def test_a_folder_for_temporary_files_that_is_not_there_is_a_failure_of_storage(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "EARLY_BYTES", 0)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    writer = store.open_writer("x", expected_bytes=2)
    with pytest.raises(StorageError) as caught:
        writer.write_at(1, memoryview(b"1"))
    assert caught.value.where == "/nowhere"
    writer.close()


@pytest.mark.parametrize("date", [None, "yesterday"])
def test_a_server_that_does_not_tell_the_time_is_a_failure_of_storage(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, date: str | None
) -> None:
    monkeypatch.setattr(objects.Holder, "is_gone", False)
    lock = store.lock("x.lock")

    def send_header(self: object, name: str, value: str) -> None:
        if name == "Date":
            value = date or ""
            if date is None:
                return
        sent(self, name, value)

    sent = fake_s3._Handler.send_header
    monkeypatch.setattr(fake_s3._Handler, "send_header", send_header)
    with closing(lock), raises(StorageError, where=URL):
        ObjectStore(URL).is_locked("x.lock")


def test_a_file_that_cannot_be_looked_up_is_named_once(
    server: fake_s3.Server, store: ObjectStore
) -> None:
    server.fail("denied", "HEAD", 1)
    with raises(StorageError, where="s3://bucket/run/first", found="403"):
        store.open_reader("first")


def test_a_request_without_credentials_says_so(
    server: fake_s3.Server, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sign(*_: object) -> str:
        raise exceptions.UnauthenticatedError("no keys: hidden-from-all")

    monkeypatch.setattr("obstore.sign", sign)
    with raises(StorageError, found="access denied") as caught:
        store._leases.now_s()
    assert "hidden" not in str(caught.value)


# How long


def test_pauses_grow_and_differ_between_clients(pauses: list[float]) -> None:
    def fail() -> None:
        raise Trouble("down", transient=True)

    with pytest.raises(StorageError, match=r"\d+.*\d+\.\d s"):
        persist(fail, what="ask", where="there", patience=Patience(deadline_s=58.0))
    longest = [min(0.1 * 2**turn, 10.0) for turn in range(len(pauses))]
    assert all(most / 2 <= pause <= most for most, pause in zip(longest, pauses, strict=True))
    assert len({pause / most for most, pause in zip(longest, pauses, strict=True)}) > 1
