"""`s3://` with the profiles of `~/.aws`, on a real server."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import weed

import laststep
from expect import raises
from laststep.storage import aws

if TYPE_CHECKING:
    from pathlib import Path

SECRET = weed.KEYS["AWS_SECRET_ACCESS_KEY"]


@pytest.fixture
def home(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the profile `train`, and no credentials in the environment."""
    for name in (*weed.KEYS, "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    keys = "\n".join(f"{name.lower()} = {value}" for name, value in weed.KEYS.items())
    (tmp_path / ".aws" / "credentials").write_text(f"[train]\n{keys}\n")
    (tmp_path / ".aws" / "config").write_text("[profile train]\nregion = eu-central-1\n")
    monkeypatch.setenv("AWS_PROFILE", "train")
    return tmp_path


def test_a_run_is_saved_with_the_credentials_of_a_profile(home: Path, s3: str) -> None:
    state = {"n": 1}
    with laststep.Checkpointer(f"{s3}/profile", s=state) as ckpt:  # also in the flusher's process
        ckpt.save(1).wait()
    assert laststep.load(f"{s3}/profile")["s"] == state
    config, credentials = aws.profile()
    assert config == {"region": "eu-central-1"}
    assert credentials is not None
    assert credentials()["secret_access_key"] == SECRET


def test_the_environment_comes_before_profiles(
    home: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    assert aws.profile() == ({}, None)


def test_without_files_and_profile_botocore_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    _hide(monkeypatch, "botocore")
    assert aws.profile() == ({}, None)


def test_an_unknown_profile_is_an_error_without_secrets(
    home: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "trian")
    with raises(laststep.UsageError, where="trian", found="ProfileNotFound") as caught:
        laststep.open(f"{s3}/profile")
    assert SECRET not in repr(caught.value)


def test_a_profile_without_botocore_names_the_extra(
    home: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _hide(monkeypatch, "botocore")
    with raises(laststep.UsageError, "pip install 'laststep[aws]'"):
        laststep.open(f"{s3}/profile")


def test_a_bucket_without_obstore_names_the_extra() -> None:
    program = """
import sys
sys.modules["obstore"] = None
import laststep
try:
    laststep.open("s3://bucket/run")
except laststep.UsageError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "s3:// needs: pip install 'laststep[cloud]'\n"


def _hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make a package look as if it were not installed."""
    imported = builtins.__import__

    def import_(name: str, *more: object, **named: object) -> object:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return imported(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", import_)
