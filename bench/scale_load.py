"""Planning a load in a job of very many ranks: its cost for one rank, and the metadata it reads.

The checkpoint and the job that loads it are made up by `bench/scale_jobs.py`. The manifest and
indexes are decoded, and the reads planned, by the functions that a restore calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bench.scale_jobs import forked, measured, share_of
from laststep.format import manifest as manifest_format
from laststep.format.index import decode, encode
from laststep.plan.files import LAYOUT_NAME
from laststep.plan.layouts import global_layout_of
from laststep.plan.reads import FileBox, chunks_of
from laststep.plan.who_reads import Ledger, ReadRequests, decode_request, encode_request
from laststep.read.content import stored_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.scale_jobs import Job
    from laststep.format.index import Index
    from laststep.plan.layouts import GlobalLayout
    from laststep.plan.reads import Chunk
    from laststep.plan.who_reads import WriterSource


class _Loader(NamedTuple):
    """One rank in the middle of a job, and the metadata of the checkpoint that it loads."""

    job: Job
    rank: int
    manifest: bytes
    indexes: dict[int, bytes]
    """The indexes that it reads, by the rank that wrote them."""

    def sources(
        self, read: dict[int, Index]
    ) -> tuple[GlobalLayout, ReadRequests, list[WriterSource]]:
        """Return the ranks whose files this one reads, and keep the indexes read for that."""
        commit = manifest_format.decode(self.manifest, where="")
        if not isinstance(commit, manifest_format.Commit):
            raise TypeError(commit)
        firsts = [min(span.first for span in group.spans) for group in commit.layout_groups]
        for first in firsts:
            read[first] = decode(self.indexes[first], where="")
        local_layouts = [read[first].values[LAYOUT_NAME] for first in firsts]
        saved = global_layout_of(local_layouts, commit.layout_groups, commit.ranks, "")
        numbers = {key: number for number, key in enumerate(saved.keys)}
        rank_requests = [
            decode_request(
                encode_request(
                    {
                        numbers[item.name, tensor.name]: tensor.layout
                        for item in local_layout
                        for tensor in item.tensors
                    }
                )
            )
            for local_layout in self.job.local_layouts
        ]
        of_rank = {rank: self.job.layout_group_of(rank) for rank in range(self.job.ranks)}
        shapes = [spread.layouts[0].shape for spread in saved.spreads]
        requests = ReadRequests(rank_requests, of_rank, shapes)
        return saved, requests, list(Ledger(saved.spreads, requests).sources(self.rank))

    def writers(self) -> list[int]:
        return [source.writer for source in self.sources({})[2]]

    def chunks(self) -> int:
        """Return the number of chunks that this rank reads."""
        read: dict[int, Index] = {}
        saved, requests, sources = self.sources(read)
        numbers = {key: number for number, key in enumerate(saved.keys)}
        tensor_bytes: list[int] = []
        chunks: list[Chunk] = []
        for source in sources:
            stored: list[FileBox] = []
            if source.writer not in read:
                read[source.writer] = decode(self.indexes[source.writer], where="")
            for layout in (part.layout for part in read[source.writer].layouts):
                for entry in layout.tensors:
                    held = stored_in(layout, entry)
                    number = numbers[held.item, held.tensor]
                    itemsize, file = saved.spreads[number].itemsize, len(tensor_bytes)
                    stored.append(
                        FileBox(number, itemsize, file, entry.start, entry.stop, held.box)
                    )
                tensor_bytes.append(layout.tensor_bytes)
            chunks += chunks_of(self.rank, source, stored, requests, dict(enumerate(tensor_bytes)))
        return len(chunks)


def measure(saved: Job, global_layout: GlobalLayout, manifest: bytes, job: Job) -> dict[str, float]:
    """Measure one rank in the middle of `job` that loads what `saved` wrote."""

    def encoded(writers: Sequence[int]) -> dict[int, bytes]:
        return {
            writer: encode(share_of(saved, global_layout, writer).rank_index) for writer in writers
        }

    firsts = encoded([group.ranks[0] for group in global_layout.layout_groups])
    loader = _Loader(job, job.ranks // 2 + 1, manifest, firsts)
    writers = forked(loader.writers)
    loader = loader._replace(indexes=firsts | encoded(writers))
    chunks, seconds, mb = measured(loader.chunks)
    return {
        "ranks": job.ranks,
        "seconds": seconds,
        "mb": mb,
        "chunks": chunks,
        "writers": len(writers),
        "metadata_bytes": len(manifest) + sum(map(len, loader.indexes.values())),
    }
