"""Object stores whose server lacks something, or fails: a fake that does so on request."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import fake_s3
import pytest
import weed

from expect import raises
from laststep.errors import AlreadyExistsError, StorageError, UsageError
from laststep.storage import bucket, objects, transfers
from laststep.storage.bucket import Patience
from laststep.storage.objects import ObjectStore, probe
from laststep.storage.registry import open_store
from laststep.testing.stores import race_to_create, write_file

if TYPE_CHECKING:
    from collections.abc import Iterator

URL = "s3://bucket/run"
SECRETS = (*weed.KEYS.values(), "Signature=", "SESSION")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_s3.Server]:
    with fake_s3.running() as state:
        for name, value in {**weed.KEYS, "AWS_ENDPOINT_URL": state.endpoint}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_SESSION_TOKEN", "SESSION")
        monkeypatch.setattr(objects, "_probed", set())
        yield state


@pytest.fixture
def store(server: fake_s3.Server) -> ObjectStore:
    """One that has been probed."""
    opened = ObjectStore(URL, Patience(deadline_s=120, request_s=60, idle_s=30))
    opened.create("first", b"1")
    server.asked.clear()
    return opened


# What a server may lack


@pytest.mark.parametrize(
    ("lacks", "named"),
    [
        ("if-none-match", "If-None-Match"),
        ("if-match", "If-Match"),
        ("range", "Range"),
        ("list", "listings"),
    ],
)
def test_a_server_that_lacks_something_is_refused_and_that_is_named(
    server: fake_s3.Server, lacks: str, named: str
) -> None:
    server.lacks.add(lacks)
    with raises(StorageError, expected=named) as caught:
        ObjectStore(URL).create("x", b"1")
    assert not caught.value.transient
    assert caught.value.remedy is not None
    assert server.objects == {}, "something is left of the probe"


def test_a_probe_is_six_requests_and_made_once_by_a_process(server: fake_s3.Server) -> None:
    probe(ObjectStore(URL)._bucket)
    assert len(server.asked) == 6
    for folder in ("f", "g"):
        ObjectStore(URL).make_folder(folder)
    first_puts = [a for a in server.asked[6:] if a.method == "PUT" and ".probe-" in a.key]
    assert len({asked.key for asked in first_puts}) == 1


def test_who_only_looks_probes_nothing(server: fake_s3.Server) -> None:
    store = ObjectStore(URL)
    assert store.list("") == []
    assert not store.is_locked("x.lock")
    assert {asked.method for asked in server.asked} <= {"GET", "HEAD"}


# Answers that get lost


def test_who_created_a_file_and_was_not_told_is_not_told_that_it_exists(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    server.fail("lost", "PUT", 2, key="mine")
    store.create("mine", b"content")
    assert store.read("mine", limit_bytes=99) == b"content"


def test_the_same_bytes_of_somebody_else_are_not_taken_for_ones_own(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    ObjectStore(URL).create("x", b"same")
    server.fail("reset", "PUT", key="run/x")
    with pytest.raises(AlreadyExistsError):
        store.create("x", b"same")


def test_of_many_exactly_one_creates_though_answers_get_lost(server: fake_s3.Server) -> None:
    stores = [ObjectStore(URL) for _ in range(6)]
    stores[0].create("first", b"")
    for turn in range(5):
        server.fail("lost", "PUT", 3, key=f"x{turn}")
        won, lost = race_to_create(stores, f"x{turn}")
        assert won == [server.objects[f"run/x{turn}"].data]
        assert {type(error) for error in lost} == {AlreadyExistsError}


def test_an_upload_whose_last_answer_got_lost_is_complete(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    data = os.urandom(2 * transfers.PART_BYTES)
    server.fail("lost", "POST", query="uploadId")
    write_file(store, "x", data)
    assert server.objects["run/x"].data == data
    assert server.uploads == {}


def test_a_lease_is_taken_and_renewed_though_answers_get_lost(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    server.fail("lost", "PUT", 1, key="x.lock")
    lock = store.lock("x.lock")
    server.fail("lost", "PUT", 1, key="x.lock")
    lock._renew_now()
    assert not lock._over.is_set()
    lock.close()
    assert not store.is_locked("x.lock")


# Requests that fail


def test_a_conflict_of_two_puts_is_no_refusal(store: ObjectStore, server: fake_s3.Server) -> None:
    server.fail("409", "PUT", 2, key="run/x")
    store.create("x", b"1")
    assert server.objects["run/x"].data == b"1"


def test_one_failed_part_does_not_make_all_go_up_again(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    server.fail("503", "PUT", 2, query="partNumber")
    data = os.urandom(3 * transfers.PART_BYTES)
    write_file(store, "x", data)
    assert server.objects["run/x"].data == data
    begun = [asked for asked in server.asked if asked.method == "POST" and "uploads" in asked.query]
    assert len(begun) == 1


def test_a_part_is_tried_again_until_the_deadline(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    hasty = ObjectStore(URL, Patience(deadline_s=2, request_s=60, idle_s=30))
    server.fail("503", "PUT", 1000, query="partNumber")
    with raises(StorageError, found="503", transient=True):
        write_file(hasty, "x", bytes(2 * transfers.PART_BYTES))
    tried = [asked for asked in server.asked if "partNumber=1&" in asked.query]
    assert len(tried) > 2
    assert store.file_names("") == ("first",)


@pytest.mark.parametrize("kind", ["reset", "503", "truncated", "stalled"])
def test_what_fails_for_a_while_is_tried_again(
    store: ObjectStore, server: fake_s3.Server, pauses: list[float], kind: str
) -> None:
    data = os.urandom(transfers.PART_BYTES + 5000)
    if kind == "stalled":
        store = ObjectStore(URL, Patience(deadline_s=120, request_s=60, idle_s=0.5))
    if kind in ("reset", "503"):
        server.fail(kind, "PUT", 3, key="run/x")
        server.fail(kind, "POST", 2, key="run/x")
    write_file(store, "x", data)
    assert server.objects["run/x"].data == data
    server.fail(kind, "GET", 3, key="run/x")
    back = bytearray(len(data))
    assert store.open_reader("x").read_into(0, memoryview(back)) == len(data)
    assert back == data
    server.fail(kind, "GET", 1, key="run/first")
    assert store.read("first", limit_bytes=9) == b"1"


def test_what_fails_for_too_long_says_how_often_and_how_long_it_was_tried(
    server: fake_s3.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    clock = SimpleNamespace(
        sleep=waited.append, monotonic=lambda: time.monotonic() + sum(waited)
    )  # nothing waits
    monkeypatch.setattr(bucket, "time", clock)
    store = ObjectStore(URL, Patience(deadline_s=120, request_s=60, idle_s=30))
    server.fail("503", "*", 1000)
    with raises(StorageError, where="s3://bucket/run/x", found="503 SlowDown") as caught:
        store.read("x", limit_bytes=9)
    assert caught.value.transient
    assert len(server.asked) == len(waited) + 1 > 2


def test_a_failed_part_fails_the_file_and_aborts_the_upload(
    store: ObjectStore, server: fake_s3.Server
) -> None:
    server.fail("denied", "PUT", 1, query="partNumber=2")
    size = 3 * transfers.PART_BYTES
    writer = store.open_writer("x", expected_bytes=2 * size)
    memory = mmap.mmap(-1, size)

    def write() -> None:
        with memoryview(memory) as view:
            for offset in itertools.count(0, size):  # a part fails after the write that it is of
                writer.write_at(offset, view)

    with raises(StorageError, found="403") as caught:
        write()
    assert caught.value.__traceback__ is not None
    memory.close()  # while somebody handles the error, whose frames hold no view of it
    with raises(StorageError, found="403"):
        writer.finish(size)
    assert server.uploads == {}
    assert "run/x" not in server.objects


# Secrets


def test_no_error_and_no_log_has_a_key_or_a_signature(
    store: ObjectStore, server: fake_s3.Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    size = 2 * transfers.PART_BYTES
    writer = store.open_writer("y", expected_bytes=size)
    server.fail("denied", "*", 1000)
    for call in (
        lambda: store.create("x", b"1"),
        lambda: store.list(""),
        lambda: store.read("x", limit_bytes=9),
        lambda: store.delete("x"),
        lambda: store.open_reader("x"),
        lambda: (writer.write_at(0, memoryview(bytes(size))), writer.finish(size)),
        lambda: ObjectStore("s3://other/run").make_folder("x"),
    ):
        with raises(StorageError, found="403") as caught:
            call()
        error: BaseException | None = caught.value
        told = [caplog.text]
        while error is not None:
            told += [str(error), repr(error)]
            error = error.__cause__ or error.__context__
        assert not [secret for secret in SECRETS for text in told if secret in text]


@pytest.mark.parametrize(
    "url", ["s3://me:hidden@bucket/run", "gs://hidden@bucket", "az://a:hidden@b"]
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with raises(UsageError, where=f"{url.partition(':')[0]}://") as caught:
        open_store(url)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://", "s3:///run", "s3://bucket/run?x=1", "s3://bucket/a/../b"])
def test_a_url_that_names_no_place_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


def test_the_url_opens_the_same_place_again(server: fake_s3.Server) -> None:
    assert ObjectStore("s3://bucket/a/b/").url == "s3://bucket/a/b"
    assert ObjectStore("s3://bucket").url == "s3://bucket"
    assert open_store("gs://bucket/x").url == "gs://bucket/x"
