"""A job of 64 real processes, each with a flusher of its own, with a sharded and a replicated
tensor and with random numbers of each rank's own. It saves, resumes, loses two ranks in a save, and
goes on with 48 ranks and with one. Everything comes back bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rank_jobs import Job

PATIENCE_S = 1800.0
"""128 processes on two cores that have other work."""
RAMP = 1009
"""Elements of a tensor that neither 64 nor 48 ranks share evenly: the last ones hold none of it."""
KILLED = (17, 40)


@pytest.mark.long
@pytest.mark.timeout(2 * PATIENCE_S)
def test_sixty_four_ranks_lose_two_and_go_on_as_forty_eight_and_as_one(
    start_job: Callable[..., Job], run_folder: Path
) -> None:
    def start(ranks: int) -> Job:
        job = start_job(ranks, patience_s=PATIENCE_S)
        job.open(run_folder, deadline_s=PATIENCE_S, ramp=RAMP)
        return job

    def resume(ranks: int, step: int) -> Job:
        """A job that has restored that step and saved the next."""
        job = start(ranks)
        assert set(job.restore()) == {str(step)}
        job.tell(f"exact {step}")
        assert {rank.hear("exact") for rank in job.ranks} == {"True"}
        job.save(step + 1)
        return job

    job = start(64)
    job.save(1)
    job.end_all(*range(64))
    job = resume(64, 1)
    job.ranks[KILLED[1]].do("shut receipt")
    job.stand_at("receipt", 3, number=KILLED[0])
    job.ranks[KILLED[1]].hear("at", "receipt")  # their own parts of the save are durable
    for number in KILLED:
        job.ranks[number].kill()
    living = [number for number in range(64) if number not in KILLED]
    for number in living:
        error = job.ranks[number].gives_up()
        assert names(error, *(f"rank {killed}" for killed in KILLED), "step 3"), error
    job.end_all(*living)
    assert laststep.open(run_folder).steps() == [1, 2]

    job = resume(48, 2)
    job.end_all(*range(48))
    job = resume(1, 3)
    job.end_all(0)
    catalog = laststep.open(run_folder)
    assert catalog.steps() == [1, 2, 3, 4]
    for checkpoint in catalog:
        assert checkpoint.verify().damage == ()
        stored = laststep.load(run_folder, step=checkpoint.step)["state"]
        assert stored["n"] == checkpoint.step
        assert torch.equal(stored["t"], ramp_at(checkpoint.step, RAMP))
        assert torch.equal(stored["same"], ramp_at(checkpoint.step, RAMP).neg_())


def ramp_at(step: int, size: int) -> torch.Tensor:
    """As in rank_worker.py, whose other imports are those of a rank."""
    return torch.arange(size, dtype=torch.float32).add_(step * size)
