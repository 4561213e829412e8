"""The tables of golden runs say who wrote what, and the indexes agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.catalog.attempt import read_indexes
from laststep.catalog.run import Run
from laststep.codecs.digests import digest
from laststep.plan.files import LAYOUT_NAME
from laststep.plan.layouts import agree, decode_local_layout
from laststep.read.content import stored_in
from laststep.storage.directory import DirectoryStore

RUNS = Path(__file__).parent / "version-1"


@pytest.mark.parametrize("name", ["fsdp2", "groups"])
def test_the_tables_say_what_the_indexes_list(name: str) -> None:
    store = DirectoryStore(RUNS / name)
    [listed] = Run.open(store).checkpoints()
    commit = listed.commit
    assert commit is not None
    indexes = read_indexes(store, listed.folder, commit)
    found = {
        index.rank: {
            (stored.item, stored.tensor, stored.box)
            for one in index.layouts
            for stored in (stored_in(one.layout, entry) for entry in one.layout.tensors)
        }
        for index in indexes
    }
    stored = [index.values[LAYOUT_NAME] for index in indexes if LAYOUT_NAME in index.values]
    local_layouts = {
        digest(local_layout): decode_local_layout(local_layout) for local_layout in stored
    }
    digests = [b""] * commit.ranks
    for one in commit.layout_groups:
        for rank in one.ranks:
            digests[rank] = bytes.fromhex(one.local_layout)
    global_layout = agree(digests, local_layouts)
    for rank in range(commit.ranks):
        told = {(*key, share.box) for key, share in global_layout.assignments(rank)}
        assert told == found[rank], rank
    assert sum(map(len, found.values())) > 15
