"""The wheel and the source archive: contents, metadata, and use in an environment of their own."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from laststep.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
USE = """
import sys, torch, laststep
assert laststep.__file__.startswith(sys.prefix), laststep.__file__
run = sys.argv[1]
with laststep.Checkpointer(run, state={"w": torch.arange(4.0)}) as ckpt:
    ckpt.restore()
    ckpt.save(1).wait()
state = {"w": torch.zeros(4)}
with laststep.Checkpointer(run, state=state) as ckpt:
    assert ckpt.restore().step == 1
assert state["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
"""


def build(source: Path, out: Path, *targets: str) -> None:
    """Build archives as `python -m build --no-isolation` does."""
    chosen = [part for target in targets for part in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", *chosen, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive from the checkout, and the wheel from the source archive."""
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out, "sdist")
    with tarfile.open(out / f"laststep-{VERSION}.tar.gz") as archive:
        archive.extractall(out, filter="data")
    build(out / f"laststep-{VERSION}", out, "wheel")
    return out


def test_the_source_archive_has_everything_that_the_tests_need(built: Path) -> None:
    source = built / f"laststep-{VERSION}"
    names = {path.name for path in source.iterdir()}
    wanted = {"src", "tests", "docs", "examples", "bench", "Makefile", "constraints.txt"}
    assert wanted | {"README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "CITATION.cff"} <= names
    found = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if tracked.returncode == 0:  # else this is itself an unpacked source archive
        assert found == set(tracked.stdout.split())


def test_the_wheel_has_complete_metadata(built: Path) -> None:
    with zipfile.ZipFile(built / f"laststep-{VERSION}-py3-none-any.whl") as wheel:
        names = wheel.namelist()
        text = wheel.read(f"laststep-{VERSION}.dist-info/METADATA").decode()
    assert all(name.startswith(("laststep/", "laststep-")) for name in names)
    assert "laststep/py.typed" in names
    found = email.message_from_string(text)
    assert found["Version"] == VERSION
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert found["Description-Content-Type"] == "text/markdown"
    assert found["Summary"]
    assert found["Keywords"]
    assert any(line.endswith(":: 3.12") for line in found.get_all("Classifier", []))
    assert {"cloud", "compress", "hf"} <= set(found.get_all("Provides-Extra", []))


def test_the_wheel_works_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    wheel = built / f"laststep-{VERSION}-py3-none-any.whl"
    install = ["install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    # The dependencies come from the environment of the tests. Its link to the checkout does not:
    # .pth files on this path are not read.
    packages = [path for path in sys.path if path.endswith("-packages")]
    clean = {**os.environ, "PYTHONPATH": os.pathsep.join(packages), "PYTHONWARNINGS": "ignore"}
    run = tmp_path / "run"
    subprocess.run([python, "-c", USE, run], env=clean, cwd=tmp_path, check=True)
    command = [environment / "bin" / "laststep", "ls", run]
    listed = subprocess.run(command, env=clean, cwd=tmp_path, capture_output=True, check=True)
    assert b"1" in listed.stdout
