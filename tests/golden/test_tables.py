"""The tables of golden runs say who wrote what, and the headers agree: what was decided once is
found again by the arithmetic of today."""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.catalog.groups import files_of
from laststep.catalog.run import Run
from laststep.codecs.digests import digest
from laststep.format.header import Header, decode_header
from laststep.format.safetensors import region_bytes_of
from laststep.plan.files import TABLE_NAME
from laststep.plan.tables import agree, decode_table
from laststep.read.entries import stored_in
from laststep.storage.directory import DirectoryStore

RUNS = Path(__file__).parent / "version-1"


def opened(path: Path) -> tuple[Header, bytes]:
    """The header of a data file, and its data."""
    data = path.read_bytes()
    region = region_bytes_of(data, size_bytes=len(data), where=str(path))
    header = decode_header(data[:region], data_bytes=len(data) - region, where=str(path))
    return header, data[region:]


@pytest.mark.parametrize("name", ["fsdp2", "groups"])
def test_the_tables_say_what_the_headers_list(name: str) -> None:
    store = DirectoryStore(RUNS / name)
    [listed] = Run.open(store).checkpoints()
    assert listed.commit is not None
    found: dict[int, set[tuple[str, str, object]]] = {}
    tables = {}
    for file in files_of(store, listed.folder, listed.commit):
        header, data = opened(RUNS / name / listed.folder / file.name)
        entries = found.setdefault(file.rank, set())
        entries.update(
            (s.item, s.tensor, s.box) for s in (stored_in(header, t) for t in header.tensors)
        )
        for stored in header.objects:
            if stored.name == TABLE_NAME:
                table = data[stored.start : stored.stop]
                tables[digest(table)] = decode_table(table)
    digests = [b""] * listed.commit.ranks
    for one in listed.commit.classes:
        for rank in one.ranks:
            digests[rank] = bytes.fromhex(one.table)
    agreement = agree(digests, tables)
    for rank in range(listed.commit.ranks):
        told = {(*key, share.box) for key, share in agreement.shares(rank)}
        assert told == found.get(rank, set()), rank
    assert sum(map(len, found.values())) > 15
