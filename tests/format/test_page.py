"""docs/format.md: its samples are what the code writes, and a reader can be written from it."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import attempts
import laststep
from laststep.catalog import terms
from laststep.catalog.run import Run
from laststep.codecs.digests import block_digests
from laststep.format import index, layout, manifest
from laststep.format.index import folder_of, index_name
from laststep.format.layout import FileLayout, Part, TensorEntry
from laststep.format.manifest import Commit, ItemRecord, WrittenIndexes
from laststep.storage.directory import DirectoryStore
from saves_of import whole_index

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
    found = terms.decode(compact("term"), term=1, where="docs/format.md")
    data = (written / "terms" / "00000001.json").read_bytes()
    stored = terms.decode(data, term=1, where="written")
    names = ("host", "pid", "boot", "process_started", "created_s", "start")
    told = {name: getattr(found, name) for name in names}
    assert terms.encode(msgspec.structs.replace(stored, **told)) == compact("term")


def test_the_header_is_what_the_code_writes(written: Path) -> None:
    [folder] = written.glob("step-*")
    assert (folder / "model.safetensors").read_bytes()[8:4096].rstrip() == compact("header")


def test_the_index_is_what_the_code_writes(written: Path) -> None:
    [folder] = written.glob("step-*")
    data = bytes.fromhex(sample("index"))
    assert (folder / "index-r00000").read_bytes() == data
    listed = json.loads(sample("manifest"))["manifest"]["written"]["indexes"]
    assert base64.b64decode(listed) == data[:16]


def test_the_payload_is_that_of_the_index() -> None:
    found = msgspec.msgpack.decode(bytes.fromhex(sample("index"))[16:])
    told = json.loads(sample("payload"))
    values = {name: text.removesuffix("…") for name, text in told.pop().items()}
    for name, text in found.pop().items():
        assert text.decode().startswith(values.pop(name))
    assert not values
    assert json.loads(msgspec.json.encode(found)) == told


def cells(after: str, column: int) -> list[str]:
    """A column of the first table behind some words of the page."""
    rows = re.search(r"(?:^\|.*\n)+", PAGE[PAGE.index(after) :], re.MULTILINE)
    assert rows is not None
    return [row.split("|")[column] for row in rows[0].splitlines()[2:]]


@pytest.mark.parametrize(
    ("block", "record"),
    [
        ("A commit has these fields", manifest.Commit),
        ("\n`written`:\n", manifest.WrittenIndexes),
        ('"orphan":false}}', terms.TermRecord),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_field_has_a_row(block: str, record: type[msgspec.Struct]) -> None:
    names = re.findall(r"`(\w+)`", " ".join(cells(block, 1)))
    assert names == list(record.__struct_fields__)


def test_every_field_of_an_item_is_named() -> None:
    [row] = [row for row in cells("A commit has these fields", 3) if "`per_rank`" in row]
    for name in manifest.ItemRecord.__struct_fields__:
        assert f"`{name}`" in row


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("index", index.Index),
        ("file", index.StoredFile),
        ("encoding", index.Encoding),
        ("stored layout", index.StoredLayout),
        ("layout", layout.FileLayout),
        ("run", index.BlockRun),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_struct_of_an_index_has_its_members_in_order(name: str, record: type) -> None:
    after = "A struct is an array"
    members = dict(zip(map(str.strip, cells(after, 1)), cells(after, 2), strict=True))
    fields = getattr(record, "__struct_fields__", None) or record._fields
    named = [word for word in re.findall(r"`(\w+)`", members[name]) if word in fields]
    assert list(dict.fromkeys(named)) == list(fields)


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
        ("partial", 0),
    ],
)
def test_a_second_reader_reads_what_the_first_does(name: str, rank: int) -> None:
    run = GOLDEN / name
    assert_reads_alike(run, rank)


def assert_reads_alike(run: Path, rank: int) -> None:
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


def saved_by(ranks: int, path: Path) -> Path:
    """A run of one checkpoint, of whose tensor each of many ranks wrote an element."""
    run = Run.open_or_create(DirectoryStore(path))
    term = run.claim_term(None)
    folder = run.begin(step=1, term=term, attempt=1).folder
    tree = b'{"tree":{"$":"tensor","name":"w"},"ties":{},"views":{}}'
    written = WrittenIndexes()
    for rank in range(ranks):
        entry = TensorEntry("w~6at", "uint8", (1,), 0, 1)
        made = FileLayout(
            name=f"{folder_of(rank, ranks)}m-r{rank:05d}.safetensors",
            item="m",
            header_bytes=4096,
            tensor_bytes=1,
            tensors=(entry,),
            parts={entry.name: Part("w", (ranks,), (rank,))},
        )
        data = bytes([rank % 251])
        values = {} if rank else {"m": tree}
        found = whole_index(rank, [made], [block_digests(memoryview(data))], values, [{}])
        (path / folder / made.name).parent.mkdir(exist_ok=True)
        (path / folder / made.name).write_bytes(made.header() + data)
        (path / folder / index_name(rank, ranks)).write_bytes(index.encode(found))
        written = written.plus(index.written_of(found, index.encode(found)))
    item = ItemRecord(name="m", kind="value", tensors=1, size_bytes=ranks)
    attempts.commit(
        run,
        folder,
        Commit(
            run=run.id,
            step=1,
            term=term,
            attempt=1,
            created_s=1.0,
            laststep="0",
            items=(item,),
            written=written,
            ranks=ranks,
        ),
    )
    return path


@pytest.mark.parametrize(
    ("ranks", "folders"), [(256, set()), (257, {"r00000", "r00128", "r00256"})]
)
def test_a_second_reader_finds_what_many_ranks_wrote(
    ranks: int, folders: set[str], tmp_path: Path
) -> None:
    run = saved_by(ranks, tmp_path / "run")
    assert {path.name for path in run.glob("step-*/*") if path.is_dir()} == folders
    assert_reads_alike(run, 0)
