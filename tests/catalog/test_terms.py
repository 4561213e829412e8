"""Epoch records: claiming, and what damage does."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expect import raises
from laststep.catalog import terms
from laststep.catalog.terms import TermRecord, Terms, Trainer
from laststep.codecs.digests import digest_text
from laststep.errors import AbortedError, CorruptError, StorageError
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import Disk

if TYPE_CHECKING:
    from pathlib import Path

_RECORD = TermRecord(
    format=1,
    term=7,
    continues=(3, 17),
    host="h",
    pid=1,
    boot="b",
    process_started="9",
    created_s=1.5,
)


def _sealed(content: bytes) -> bytes:
    return b'{"digest":"%s","term":%s}' % (digest_text(content).encode(), content)


def test_a_record_survives_the_round_trip() -> None:
    assert terms.decode(terms.encode(_RECORD), term=7, where="x") == _RECORD


@given(st.data())
def test_any_changed_bit_of_a_record_is_noticed(data: st.DataObject) -> None:
    good = terms.encode(_RECORD)
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptError):
        terms.decode(bytes(bad), term=7, where="x")


@given(st.binary(max_size=60))
def test_nonsense_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        terms.decode(data, term=7, where="x")


def test_a_record_of_another_epoch_or_that_continues_from_the_future_is_corrupt() -> None:
    with pytest.raises(CorruptError):
        terms.decode(terms.encode(_RECORD), term=8, where="x")
    future = msgspec.structs.replace(_RECORD, continues=(7, 1))
    with raises(CorruptError, where="x", found="(7, 1)"):
        terms.decode(terms.encode(future), term=7, where="x")


def claimed_by(folder: Path, writer: Trainer, *, seen: int, orphan: bool = False) -> int:
    """The term that a start takes which saw that one."""
    return Terms(DirectoryStore(folder)).claim(None, seen=seen, writer=writer, orphan=orphan)


def test_of_many_that_saw_the_same_epoch_one_claims_the_next(tmp_path: Path) -> None:
    claimed: list[int] = []
    superseded: list[AbortedError] = []

    def claim() -> None:
        try:
            claimed.append(claimed_by(tmp_path, terms.new_start(), seen=4))
        except AbortedError as error:
            superseded.append(error)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert claimed == [5]
    assert len(superseded) == 7
    assert Terms(DirectoryStore(tmp_path)).numbers() == (5,)


def test_who_saw_an_older_epoch_claims_none(tmp_path: Path) -> None:
    early, late = terms.new_start(), terms.new_start()
    assert claimed_by(tmp_path, late, seen=0) == 1
    for _ in range(2):
        with raises(AbortedError, where=tmp_path, found=f"process {late.pid}"):
            claimed_by(tmp_path, early, seen=0)
    assert Terms(DirectoryStore(tmp_path)).numbers() == (1,)


def test_a_start_is_not_in_its_own_way(tmp_path: Path) -> None:
    start, other = terms.new_start(), terms.new_start()
    assert [claimed_by(tmp_path, start, seen=0) for _ in range(3)] == [1, 2, 3]
    assert claimed_by(tmp_path, other, seen=3) == 4
    with pytest.raises(AbortedError):
        claimed_by(tmp_path, start, seen=0)


def test_the_epoch_of_an_orphan_is_in_nobodys_way(tmp_path: Path) -> None:
    live, dead = terms.new_start(), terms.new_start()
    assert claimed_by(tmp_path, dead, seen=0, orphan=True) == 1
    assert claimed_by(tmp_path, live, seen=0) == 2
    with pytest.raises(AbortedError):
        claimed_by(tmp_path, dead, seen=0, orphan=True)


def test_an_epoch_whose_record_may_not_be_durable_is_claimed_anew(tmp_path: Path) -> None:
    class LastSyncFails(Disk):
        fails = True

        def sync_folder(self, path: str) -> None:
            if path.endswith("terms") and self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().sync_folder(path)

    disk, start = LastSyncFails(), terms.new_start()
    numbers = Terms(DirectoryStore(tmp_path, disk=disk))
    with pytest.raises(StorageError):
        numbers.claim(None, seen=0, writer=start)
    disk.fails = False
    assert numbers.claim(None, seen=0, writer=start) == 2


def test_the_record_says_who_claimed_it(tmp_path: Path) -> None:
    numbers = Terms(DirectoryStore(tmp_path))
    record = numbers.read(numbers.claim(None, seen=0, writer=terms.this_writer()))
    me = terms.this_writer()
    assert record is not None
    assert (record.host, record.pid, record.boot) == (me.host, me.pid, me.boot)
    assert terms.is_here(record)
    assert not terms.is_here(msgspec.structs.replace(record, boot="other", host="other"))
