"""Which bytes are read for what is wanted: all of it, whole blocks, none twice."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from laststep.constants import BLOCK_BYTES, CHUNK_BYTES
from laststep.plan.reads import FileBox, plan_chunks
from laststep.state.boxes import whole

TOTAL = 3 * CHUNK_BYTES + 5 * BLOCK_BYTES + 777

edges = st.one_of(
    st.integers(0, TOTAL),
    st.integers(0, TOTAL // BLOCK_BYTES).map(lambda n: n * BLOCK_BYTES),
    st.integers(0, 3).map(lambda n: n * CHUNK_BYTES),
)


@given(st.lists(st.tuples(edges, edges), max_size=12), st.sampled_from((1, 3, 16)))
@example([(0, TOTAL)], 16)
@example([(0, TOTAL), (0, TOTAL)], 4)
@example([(5, 5)], 16)
@example([(BLOCK_BYTES - 1, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES + 1)], 16)
def test_reads_cover_every_wanted_byte_exactly_in_whole_blocks_and_no_block_twice(
    pairs: list[tuple[int, int]], most_blocks: int
) -> None:
    pairs = [(min(pair), max(pair)) for pair in pairs]
    boxes = [FileBox(n, 1, 7, a, b, whole((b - a,))) for n, (a, b) in enumerate(pairs)]
    reads = plan_chunks(
        [(b.start, b.stop, b) for b in boxes], {7: TOTAL}, most_blocks * BLOCK_BYTES
    )
    end = 0
    for read in reads:
        assert read.file == 7
        assert read.start % BLOCK_BYTES == 0
        assert read.stop % BLOCK_BYTES == 0 or read.stop == TOTAL
        assert 0 < read.stop - read.start <= most_blocks * BLOCK_BYTES
        assert read.start >= end
        end = read.stop
        blocks = range(read.start, read.stop, BLOCK_BYTES)
        # Every block is there for somebody.
        for block in blocks:
            assert any(w.start < block + BLOCK_BYTES and block < w.stop for w in boxes)
    for wanted in boxes:
        at = 0
        for read in reads:
            for stored, box, offset in read.boxes():
                if stored == wanted:
                    assert read.start + offset == wanted.start + box.start[0]
                    assert (box.start[0], box.volume > 0) == (at, True)
                    assert 0 <= offset <= offset + box.volume <= read.stop - read.start
                    at = box.stop[0]
        assert at == wanted.stop - wanted.start
