"""Listings that a broken server or a proxy answers with a page of HTML, which reads as empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fake_s3
import pytest
import torch

import attempts
import laststep
from laststep.catalog.attempt import parse_folder
from laststep.catalog.listing import Scanner
from laststep.catalog.run import Run
from laststep.errors import StorageError
from laststep.storage.objects import ObjectStore
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

URL = "s3://bucket/run"
ALWAYS = 1 << 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> Iterator[fake_s3.Server]:
    """A server with a run that saved steps 1 to 3, went back to 1 and saved another step 2."""
    with fake_s3.named(monkeypatch) as state:
        saved = {"w": torch.zeros(100)}
        with opened(saved) as ckpt:
            ckpt.restore()
            for step in (1, 2, 3):
                ckpt.save(step).result()
        with opened(saved) as ckpt:
            ckpt.restore(1)
            saved["w"].fill_(22)
            ckpt.save(2).result()
        yield state


def opened(state: dict[str, torch.Tensor]) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        URL, s=state, options=laststep.Options(progress=False, flush="thread")
    )


def test_a_run_is_not_begun_anew_however_many_listings_are_wrong(server: fake_s3.Server) -> None:
    failures = 0
    for times in (*range(1, 10), ALWAYS):
        server.fail("html", "GET", times, query="list-type")
        state = {"w": torch.zeros(100)}
        try:
            with opened(state) as ckpt:
                assert ckpt.restore().step == 2
            assert bool((state["w"] == 22).all())
        except StorageError:
            failures += 1
        server.faults.clear()
    assert failures


def test_a_save_without_a_restore_does_not_begin_the_run_anew(server: fake_s3.Server) -> None:
    server.fail("html", "GET", ALWAYS, query="list-type")
    with opened({"w": torch.zeros(100)}) as ckpt, pytest.raises(StorageError):
        ckpt.save(0).result()
    server.faults.clear()
    assert laststep.open(URL).latest().step == 2


@pytest.mark.parametrize("folder", ["terms", "step-00000002.2-1"])
def test_a_wrong_listing_of_one_folder_does_not_hide_the_newest_checkpoint(
    server: fake_s3.Server, folder: str
) -> None:
    server.fail("html", "GET", ALWAYS, query=f"prefix=run%2F{folder}")
    with opened({"w": torch.zeros(100)}) as ckpt, pytest.raises(StorageError):
        ckpt.restore()
    assert any(asked.lists and folder in asked.query for asked in server.asked)


def test_a_save_that_is_being_discarded_does_not_fail_a_listing(
    server: fake_s3.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of its folder goes first, and its contents are still served by name."""
    store = open_store(URL)
    run = Run.open(store)
    folder = run.begin(step=5, term=run.claim_term(None), attempt=1).folder
    attempts.abort(run, folder, "it failed")
    reader, looks, empty = Scanner(open_store(URL)), [], ObjectStore._empty
    (entry,) = [entry for _, entry in reader.folders().items() if entry.name == folder]

    def look_meanwhile(self: ObjectStore, key: str) -> None:
        looks.append(reader.look(parse_folder(folder), entry).decided)
        empty(self, key)

    monkeypatch.setattr(ObjectStore, "_empty", look_meanwhile)
    store.delete_folder(folder)
    assert looks == [None]
