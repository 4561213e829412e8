"""Tensors of which a rank holds a part: find the local memory and the layout, and the way back.

Knows DTensor, and what a user lays out by hand. Nothing here communicates: a DTensor says where it
lies, and a new one is made around local memory.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from laststep.errors import Usage
from laststep.state.layouts import Layout, Mesh, Placement, Replicate, Shard, Sharded

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from laststep.state.boxes import Box


class Laid(NamedTuple):
    """A part of a logical tensor: what this rank holds of it, and how it lies over all ranks.

    For a `Sharded` layout `local` has the shape of the box that this rank holds; for a `Flat` one
    it is the range of the flattened tensor, in one dimension. Where the rank holds nothing, it has
    no elements.
    """

    local: torch.Tensor
    layout: Layout


class LocalBox(NamedTuple):
    """A box of a logical tensor, and the local memory that holds it."""

    box: Box
    memory: torch.Tensor


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor, without importing what defines it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_dtensor_class(kind: type) -> bool:
    """The same of a type."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def laid_of(tensor: DTensor, where: str) -> Laid:
    """A DTensor's local part and its layout."""
    key = (id(tensor.device_mesh), tensor.placements, tensor.shape)
    known = _LAYOUTS.get(key)
    if known is None or known[0] is not tensor.device_mesh:
        _bound(_LAYOUTS)
        known = _LAYOUTS[key] = (tensor.device_mesh, _layout_of(tensor, where))
    return Laid(tensor._local_tensor, known[1])


_LAYOUTS: dict[object, tuple[object, Sharded]] = {}
"""Tensors of one shape on one mesh lie alike; a model has few such shapes."""


def _layout_of(tensor: DTensor, where: str) -> Sharded:
    placements: list[Placement] = []
    for place in tensor.placements:
        if place.is_replicate():
            placements.append(Replicate())
        elif place.is_partial() or getattr(place, "dim", None) is None:
            raise Usage(
                f"cannot save a tensor that is placed as {place}", where=where,
                expected="shards and replicas", remedy="redistribute it first",
            )  # fmt: skip
        else:
            dim = int(place.dim) % max(len(tensor.shape), 1)  # type: ignore[attr-defined]
            placements.append(Shard(dim, int(getattr(place, "split_factor", 1))))
    return Sharded(tuple(tensor.shape), mesh_of(tensor.device_mesh), tuple(placements))


def mesh_of(mesh: DeviceMesh) -> Mesh:
    """A DeviceMesh as a mesh of ours, of the job's ranks."""
    known = _MESHES.get(id(mesh))
    if known is None or known[0] is not mesh:  # `mesh.mesh` works it out anew each time
        sizes = tuple(mesh.mesh.shape)
        names = mesh.mesh_dim_names or tuple(f"dim{n}" for n in range(len(sizes)))
        made = Mesh.of(tuple(names), sizes, mesh.mesh.flatten().tolist())
        _bound(_MESHES)
        known = _MESHES[id(mesh)] = (mesh, made)
    return known[1]


_MESHES: dict[int, tuple[object, Mesh]] = {}
"""A job has a few meshes and thousands of tensors on each."""


def _bound(known: dict[Any, Any]) -> None:
    """Forget all before it is too much: a process may make meshes, and each is held here."""
    if len(known) >= _MOST_KNOWN:
        known.clear()


_MOST_KNOWN = 4096


def check_held(rank: int, boxes: tuple[Box, ...], elements: int, where: str) -> None:
    """`Usage` where a rank's memory has not the elements of the boxes that it is said to hold."""
    volume = sum(box.volume for box in boxes)
    if volume != elements:
        raise Usage(
            "a tensor does not hold what its layout says", where=where,
            expected=f"{volume} elements on rank {rank}", found=str(elements),
            remedy="check the layout, and the ranks of its mesh",
        )  # fmt: skip


def held_by(rank: int, laid: Laid, where: str) -> list[LocalBox]:
    """The boxes that a rank holds, each with its memory."""
    boxes = laid.layout.held(rank)
    check_held(rank, boxes, laid.local.numel(), where)
    if len(boxes) == 1:
        return [LocalBox(boxes[0], laid.local.view(boxes[0].shape))]
    flat, at, held = laid.local.reshape(-1), 0, []
    for box in boxes:
        held.append(LocalBox(box, flat[at : at + box.volume].view(box.shape)))
        at += box.volume
    return held


def like(model: DTensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor of the same shape and layout as `model` around local memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape,
        stride=model.stride(),
    )  # fmt: skip


def unlaid(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
