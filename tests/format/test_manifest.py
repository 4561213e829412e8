"""Manifests: identity, the exact envelope, and no flipped bit that goes unnoticed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laststep.codecs.digests import digest_text
from laststep.errors import CorruptError, UsageError
from laststep.format.manifest import (
    Abort,
    Commit,
    ItemRecord,
    LayoutGroupRecord,
    Span,
    WrittenIndexes,
    decode,
    encode,
)

ITEM = ItemRecord(name="model", kind="module", tensors=3, size_bytes=4000)
WRITTEN = WrittenIndexes(indexes=bytes(range(16)), files=2, size_bytes=9000)
COMMIT = Commit(
    run="8f14e45f",
    step=100,
    term=3,
    attempt=17,
    created_s=1763172000.25,
    laststep="0.1.0",
    items=(ITEM,),
    written=WRITTEN,
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
    term=counts,
    attempt=counts,
    created_s=st.floats(0, 1e18),
    laststep=texts,
    items=st.sampled_from([(), (ITEM,)]),
    written=st.builds(
        WrittenIndexes,
        indexes=st.binary(min_size=16, max_size=16),
        files=counts,
        size_bytes=counts,
        lossy=st.sampled_from([(), ("bf16",), ("bf16", "int8")]),
    ),
    metrics=metrics,
    metadata=metadata,
    continues=st.none() | st.just("step-00000100.3-17"),
    omitted_items=st.just(()),
)
CLASSES = (
    LayoutGroupRecord(local_layout="0" * 32, spans=(Span(0, 3, 2),)),
    LayoutGroupRecord(local_layout="1" * 32, spans=(Span(1, 1), Span(3, 1), Span(5, 1))),
)
OF_RANKS = changed(
    COMMIT, ranks=6, layout_groups=CLASSES, written=changed(WRITTEN, indexes=bytes(range(6 * 16)))
)
commits |= st.builds(
    lambda commit, layout_groups: changed(
        commit, ranks=6, layout_groups=CLASSES if layout_groups else (), written=OF_RANKS.written
    ),
    commits,
    st.booleans(),
)
commits |= st.builds(
    lambda commit: changed(commit, items=(ITEM,), omitted_items=("z",)),
    commits.filter(lambda commit: not commit.layout_groups),
)
aborts = st.builds(Abort, reason=texts, by=texts)


@settings(max_examples=50, deadline=None)
@given(commits | aborts)
def test_a_decision_survives(decision: Commit | Abort) -> None:
    assert decode(encode(decision), where="here") == decision


def test_what_ranks_have_written_adds_up() -> None:
    one = WrittenIndexes(indexes=b"a" * 16, files=2, size_bytes=10, shared_bytes=3, lossy=("int8",))
    other = WrittenIndexes(indexes=b"b" * 16, files=1, size_bytes=5, lossy=("bf16", "int8"))
    assert one.plus(other) == WrittenIndexes(
        indexes=b"a" * 16 + b"b" * 16,
        files=3,
        size_bytes=15,
        shared_bytes=3,
        lossy=("bf16", "int8"),
    )
    assert WrittenIndexes().plus(one) == one


def test_a_commit_knows_what_was_written() -> None:
    commit = changed(OF_RANKS, written=changed(OF_RANKS.written, shared_bytes=4000))
    assert (commit.written.size_bytes, commit.written.shared_bytes) == (9000, 4000)
    assert commit.index_count == 6
    assert commit.index_digest(2) == bytes(range(32, 48))


def test_there_may_be_more_indexes_than_ranks() -> None:
    commit = changed(COMMIT, written=changed(WRITTEN, indexes=bytes(48)))
    assert decode(encode(commit), where="here").index_count == 3


@pytest.mark.parametrize("decision", [COMMIT, OF_RANKS, ABORT])
def test_every_flipped_bit_is_corrupt(decision: Commit | Abort) -> None:
    data = bytearray(encode(decision))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            decode(bytes(data), where="here")
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("decision", [COMMIT, ABORT])
def test_every_truncated_or_longer_manifest_is_corrupt(decision: Commit | Abort) -> None:
    data = encode(decision)
    for size in range(len(data)):
        with pytest.raises(CorruptError):
            decode(data[:size], where="here")
    for more in (b" ", b"\n", b"}", b"\0"):
        with pytest.raises(CorruptError):
            decode(data + more, where="here")


def test_defaults_are_left_out() -> None:
    content = msgspec.json.decode(encode(OF_RANKS))["manifest"]
    assert content["ranks"] == 6
    assert content["layout_groups"][0]["spans"] == [[0, 3, 2]]
    assert content["layout_groups"][1]["spans"] == [[1, 1], [3, 1], [5, 1]]
    plain = msgspec.json.decode(encode(COMMIT))["manifest"]
    assert not {"layout_groups", "ranks", "omitted_items"} & set(plain)
    assert "per_rank" not in plain["items"][0]


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
        return Commit(run="", step=0, term=0, attempt=0, created_s=0.0, laststep="", items=())

    assert commit().metrics is not commit().metrics


@pytest.mark.parametrize(
    "decision",
    [
        changed(COMMIT, step=-1),
        changed(COMMIT, term=1 << 63),
        changed(COMMIT, created_s=math.nan),
        changed(COMMIT, ranks=0),
        changed(COMMIT, ranks=(1 << 24) + 1),
        changed(COMMIT, ranks=2),
        changed(COMMIT, written=WrittenIndexes()),
        changed(COMMIT, written=changed(WRITTEN, indexes=bytes(17))),
        changed(COMMIT, written=changed(WRITTEN, shared_bytes=9001)),
        changed(COMMIT, written=changed(WRITTEN, files=-1)),
        changed(COMMIT, items=(ITEM, ITEM)),
        changed(COMMIT, items=(changed(ITEM, name=""),)),
        changed(COMMIT, omitted_items=("model",)),
        changed(COMMIT, omitted_items=("z", "y")),
        changed(COMMIT, omitted_items=("z",), items=()),
        changed(OF_RANKS, omitted_items=("z",)),
        changed(OF_RANKS, layout_groups=CLASSES[:1]),
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
    with pytest.raises(UsageError):
        encode(decision)
