"""The tiers of a run are places of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import laststep
from expect import raises
from laststep.errors import UsageError
from laststep.tiers.tier import Tier, arranged

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a link `link` to `real` in it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "places",
    [
        ("real/run", "real/run"),
        ("real/run", "real/other/../run/"),
        ("real/run", "link/run"),
        ("link/run", "file://{folder}/real/run"),
        ("primary", "real/run", "link/run"),
        ("s3://bucket/run", "S3://bucket/run/"),
        ("shm://primary", "gs://bucket/run", "gs://bucket//run"),
    ],
)
def test_a_place_that_is_named_twice_is_refused(folder: Path, places: tuple[str, ...]) -> None:
    named = [place.format(folder=folder) for place in places]
    with raises(UsageError, where=True, found=True):
        arranged(None, ["shm://", *named], None)


def test_retention_of_a_tier_never_comes_to_the_home_by_a_link(folder: Path) -> None:
    tiers = ["real/run", Tier("link/run", keep=laststep.Keep(last=1))]
    with raises(UsageError, where="run"):
        laststep.Checkpointer(tiers=tiers, state={"step": 1})


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("inner", ["real/run/terms", "link/run/step-00000001.1-1/far"])
def test_a_tier_in_a_folder_that_a_run_needs_for_itself_is_refused(
    folder: Path, inner: str, order: int
) -> None:
    with raises(UsageError, where=True, found=True):
        arranged(None, ["real/run", inner][::order], None)


@pytest.mark.parametrize(
    "places",
    [
        ("runs/gpt", "runs/gpt-far"),
        ("runs/gpt", "runs/gpt/far"),
        ("runs/gpt/near", "runs/gpt"),
        ("s3://bucket/run", "s3://bucket/RUN", "gs://bucket/run", "az://bucket/run"),
    ],
)
def test_places_of_their_own_are_taken(folder: Path, places: tuple[str, ...]) -> None:
    assert len(arranged(None, list(places), None).replicas) == len(places) - 1


@pytest.mark.parametrize("place", ["s3://key:hidden@bucket/run", "gs://hidden@bucket/run"])
def test_a_url_with_a_secret_is_refused_and_not_told(place: str, tmp_path: Path) -> None:
    for tier in (place, Tier(place)):
        with raises(laststep.UsageError, where=f"{place.partition(':')[0]}://") as told:
            laststep.Checkpointer(tiers=[str(tmp_path / "primary"), tier], state={})
        assert "hidden" not in str(told.value)


@pytest.mark.parametrize("place", ["s3:/bucket/run", "s3:bucket", "shm:/dev/shm"])
def test_a_url_that_lacks_a_slash_is_no_folder(place: str, tmp_path: Path) -> None:
    with raises(laststep.UsageError, found=repr(place)):
        laststep.Checkpointer(tiers=[str(tmp_path / "primary"), place], state={})
