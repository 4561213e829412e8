"""Object stores whose server refuses, is somewhere else, hangs up, or has more than one answer's
worth: on the fake, which does so on request."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import fake_s3
import pytest
from obstore import exceptions

from laststep.errors import NotFoundError, StorageError
from laststep.storage import bucket, objects, transfers
from laststep.storage.bucket import Patience, Trouble, persist
from laststep.storage.objects import ObjectStore
from laststep.testing.stores import write_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from laststep.storage.s3 import Uploads

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


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited before something was tried again; nothing waits."""
    waited: list[float] = []

    class Clock:
        @staticmethod
        def sleep(seconds: float) -> None:
            waited.append(seconds)

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + sum(waited)

    monkeypatch.setattr(bucket, "time", Clock)
    return waited


# Who is not there, or elsewhere


CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "list": lambda store: store.list(""),
    "create": lambda store: store.create("x", b"1"),
    "write": lambda store: write_file(store, "x", bytes(2 * transfers.PART_BYTES)),
    "lock": lambda store: store.lock("x.lock"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("kind", "said", "remedy"),
    [("absent", "404", "make the bucket"), ("redirect", "region", "AWS_REGION")],
)
def test_a_bucket_that_is_not_there_or_elsewhere_is_named_at_once(
    store: ObjectStore, server: fake_s3.Server, call: str, kind: str, said: str, remedy: str
) -> None:
    for method in ("PUT", "POST", "GET", "DELETE"):
        server.fail(kind, method, 1000)
    with pytest.raises(StorageError, match=said) as caught:
        CALLS[call](store)
    assert not caught.value.transient
    assert caught.value.remedy is not None
    assert remedy in caught.value.remedy


def test_a_file_that_is_deleted_while_it_is_read_is_not_found(store: ObjectStore) -> None:
    store.create("x", b"123")
    reader = store.open_reader("x")
    store.delete("x")
    with pytest.raises(NotFoundError):
        reader.read_into(0, memoryview(bytearray(3)))


def test_a_part_of_an_upload_that_somebody_has_aborted_fails_with_that(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    writer = store.open_writer("x", expected_bytes=2 * transfers.PART_BYTES)
    part = memoryview(bytes(transfers.PART_BYTES))
    writer.write_at(0, part)
    server.uploads.clear()
    with pytest.raises(StorageError, match="404 NoSuchUpload"):
        writer.write_at(transfers.PART_BYTES, part)
    writer.close()


# Connections


def kept_connections(store: ObjectStore, count: int) -> Uploads:
    """What makes uploads, with so many connections that it has used and kept."""
    uploads = store._uploads()
    assert uploads is not None
    connections = [uploads._connected() for _ in range(count)]
    for connection in connections:
        connection.request("GET", "/bucket/run/first")
        connection.getresponse().read()
    uploads._idle.extend(connections)
    return uploads


def test_connections_that_the_server_has_closed_cost_no_pause(
    store: ObjectStore, server: fake_s3.Server, pauses: list[float]
) -> None:
    uploads = kept_connections(store, 5)
    server.hang_up()
    uploads.begin("run/y", "token")
    assert pauses == []


def test_one_connection_that_fails_takes_the_others_of_its_age_along(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    uploads = kept_connections(store, 5)
    server.fail("reset", "POST")
    uploads.begin("run/y", "token")
    assert len(uploads._idle) == 1


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


def test_parts_of_a_write_go_up_side_by_side_from_its_memory(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    """The first is held back until the others have arrived."""
    server.fail("held", "PUT", query="partNumber=1&")
    data = os.urandom(4 * transfers.PART_BYTES)
    writer = store.open_writer("x", expected_bytes=len(data))
    assert isinstance(writer, transfers.PartsWriter)
    write = threading.Thread(target=writer.write_at, args=(0, memoryview(data)))
    write.start()
    wait_until(lambda: [len(pieces) for _, _, pieces in server.uploads.values()] == [3])
    assert writer._gathered == {}, "something was copied"
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
    last = [asked for asked in server.asked if asked.method == "POST" and "uploadId" in asked.query]
    assert len(last) == 2


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


def test_all_uploads_of_a_folder_are_aborted_whatever_they_are_called(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    store.make_folder("f")
    for number in range(fake_s3.PAGE + 5):
        server.uploads[f"u{number}"] = f"run/f/a>'b&<{number}\"", {}, {}
    server.uploads["other"] = "run/f2/x", {}, {}
    store.delete_folder("f")
    assert set(server.uploads) == {"other"}


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
        if key.endswith(".epochs.folder"):
            other.create("epochs/1", b"other's")
        return made

    monkeypatch.setattr(store._bucket, "create", create_and_sleep)
    store.make_folder("epochs")
    assert store.file_names("epochs") == ("1",)


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
    assert not lock.is_lost
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
    assert not lock.is_lost
    lock._renew_now()
    lock.close()
    assert not store.is_locked("x.lock")


def test_a_lease_that_somebody_has_removed_is_lost(store: ObjectStore) -> None:
    lock = store.lock("x.lock")
    store.delete("x.lock")
    lock._renew_now()
    assert lock.is_lost
    store.lock("x.lock").close()


def test_a_folder_for_temporary_files_that_is_not_there_is_a_failure_of_storage(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laststep.storage.s3.of_bucket", lambda bucket: None)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(StorageError, match="/nowhere"):
        store.open_writer("x", expected_bytes=1)


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
    with closing(lock), pytest.raises(StorageError, match="ask for the time"):
        ObjectStore(URL).is_locked("x.lock")


def test_a_file_that_cannot_be_looked_up_is_named_once(
    server: fake_s3.Server, store: ObjectStore
) -> None:
    server.fail("denied", "HEAD", 1)
    with pytest.raises(StorageError, match=r"(?<! at) at s3://bucket/run/first:"):
        store.open_reader("first")


def test_without_credentials_that_is_said_of_every_call(
    server: fake_s3.Server, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sign(*_: object) -> str:
        raise exceptions.UnauthenticatedError("no keys: hidden-from-all")

    monkeypatch.setattr("obstore.sign", sign)
    for call in (lambda: store.open_writer("x", expected_bytes=1), store._leases._clock.now_s):
        with pytest.raises(StorageError, match="access denied") as caught:
            call()
        assert "hidden" not in str(caught.value)


# How long


def test_pauses_grow_and_differ_between_clients(pauses: list[float]) -> None:
    def fail() -> None:
        raise Trouble("down", transient=True)

    with pytest.raises(StorageError, match=r"down, \d+ times"):
        persist(fail, what="ask", where="there", patience=Patience(deadline_s=58.0))
    longest = [min(0.1 * 2**turn, 10.0) for turn in range(len(pauses))]
    assert all(most / 2 <= pause <= most for most, pause in zip(longest, pauses, strict=True))
    assert len({pause / most for most, pause in zip(longest, pauses, strict=True)}) > 1


def test_what_is_asked_within_a_request_ends_with_its_deadline(pauses: list[float]) -> None:
    patience = Patience(deadline_s=100.0)

    def inner() -> None:
        raise Trouble("down", transient=True)

    def outer() -> None:
        if sum(pauses) < 90:
            raise Trouble("down", transient=True)
        persist(inner, what="look", where="there", patience=patience)

    with pytest.raises(StorageError, match="cannot look"):
        persist(outer, what="write", where="there", patience=patience)
    assert 90 <= sum(pauses) <= 100
