"""What `docs/format.md` says of derived blocks is enough to read them: this reads by it alone."""

from __future__ import annotations

import base64
import json
import struct
from typing import TYPE_CHECKING

import torch
import xxhash

import laststep

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 1 << 20
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parsed(path: Path) -> tuple[dict, dict, bytes]:
    """The entries of a data file, its document, and its data."""
    stored = path.read_bytes()
    length = int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8 : 8 + length])
    document = json.loads(header.pop("__metadata__")["laststep"])
    return header, document, stored[8 + length :]


def image_of(path: Path) -> bytes:
    """The tensor area of a file whose blocks are coded, `raw` or `rounded`, and not borrowed."""
    _, document, data = parsed(path)
    places, at = [], 0
    for name, dtype, shape in document["tensors"]:
        size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        if name in document["derived"] and size:
            places.append((name, dtype, at, at + size))
        at += size
    coding, image = document["coding"], bytearray()
    count = -(-document["tensor_bytes"] // BLOCK)
    starts = struct.unpack(f"<{count}Q", base64.b64decode(coding["starts"]))
    sizes = struct.unpack(f"<{count}I", base64.b64decode(coding["sizes"]))
    digests = base64.b64decode(document["blocks"])
    for number, way in enumerate(base64.b64decode(coding["way"])):
        low, high = number * BLOCK, min((number + 1) * BLOCK, document["tensor_bytes"])
        block = data[starts[number] : starts[number] + sizes[number]]
        if coding["ways"][way] == ["rounded", 2, False]:
            block = put_together(path, document["derived"], places, block, low, high)
        assert xxhash.xxh3_128_digest(block) == digests[16 * number : 16 * number + 16]
        image += block
    return bytes(image)


def put_together(
    path: Path, derived: dict, places: list, stored: bytes, low: int, high: int
) -> bytes:
    runs = [
        (name, dtype, max(start, low), min(stop, high), start)
        for name, dtype, start, stop in places
        if start < high and low < stop
    ]
    size = -(-len(runs) // 8)
    bits, rest = stored[:size], stored[size:]
    block, at = b"", low
    for number, (name, dtype, first, last, start) in enumerate(runs):
        if bits[number // 8] >> number % 8 & 1:
            block, rest = block + rest[: first - at], rest[first - at :]
            file, tensor = derived[name]
            entries, _, data = parsed(path.parent / file)
            begin = entries[tensor]["data_offsets"][0] + 2 * (first - start)
            master = bytearray(data[begin : begin + 2 * (last - first)])
            low_values = torch.frombuffer(master, dtype=torch.float32).to(DTYPES[dtype])
            block += low_values.view(torch.uint8).numpy().tobytes()
            at = last
    assert len(rest) == high - at
    return block + rest


def test_a_reader_written_from_the_page_reads_derived_blocks(run_folder: Path) -> None:
    torch.manual_seed(0)
    sizes = (700_000, 3, 40, 300_000)
    masters = {f"w{n}": torch.randn(size) for n, size in enumerate(sizes)}
    model = {
        name: master.to(torch.float16 if name == "w3" else torch.bfloat16)
        for name, master in masters.items()
    }
    model["w2"] += 1  # follows from nothing
    model["norm"] = torch.randn(9)
    with laststep.Checkpointer(
        run_folder, model=model, masters=masters, derived=True, flush="thread", progress=False
    ) as ckpt:
        ckpt.save(1)
    [path] = run_folder.glob("step-*/model.safetensors")
    assert path.stat().st_size < 10_000
    image, at = image_of(path), 0
    for name, dtype, shape in parsed(path)[1]["tensors"]:
        size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        expected = model[name].view(torch.uint8).numpy().tobytes()
        assert image[at : at + size] == expected, name
        at += size
    assert at == len(image)
