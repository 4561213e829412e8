"""Manifests of groups of ranks: identity, and nothing in them that their record does not vouch
for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laststep.codecs.digests import digest_text
from laststep.errors import Corrupt, Usage
from laststep.format.group import GroupManifest, decode, encode
from laststep.format.manifest import FileRecord


def file(rank: int, name: str = "") -> FileRecord:
    return FileRecord(
        name=name or f"r00000/model-r{rank:05d}.safetensors", size_bytes=9000 + rank,
        header_bytes=4096, header_digest=digest_text(b"x"), rank=rank,
    )  # fmt: skip


GROUP = GroupManifest(step=7, epoch=2, attempt=3, first=2, ranks=2, files=(file(2), file(3)))


def changed(record: Any, **fields: object) -> Any:
    return msgspec.structs.replace(record, **fields)


groups = st.builds(
    lambda first, ranks, step, wrote: GroupManifest(
        step=step, epoch=1, attempt=1, first=first, ranks=ranks,
        files=tuple(file(first + n) for n in range(ranks) if n not in wrote),
    ),
    st.integers(0, 200_000), st.integers(1, 400), st.integers(0, 2**63 - 1),
    st.sets(st.integers(0, 400)),
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(groups)
def test_a_group_survives(group: GroupManifest) -> None:
    record, data = encode(group)
    assert decode(data, record, where="here") == group
    assert (record.first, record.ranks) == (group.first, group.ranks)
    assert record.files == len(group.files)


def test_what_a_group_shares_is_counted_and_vouched_for() -> None:
    lent = changed(file(2), origin="step-00000006.2-2", lent=True, sharers=1)
    record, data = encode(changed(GROUP, files=(lent, file(3))))
    assert record.shared_bytes == lent.size_bytes
    assert decode(data, record, where="here").format == 2
    with pytest.raises(Corrupt, match="9002 of them shared"):
        decode(data, changed(record, shared_bytes=0), where="here")
    assert encode(GROUP)[0].shared_bytes == 0


def test_every_flipped_bit_and_every_other_length_is_corrupt() -> None:
    record, sound = encode(GROUP)
    data = bytearray(sound)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            decode(bytes(data), record, where="here")
        data[bit // 8] ^= 1 << bit % 8
    for other in [*(sound[:size] for size in range(len(sound))), sound + b" ", sound + b"\n"]:
        with pytest.raises(Corrupt):
            decode(other, record, where="here")


@pytest.mark.parametrize(
    "fields", [{"digest": digest_text(b"")}, {"first": 1}, {"ranks": 3}, {"files": 1},
               {"size_bytes": 1}], ids=str,
)  # fmt: skip
def test_a_group_that_its_record_does_not_vouch_for_is_corrupt(fields: dict[str, object]) -> None:
    record, data = encode(GROUP)
    with pytest.raises(Corrupt):
        decode(data, changed(record, **fields), where="here")


@pytest.mark.parametrize(
    "group",
    [
        changed(GROUP, ranks=0),
        changed(GROUP, ranks=1),
        changed(GROUP, first=3),
        changed(GROUP, files=(file(2), file(2))),
        changed(GROUP, files=(file(2, "../a.safetensors"),)),
        changed(GROUP, files=(file(2, "a/b/c.safetensors"),)),
        changed(GROUP, files=(file(2, "/a.safetensors"),)),
        changed(GROUP, files=(file(2, "a/.b.safetensors"),)),
        changed(GROUP, step=-1),
    ],
    ids=lambda group: None,
)
def test_an_unsound_group_is_never_written(group: GroupManifest) -> None:
    with pytest.raises(Usage):
        encode(group)
