"""Slots that are free again are told to the trainer, whatever else is to be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import laststep
from laststep.constants import CHUNK_BYTES
from laststep.flush.listeners import SlotHolds
from laststep.settings import MIN_SLOTS
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_last_chunk_of_a_save_frees_its_slot_though_other_tasks_wait(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = SlotHolds.release

    def hold_back(holds: SlotHolds, slots: list[int], *, more_comes: bool = False) -> None:
        release(holds, slots, more_comes=bool(slots))  # such as the end of the save before

    monkeypatch.setattr(SlotHolds, "release", hold_back)
    state = {"t": torch.zeros(MIN_SLOTS * CHUNK_BYTES, dtype=torch.uint8)}
    with laststep.Checkpointer(
        run_folder,
        state=state,
        host_memory_bytes=MIN_SLOTS * CHUNK_BYTES,
        options=laststep.Options(flush="thread"),
    ) as checkpointer:
        for step in range(2):
            state["t"] += 1
            assert checkpointer.save(step).wait(PATIENCE_S)
