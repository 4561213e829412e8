"""The arithmetic that is part of the format, on fixed tables: who holds, and who wrote, what.

A reader works out from the stored tables where the bytes of a tensor lie. So none of the results
here may change within a version of the format: checkpoints that were written by them are out there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import second_arithmetic

from laststep.format.index import folder_of
from laststep.plan.layouts import (
    LocalItem,
    LocalLayout,
    LocalTensor,
    Replicas,
    agree,
    decode_local_layout,
    digest_of,
    encode_local_layout,
)
from laststep.plan.receipts import cut
from laststep.state.boxes import Box, boxes_of_range
from laststep.state.layouts import Flat, Layout, Mesh, Replicate, Shard, Sharded

LINE = Mesh.of(("dp",), (4,), range(4))
GRID = Mesh.of(("dp", "tp"), (2, 2), range(4))
COLUMNS = Mesh.of(("dp", "tp"), (2, 2), (0, 2, 1, 3))
ODD = Mesh.of(("dp",), (4,), (3, 1, 0, 2))
LAST = Mesh.of(("tp",), (2,), (2, 3))
MIB = 1 << 18
"""Elements of float32 in a row of 1 MiB."""


def text(box: Box) -> str:
    return ",".join(f"{a}:{b}" for a, b in zip(*box, strict=True)) or "all"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Sharded((7, 5), LINE, (Shard(0),)), ["0:2,0:5", "2:4,0:5", "4:6,0:5", "6:7,0:5"]),
        (Sharded((9,), LINE, (Shard(0),)), ["0:3", "3:6", "6:9", ""]),
        (Sharded((), LINE, (Replicate(),)), ["all", "all", "all", "all"]),
        (Sharded((4, 6), GRID, (Shard(0), Shard(1))), ["0:2,0:3", "0:2,3:6", "2:4,0:3", "2:4,3:6"]),
        (Sharded((10,), GRID, (Shard(0), Shard(0))), ["0:3", "3:5", "5:8", "8:10"]),
        (Sharded((10,), GRID, (Shard(0, after=2), Shard(0))), ["0:3", "5:8", "3:5", "8:10"]),
        (Sharded((4,), GRID, (Replicate(), Shard(0))), ["0:2", "2:4", "0:2", "2:4"]),
        (Sharded((4,), COLUMNS, (Replicate(), Shard(0))), ["0:2", "0:2", "2:4", "2:4"]),
        (Sharded((4,), ODD, (Shard(0),)), ["2:3", "1:2", "3:4", "0:1"]),
        (Sharded((4,), LAST, (Shard(0),)), ["", "", "0:2", "2:4"]),
        (Flat((5,), LINE, ("dp",), 0, 8), ["0:2", "2:4", "4:5", ""]),
        (Flat((3, 4), LINE, ("dp",), 4, 24), ["0:1,0:2", "0:1,2:4 1:2,0:4", "2:3,0:4", ""]),
        (Flat((4,), GRID, ("tp",), 0, 4), ["0:2", "2:4", "0:2", "2:4"]),
        (
            Flat((4, 4), GRID, ("dp",), 2, 12, (Replicate(), Shard(0))),
            ["0:1,0:4", "2:3,0:4", "1:2,0:4", "3:4,0:4"],
        ),
        (
            Flat((8, 2), GRID, ("dp",), 2, 12, (Replicate(), Shard(0)), 2),
            ["0:2,0:2", "2:4,0:2", "4:6,0:2", "6:8,0:2"],
        ),
    ],
    ids=str,
)
def test_what_each_rank_holds(layout: Layout, expected: list[str]) -> None:
    assert [" ".join(map(text, layout.held(rank))) for rank in range(4)] == expected


def test_a_range_of_elements_is_these_boxes() -> None:
    found = [text(box) for box in boxes_of_range((3, 4, 5), 7, 53)]
    assert found == ["0:1,1:2,2:5", "0:1,2:4,0:5", "1:2,0:4,0:5", "2:3,0:2,0:5", "2:3,2:3,0:3"]


def rows(
    name: str, count: int, layout: Layout | None = None, more: Replicas = Replicas.EQUAL
) -> LocalTensor:
    """A tensor of rows of 1 MiB."""
    return LocalTensor(name, "float32", (count, MIB), layout, more)


def local_layout(*tensors: LocalTensor, ties: tuple[tuple[str, str], ...] = ()) -> LocalLayout:
    return (LocalItem("m", "module", False, tensors, ties),)


def sharded(count: int, mesh: Mesh, *placements: Replicate | Shard) -> Sharded:
    return Sharded((count, MIB), mesh, placements)


def written(*local_layouts: LocalLayout) -> dict[str, str]:
    """Of each tensor the rows that each rank writes, in the order of the ranks."""
    data = [encode_local_layout(one) for one in local_layouts]
    global_layout = agree(
        [digest_of(one) for one in data], {digest_of(d): decode_local_layout(d) for d in data}
    )
    found = {name: "" for _, name in global_layout.keys}
    for rank in range(len(local_layouts)):
        for (_, name), share in global_layout.assignments(rank):
            found[name] += f" {rank}={text(share.box)}".removesuffix(f",0:{MIB}")
    return {name: assignments.strip() for name, assignments in found.items()}


BOTH = (
    rows("w", 24, sharded(24, Mesh.of(("dp",), (2,), (0, 1)), Replicate())),
    rows("w", 24, sharded(24, Mesh.of(("dp",), (2,), (2, 3)), Replicate())),
)
THIRD = sharded(3, LINE, Shard(0))
CASES: list[tuple[str, list[LocalLayout], dict[str, str]]] = [
    ("equal pieces", [local_layout(rows("w", 24))] * 3, {"w": "0=0:8 1=8:16 2=16:24"}),
    ("cuts go up to whole rows", [local_layout(rows("w", 25))] * 3, {"w": "0=0:9 1=9:17 2=17:25"}),
    ("no piece below 8 MiB", [local_layout(rows("w", 23))] * 3, {"w": "0=0:12 1=12:23"}),
    (
        "little is one rank's",
        [local_layout(rows("a", 1), rows("b", 2))] * 3,
        {"a": "0=0:1", "b": "0=0:2"},
    ),
    (
        "a line goes on over tensors",
        [local_layout(rows("a", 4), rows("b", 10), rows("c", 6))] * 3,
        {"a": "0=0:4", "b": "0=0:6 1=6:10", "c": "1=0:6"},
    ),
    (
        "a line begins with the number of its first tensor",
        [local_layout(rows("a", 4, sharded(4, LINE, Shard(0))), rows("b", 24))] * 4,
        {"a": "0=0:1 1=1:2 2=2:3 3=3:4", "b": "1=0:8 2=8:16 3=16:24"},
    ),
    (
        "shards are their holders'",
        [local_layout(rows("w", 24, sharded(24, LINE, Shard(0))))] * 4,
        {"w": "0=0:6 1=6:12 2=12:18 3=18:24"},
    ),
    (
        "replicas of a shard share it",
        [local_layout(rows("w", 64, sharded(64, GRID, Replicate(), Shard(0))))] * 4,
        {"w": "0=0:16 1=32:48 2=16:32 3=48:64"},
    ),
    (
        "a dimension of one is not cut",
        [local_layout(LocalTensor("w", "float32", (1, 16, MIB), None))] * 2,
        {"w": "0=0:1,0:8 1=0:1,8:16"},
    ),
    (
        "scalars, and what has no elements",
        [
            local_layout(
                LocalTensor("a", "int64", (), None),
                LocalTensor("b", "int8", (0, 3), None),
                LocalTensor("c", "bool", (), None),
            )
        ]
        * 3,
        {"a": "0=all", "b": "0=0:0,0:3", "c": "0=all"},
    ),
    (
        "two stages share what is tied",
        [local_layout(BOTH[0])] * 2 + [local_layout(BOTH[1])] * 2,
        {"w": "0=0:8 1=8:16 2=16:24"},
    ),
    (
        "who cuts otherwise leaves it to the first",
        [local_layout(rows("w", 24, sharded(24, Mesh.of(("tp",), (2,), (0, 1)), Shard(0))))] * 2
        + [local_layout(rows("w", 24, sharded(24, LAST, Replicate())))] * 2,
        {"w": "0=0:12 1=12:24"},
    ),
    (
        "what nothing proves is the lowest holder's",
        [local_layout(rows("a", 24))]
        + [local_layout(rows("a", 24), rows("w", 24, None, Replicas.UNPROVEN))] * 2,
        {"a": "0=0:8 1=8:16 2=16:24", "w": "1=0:24"},
    ),
    (
        "what a forward pass changes is one replica's",
        [
            local_layout(
                rows("w", 24, sharded(24, COLUMNS, Replicate(), Shard(0)), Replicas.CHANGING)
            )
        ]
        * 4,
        {"w": "0=0:12 2=12:24"},
    ),
    (
        "a tie that a rank without a part cannot see is no tensor",
        [local_layout(rows("a", 3, THIRD), ties=(("b", "a"),))] * 3
        + [local_layout(rows("a", 3, THIRD), rows("b", 3, THIRD))],
        {"a": "0=0:1 1=1:2 2=2:3"},
    ),
]


@pytest.mark.parametrize(
    ("local_layouts", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_who_writes_what(local_layouts: list[LocalLayout], expected: dict[str, str]) -> None:
    assert written(*local_layouts) == expected


@pytest.mark.parametrize("local_layouts", [c[1] for c in CASES], ids=[c[0] for c in CASES])
def test_who_writes_what_follows_from_the_page(local_layouts: list[LocalLayout]) -> None:
    told: dict[bytes, list[int]] = {}
    for rank, one in enumerate(local_layouts):
        told.setdefault(encode_local_layout(one), []).append(rank)
    data = {digest_of(one): decode_local_layout(one) for one in told}
    global_layout = agree([digest_of(encode_local_layout(one)) for one in local_layouts], data)
    found = second_arithmetic.written(list(told.items()))
    wanted: dict[tuple[str, str], list[object]] = {key: [] for key in global_layout.keys}
    for rank in range(len(local_layouts)):
        for key, share in global_layout.assignments(rank):
            wanted[key].append((rank, tuple(zip(*share.box, strict=True))))
    assert {key: sorted(boxes) for key, boxes in found.items()} == wanted


def test_a_table_is_these_bytes() -> None:
    flat = Flat((4, 4), ODD, ("dp",), 2, 20)
    blocks = Flat((8, 2), GRID, ("dp",), 2, 12, (Replicate(), Shard(0)), 2)
    tensors = (
        rows("w", 6, sharded(6, GRID, Shard(0, after=2), Shard(0))),
        LocalTensor("b", "bfloat16", (3,), None, Replicas.UNPROVEN),
        LocalTensor("f", "float32", (4, 4), flat),
        LocalTensor("g", "int8", (8, 2), blocks),
    )
    items = (
        LocalItem("m", "module", False, tensors, (("x", "w"),)),
        LocalItem("rng", "rng", True, ()),
    )
    plain = [
        [
            [
                "m",
                "module",
                False,
                [
                    ["w", "float32", [6, 262144], 0],
                    ["b", "bfloat16", [3], None, 1],
                    ["f", "float32", [4, 4], 1],
                    ["g", "int8", [8, 2], 2],
                ],
                [["x", "w"]],
            ],
            ["rng", "rng", True, [], []],
        ],
        [
            ["sharded", [6, 262144], [["dp", "tp"], [2, 2], [2, 1], 0, []], [[0, 2], [0, 1]]],
            ["flat", [4, 4], [["dp"], [4], [1], 0, [3, 1, 0, 2]], ["dp"], 2, 20],
            ["flat", [8, 2], [["dp", "tp"], [2, 2], [2, 1], 0, []], ["dp"], 2, 12, [[], [0, 1]], 2],
        ],
    ]
    data = encode_local_layout(items)
    assert data == msgspec.msgpack.encode(plain)
    assert digest_of(data).hex() == "bf79aaf401915f9084856c343fd546a2"
    assert decode_local_layout(data) == items


@pytest.mark.parametrize(
    ("ranks", "size", "groups"),
    [(1, 1, 1), (256, 256, 1), (257, 16, 17), (1024, 32, 32), (8192, 91, 91), (131_072, 362, 363)],
)
def test_the_groups_of_a_job(ranks: int, size: int, groups: int) -> None:
    found = cut(ranks)
    assert (found.size, len(found.leaders)) == (size, groups)


@pytest.mark.parametrize(
    ("rank", "ranks", "folder"),
    [
        (255, 256, ""),
        (127, 257, "r00000/"),
        (128, 257, "r00128/"),
        (256, 257, "r00256/"),
        (131_071, 131_072, "r130944/"),
        (200_000, 300_000, "r199826/"),
    ],
)
def test_the_folder_of_a_rank(rank: int, ranks: int, folder: str) -> None:
    assert folder_of(rank, ranks) == folder
