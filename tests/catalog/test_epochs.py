"""Epoch records: claiming, and what damage does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.catalog import epochs
from laststep.catalog.epochs import EpochRecord, Epochs
from laststep.codecs.digests import digest_text
from laststep.errors import Corrupt, Usage
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

_RECORD = EpochRecord(
    format=1, epoch=7, continues=(3, 17), host="h", pid=1, boot="b", process_started="9",
    created_s=1.5,
)  # fmt: skip


def _sealed(content: bytes) -> bytes:
    return b'{"digest":"%s","epoch":%s}' % (digest_text(content).encode(), content)


def test_a_record_survives_the_round_trip() -> None:
    assert epochs.decode(epochs.encode(_RECORD), epoch=7, where="x") == _RECORD


@given(st.data())
def test_any_changed_bit_of_a_record_is_noticed(data: st.DataObject) -> None:
    good = epochs.encode(_RECORD)
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        epochs.decode(bytes(bad), epoch=7, where="x")


@given(st.binary(max_size=60))
def test_nonsense_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        epochs.decode(data, epoch=7, where="x")


def test_a_record_of_another_epoch_or_that_continues_from_the_future_is_corrupt() -> None:
    with pytest.raises(Corrupt):
        epochs.decode(epochs.encode(_RECORD), epoch=8, where="x")
    future = msgspec.structs.replace(_RECORD, continues=(7, 1))
    with pytest.raises(Corrupt, match="earlier epoch"):
        epochs.decode(epochs.encode(future), epoch=7, where="x")


def test_a_record_of_a_later_format_asks_for_an_upgrade() -> None:
    data = _sealed(b'{"format":2,"what":"ever"}')
    with pytest.raises(Usage, match="upgrade"):
        epochs.decode(data, epoch=7, where="x")


def test_epochs_are_claimed_one_after_another_by_many_at_once(tmp_path: Path) -> None:
    claimed: list[int] = []

    def claim() -> None:
        claimed.append(Epochs(DirectoryStore(tmp_path)).claim(None, above=4))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(5, 13))
    assert Epochs(DirectoryStore(tmp_path)).numbers() == tuple(range(5, 13))


def test_the_record_says_who_claimed_it(tmp_path: Path) -> None:
    numbers = Epochs(DirectoryStore(tmp_path))
    record = numbers.read(numbers.claim(None, above=0))
    me = epochs.this_writer()
    assert record is not None
    assert (record.host, record.pid, record.boot) == (me.host, me.pid, me.boot)
    assert epochs.is_here(record)
    assert not epochs.is_here(msgspec.structs.replace(record, boot="other", host="other"))


@pytest.mark.parametrize("continues", [(2, 1), (0, 1), (1, 0)])
def test_an_epoch_cannot_continue_from_what_is_not_there(
    tmp_path: Path, continues: tuple[int, int]
) -> None:
    numbers = Epochs(DirectoryStore(tmp_path))
    numbers.claim(None, above=0)
    with pytest.raises(Usage, match="does not know"):
        numbers.claim(continues, above=0)
