"""docs/format.md: its samples are what the code writes, and a reader can be written from it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import laststep
from laststep.catalog import epochs
from laststep.catalog.groups import files_of
from laststep.catalog.run import Run
from laststep.format import group, manifest
from laststep.format.header import Header, decode_header
from laststep.storage.directory import DirectoryStore

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
GOLDEN = ROOT / "tests" / "golden" / "version-1"
sys.path.insert(0, str(Path(__file__).parent))

import second_reader  # noqa: E402


def sample(name: str) -> str:
    """The text of a block of the page."""
    (found,) = re.findall(rf"^```\w+ {name}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def compact(name: str) -> bytes:
    """A JSON block as it lies on the disk, without the page's line breaks."""
    return json.dumps(json.loads(sample(name)), separators=(",", ":"), ensure_ascii=False).encode()


def sealed(name: str, member: str) -> bytes:
    """The same of a manifest: its envelope has three spaces."""
    document = json.loads(sample(name))
    content = json.dumps(document[member], separators=(",", ":"), ensure_ascii=False)
    return f'{{"digest": "{document["digest"]}", "{member}": {content}}}'.encode()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the page's lines write."""
    run = tmp_path_factory.mktemp("page") / "run"
    exec(sample("sample"), {"torch": torch, "laststep": laststep, "run": run})  # noqa: S102
    return run


def test_the_manifest_is_what_the_code_writes(written: Path) -> None:
    found = manifest.decode(sealed("manifest", "manifest"), where="docs/format.md")
    [listed] = Run.open(DirectoryStore(written)).checkpoints()
    assert isinstance(found, manifest.Commit)
    assert listed.commit is not None
    told = {"run": found.run, "created_s": found.created_s, "laststep": found.laststep}
    assert msgspec.structs.replace(listed.commit, **told) == found
    same = msgspec.structs.replace(listed.commit, **told)
    assert manifest.encode(same) == sealed("manifest", "manifest")


def test_the_record_of_the_run_is_what_the_code_writes(written: Path, tmp_path: Path) -> None:
    stored = json.loads((written / "run.json").read_bytes())
    found = json.loads(sample("run"))
    assert found["run"] == json.loads(sample("manifest"))["manifest"]["run"]
    assert (stored.keys(), stored["format"]) == (found.keys(), found["format"])
    (tmp_path / "run.json").write_bytes(compact("run"))
    assert Run.open(DirectoryStore(tmp_path)).id == found["run"]


def test_the_record_of_an_epoch_is_what_the_code_writes(written: Path) -> None:
    found = epochs.decode(compact("epoch"), epoch=1, where="docs/format.md")
    data = (written / "epochs" / "00000001.json").read_bytes()
    stored = epochs.decode(data, epoch=1, where="written")
    names = ("host", "pid", "boot", "process_started", "created_s", "start")
    told = {name: getattr(found, name) for name in names}
    assert epochs.encode(msgspec.structs.replace(stored, **told)) == compact("epoch")


def test_the_manifest_of_a_group_is_that_of_a_golden_run() -> None:
    store = DirectoryStore(GOLDEN / "groups")
    [listed] = Run.open(store).checkpoints()
    assert listed.commit is not None
    data = (GOLDEN / "groups" / listed.folder / "groups" / "r00000.json").read_bytes()
    assert data == sealed("group", "group")
    found = group.decode(data, listed.commit.groups[0], where="docs/format.md")
    assert found.files == files_of(store, listed.folder, listed.commit, [0, 1])


def test_the_header_is_what_the_code_writes(written: Path) -> None:
    [folder] = written.glob("step-*")
    assert (folder / "model.safetensors").read_bytes()[8:4096].rstrip() == compact("header")
    region = (4088).to_bytes(8, "little") + compact("header").ljust(4088)
    assert isinstance(decode_header(region, data_bytes=36, where="docs/format.md"), Header)


@pytest.mark.parametrize(
    ("block", "record"),
    [
        ("A commit", manifest._CommitDocument),
        ("An item", manifest.ItemRecord),
        ("A file", manifest.FileRecord),
        ("manifest of a group of consecutive ranks", manifest.GroupRecord),
        ('"rank": 1}\n  ]\n}}\n```', group.GroupManifest),
        ("(lines are broken here, not on the disk)", epochs.EpochRecord),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_field_has_a_row(block: str, record: type[msgspec.Struct]) -> None:
    after = PAGE[PAGE.index(f"\n{block}" if block[0] == "A" else block) :]
    rows = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    assert rows is not None
    firsts = [row.split("|")[1] for row in rows[0].splitlines()[2:]]
    assert re.findall(r"`(\w+)`", " ".join(firsts)) == list(record.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("one-rank", 0),
        ("fsdp2", 0),
        ("groups", 0),
        ("per-rank", 0),
        ("per-rank", 1),
        ("dcp", 0),
        ("borrowed", 0),
        ("coded", 0),
        ("excerpt", 0),
    ],
)
def test_a_second_reader_reads_what_the_first_does(name: str, rank: int) -> None:
    [run] = GOLDEN.parent.glob(f"version-*/{name}")
    found = second_reader.read(run, rank)
    first = laststep.open(run).latest()
    first = first.of_rank(rank) if rank else first
    names = [f"{item}/{tensor}" for item, tensors in found.items() for tensor in tensors]
    assert sorted(names) == sorted(first.tensors())
    for item, tensors in found.items():
        for tensor, (dtype, shape, data) in tensors.items():
            wanted = first.tensor(f"{item}/{tensor}")[...].contiguous()
            assert (str(wanted.dtype), tuple(wanted.shape)) == (f"torch.{dtype}", shape)
            assert wanted.reshape(-1).view(torch.uint8).numpy().tobytes() == data
