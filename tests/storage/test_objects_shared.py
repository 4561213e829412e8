"""Checkpoints in a bucket that share what did not change, through the public API."""

from __future__ import annotations

from typing import TYPE_CHECKING

import obstore
import pytest
import torch
from typer.testing import CliRunner

import laststep
from laststep.cli import app
from laststep.storage.bucket import Bucket, Patience

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 5


class FineTuning:
    """A large frozen part, and a small one that is trained."""

    def __init__(self, url: str) -> None:
        torch.manual_seed(0)
        self.url = url
        self.frozen = {f"w{n}": torch.randn(1 << 20) for n in range(12)}
        self.trained = {"a": torch.randn(100_000), "b": torch.randn(1000)}
        self.saved: dict[int, torch.Tensor] = {}

    def opened(self, **settings: object) -> laststep.Checkpointer:
        return laststep.Checkpointer(
            self.url,
            frozen=self.frozen,
            trained=self.trained,
            options=laststep.Options(progress=False),
            **settings,  # type: ignore[arg-type]
        )

    def save(self, ckpt: laststep.Checkpointer, step: int) -> None:
        self.trained["a"] += 1
        self.saved[step] = self.trained["a"].clone()
        ckpt.save(step).wait()

    def check(self, url: str, steps: list[int]) -> None:
        """Every step that is there is as it was saved."""
        assert laststep.open(url).steps() == steps
        for stored in laststep.open(url):
            assert torch.equal(stored.tensor("trained/a")[:], self.saved[stored.step])
            assert torch.equal(stored.tensor("frozen/w7")[:], self.frozen["w7"])
            assert not stored.verify().damage


def stored_bytes(url: str) -> int:
    """What all objects below a URL take."""
    bucket = Bucket(url, Patience())
    return sum(meta["size"] for meta in obstore.list(bucket.client, bucket.prefix).collect())


def laststep_command(*words: str) -> None:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output


@pytest.fixture
def tuning(s3: str, tmp_path: Path) -> FineTuning:
    return FineTuning(f"{s3}{tmp_path}/run")


def test_a_second_save_of_a_fine_tuning_writes_little(tuning: FineTuning) -> None:
    with tuning.opened(keep=None) as ckpt:
        tuning.save(ckpt, 0)
        first = stored_bytes(tuning.url)
        tuning.save(ckpt, 1)
        assert stored_bytes(tuning.url) - first <= 0.04 * first
    tuning.check(tuning.url, [0, 1])


def test_retention_keeps_the_files_that_kept_checkpoints_share(tuning: FineTuning) -> None:
    with tuning.opened(keep=laststep.Keep(last=2)) as ckpt:
        tuning.save(ckpt, 0)
        first = stored_bytes(tuning.url)
        for step in range(1, STEPS):
            tuning.save(ckpt, step)
            assert stored_bytes(tuning.url) <= 1.1 * first
    tuning.check(tuning.url, [STEPS - 2, STEPS - 1])
    for step in (STEPS, STEPS + 1):  # a new start goes on sharing; what it resumed from stays
        with tuning.opened(keep=laststep.Keep(last=1)) as ckpt:
            assert ckpt.restore().step == step - 1
            assert stored_bytes(tuning.url) <= 1.1 * first
            if step == STEPS + 1:  # from here on nothing is shared
                for tensor in tuning.frozen.values():
                    tensor.add_(1)
            tuning.save(ckpt, step)
    with tuning.opened(keep=laststep.Keep(last=1)) as ckpt:
        assert ckpt.restore().step == STEPS + 1
        tuning.save(ckpt, STEPS + 2)
    assert stored_bytes(tuning.url) <= 1.1 * first, "what nobody shares any more is still there"
    tuning.check(tuning.url, [STEPS + 1, STEPS + 2])


def test_copies_bring_only_what_the_target_lacks(
    tuning: FineTuning, s3: str, tmp_path: Path
) -> None:
    with tuning.opened(keep=None) as ckpt:
        for step in range(3):
            tuning.save(ckpt, step)
    here = stored_bytes(tuning.url)
    folder, other, third = tmp_path / "folder", f"{s3}{tmp_path}/other", f"{s3}{tmp_path}/third"
    for source, target in ((tuning.url, other), (other, str(folder)), (str(folder), third)):
        laststep_command("copy", source, target)
        tuning.check(target, [0, 1, 2])
    assert stored_bytes(other) <= 1.05 * here
    assert stored_bytes(third) <= 1.05 * here
    # Each copy stands by itself.
    laststep_command("prune", tuning.url, "--last", "1", "--yes")
    tuning.check(tuning.url, [2])
    tuning.check(other, [0, 1, 2])
