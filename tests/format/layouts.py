"""Layouts for tests: drawn by hypothesis, or made of a few tensors."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from laststep.constants import DTYPES
from laststep.format.layout import FileLayout, Part, TensorEntry, header_bytes_of

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def layout_of(
    *tensors: tuple[str, str, tuple[int, ...]], name: str = "m.safetensors", item: str | None = "m"
) -> FileLayout:
    """A data file with these tensors, one after the other."""
    entries: list[TensorEntry] = []
    at = 0
    for tensor, dtype, shape in tensors:
        size = math.prod(shape) * DTYPES[dtype].size_bytes
        entries.append(TensorEntry(tensor, dtype, shape, at, at + size))
        at += size
    return FileLayout(
        name=name,
        item=item,
        header_bytes=header_bytes_of(entries),
        tensor_bytes=at,
        tensors=tuple(entries),
    )


@st.composite
def layouts(draw: st.DrawFn, *, name: str = "m.safetensors") -> FileLayout:
    """Small tensors of any dtype, some of which are parts of larger ones."""
    dtypes = st.sampled_from(sorted(DTYPES))
    tensors = [
        (tensor, draw(dtypes), draw(shapes))
        for tensor in draw(st.lists(names, max_size=6, unique=True))
    ]
    made = layout_of(*tensors, name=name, item=draw(st.none() | names))
    parts = {}
    for entry in made.tensors:
        if draw(st.booleans()):
            start = tuple(draw(st.integers(0, 5)) for _ in entry.shape)
            whole = tuple(
                a + b + draw(st.integers(0, 5)) for a, b in zip(start, entry.shape, strict=True)
            )
            parts[entry.name] = Part(draw(names.filter(bool)), whole, start)
    return FileLayout(
        name=made.name,
        item=made.item,
        header_bytes=made.header_bytes,
        tensor_bytes=made.tensor_bytes,
        tensors=made.tensors,
        parts=parts,
    )
