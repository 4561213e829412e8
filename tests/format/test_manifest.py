"""Manifests: identity, the exact envelope, and no flipped bit that goes unnoticed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laststep.codecs.digests import digest_text
from laststep.errors import Corrupt, Usage
from laststep.format.manifest import (
    Abort,
    ClassRecord,
    Commit,
    FileRecord,
    GroupRecord,
    ItemRecord,
    decode,
    encode,
)
from laststep.format.spans import Span

FILE = FileRecord(
    name="shared.safetensors", size_bytes=9000, header_bytes=4096, header_digest=digest_text(b"x")
)
ITEM = ItemRecord(name="model", kind="module", file=FILE.name, tensors=3, size_bytes=4000)
COMMIT = Commit(
    run="8f14e45f",
    step=100,
    epoch=3,
    attempt=17,
    created_s=1763172000.25,
    laststep="0.1.0",
    items=(ITEM,),
    files=(FILE,),
)
ABORT = Abort(reason="no space left on device", by="rank 3")


def changed(record: Any, **fields: object) -> Any:
    return msgspec.structs.replace(record, **fields)


counts = st.integers(0, 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
metrics = st.dictionaries(texts, st.floats(allow_nan=False) | st.integers() | texts | st.booleans())
metadata = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers(), inner, max_size=3),
    max_leaves=5,
)
commits = st.builds(
    Commit,
    run=texts,
    step=counts,
    epoch=counts,
    attempt=counts,
    created_s=st.floats(0, 1e18),
    laststep=texts,
    items=st.sampled_from([(), (ITEM,)]),
    files=st.just((FILE,)),
    metrics=metrics,
    metadata=metadata,
    continues=st.none() | st.just("step-00000100.3-17"),
    references=st.sampled_from([(), ("step-00000090.3-16",)]),
)
GROUPS = tuple(
    GroupRecord(name=f"groups/r{first:05d}.json", digest=digest_text(b""), first=first, ranks=3,
                files=7, size_bytes=10**15)
    for first in (0, 3)
)  # fmt: skip
CLASSES = (
    ClassRecord(table="0" * 32, spans=(Span(0, 3, 2),)),
    ClassRecord(table="1" * 32, spans=(Span(1, 1), Span(3, 1), Span(5, 1))),
)
GROUPED = changed(COMMIT, files=(), groups=GROUPS, classes=CLASSES, ranks=6)
commits |= st.builds(
    lambda commit, classes: changed(
        commit, files=(), groups=GROUPS, classes=CLASSES if classes else (), ranks=6
    ),
    commits,
    st.booleans(),
)
aborts = st.builds(Abort, reason=texts, by=texts)


@settings(max_examples=200, deadline=None)
@given(commits | aborts)
def test_a_decision_survives(decision: Commit | Abort) -> None:
    assert decode(encode(decision), where="here") == decision


LENT = changed(FILE, name="m~3-16.safetensors", origin="step-00000090.3-16", lent=True, sharers=2)


def test_what_was_written_for_earlier_checkpoints_is_counted_and_needs_format_2() -> None:
    assert (COMMIT.shared_bytes, COMMIT.new_bytes, COMMIT.format) == (0, 9000, 1)
    borrowing = changed(COMMIT, files=(FILE, LENT))
    assert (borrowing.shared_bytes, borrowing.new_bytes) == (9000, 9000)
    groups = (changed(GROUPS[0], shared_bytes=10**14), GROUPS[1])
    grouped = changed(GROUPED, groups=groups)
    assert (grouped.shared_bytes, grouped.new_bytes) == (10**14, 2 * 10**15 - 10**14)
    for commit in (borrowing, grouped):
        assert commit.format == 2
        assert decode(encode(commit), where="here") == commit
    assert b"shared_bytes" not in encode(GROUPED)
    with pytest.raises(Usage, match="shared bytes"):
        encode(changed(grouped, groups=(changed(groups[0], shared_bytes=10**16), GROUPS[1])))


@pytest.mark.parametrize("decision", [COMMIT, GROUPED, ABORT])
def test_every_flipped_bit_is_corrupt(decision: Commit | Abort) -> None:
    data = bytearray(encode(decision))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            decode(bytes(data), where="here")
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("decision", [COMMIT, ABORT])
def test_every_truncated_or_longer_manifest_is_corrupt(decision: Commit | Abort) -> None:
    data = encode(decision)
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            decode(data[:size], where="here")
    for more in (b" ", b"\n", b"}", b"\0"):
        with pytest.raises(Corrupt):
            decode(data + more, where="here")


def test_a_commit_of_groups_knows_how_much_there_is_without_them() -> None:
    assert (GROUPED.size_bytes, GROUPED.file_count) == (2 * 10**15, 14)
    assert (COMMIT.size_bytes, COMMIT.file_count) == (9000, 1)
    content = msgspec.json.decode(encode(GROUPED))["manifest"]
    assert "files" not in content
    assert content["classes"][0]["spans"] == [[0, 3, 2]]
    assert content["classes"][1]["spans"] == [[1, 1], [3, 1], [5, 1]]
    assert not {"groups", "classes", "ranks"} & set(msgspec.json.decode(encode(COMMIT))["manifest"])


def test_the_envelope_is_as_the_format_says() -> None:
    data = encode(ABORT)
    content = b'{"format":1,"decision":"abort","reason":"no space left on device","by":"rank 3"}'
    seal = digest_text(content).encode()
    assert data == b'{"digest": "' + seal + b'", "manifest": ' + content + b"}"


def test_metrics_that_are_no_finite_numbers_survive() -> None:
    commit = changed(
        COMMIT, metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1, "e": 1.0}
    )
    found = decode(encode(commit), where="here")
    assert isinstance(found, Commit)
    assert math.isnan(found.metrics["a"])  # type: ignore[arg-type]
    assert (found.metrics["b"], found.metrics["c"]) == (math.inf, -math.inf)
    assert type(found.metrics["d"]) is int
    assert type(found.metrics["e"]) is float


def test_a_metric_named_like_a_tag_is_a_metric() -> None:
    commit = changed(COMMIT, metrics={"$": "tensor"})
    assert decode(encode(commit), where="here") == commit


def test_metadata_keep_their_types() -> None:
    commit = changed(COMMIT, metadata={1: (2, b"x")})
    found = decode(encode(commit), where="here")
    assert isinstance(found, Commit)
    assert found.metadata == {1: (2, b"x")}
    assert COMMIT.metadata is None


def test_two_commits_do_not_share_their_default_metrics() -> None:
    def commit() -> Commit:
        return Commit(
            run="", step=0, epoch=0, attempt=0, created_s=0.0, laststep="", items=(), files=()
        )

    assert commit().metrics is not commit().metrics


@pytest.mark.parametrize(
    "decision",
    [
        changed(COMMIT, step=-1),
        changed(COMMIT, epoch=1 << 63),
        changed(COMMIT, created_s=math.nan),
        changed(COMMIT, files=(changed(FILE, name="a/b/c.safetensors"),), items=()),
        changed(COMMIT, files=(changed(FILE, name="a/.b.safetensors"),), items=()),
        changed(COMMIT, files=(changed(FILE, name="../b.safetensors"),), items=()),
        changed(COMMIT, files=(changed(FILE, name="a/.safetensors"),), items=()),
        changed(COMMIT, files=(changed(FILE, rank=1),)),
        changed(COMMIT, ranks=0),
        changed(COMMIT, ranks=(1 << 24) + 1),
        changed(COMMIT, files=(FILE, FILE)),
        changed(COMMIT, files=()),
        changed(COMMIT, files=(changed(FILE, header_bytes=100),)),
        changed(COMMIT, files=(changed(FILE, header_digest="xxh3-128:0"),)),
        changed(COMMIT, metrics={"loss": [1]}),
        changed(COMMIT, metrics={1: 1}),
        changed(COMMIT, metadata=object()),
        changed(COMMIT, run="\ud800"),
        changed(COMMIT, continues=".."),
        changed(ABORT, format=2),
    ],
    ids=lambda decision: None,
)
def test_an_unsound_decision_is_never_written(decision: Commit | Abort) -> None:
    with pytest.raises(Usage):
        encode(decision)
