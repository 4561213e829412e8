"""What this rank writes of the state that it took: its table, and its part of the job's work.

Runs on the training thread in `save()`. Nothing is copied: what a rank writes of a tensor is a
window into the memory that it holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from laststep.errors import Usage
from laststep.plan.job import Agreement, Item, Table, Tensor
from laststep.state.layouts import whole
from laststep.state.pieces import Part, Piece
from laststep.state.tensors import Held, Laid, box_of, held_by

if TYPE_CHECKING:
    import torch

    from laststep.checkpointer.parts import Taken
    from laststep.plan.save import ItemSpec
    from laststep.plan.shares import Share
    from laststep.state.pieces import Collected


def table_of(taken: Taken) -> Table:
    """How this rank describes its state to the others."""
    return tuple(
        Item(spec.name, spec.kind, spec.per_rank,
             () if spec.per_rank else _tensors(spec, taken.collected[spec.name]))
        for spec in taken.specs
    )  # fmt: skip


def _tensors(spec: ItemSpec, collected: Collected) -> tuple[Tensor, ...]:
    found = []
    for piece in spec.pieces:
        layout = collected.layouts.get(piece.name)
        shape = piece.shape if layout is None else layout.shape
        found.append(Tensor(piece.name, piece.dtype, shape, layout))
    return tuple(found)


def refuse_parts(taken: Taken) -> None:
    """`Usage` where a rank that saves alone holds only a part of a tensor."""
    for spec in taken.specs:
        layouts = taken.collected[spec.name].layouts
        for piece in spec.pieces if layouts else ():
            layout = layouts.get(piece.name)
            if layout is not None and layout.shape != piece.shape:
                raise Usage(
                    "cannot save a part of a tensor as if it were all of it",
                    where=f"{spec.name}/{piece.name}",
                    expected=f"all of {list(layout.shape)}", found=f"{list(piece.shape)}",
                    remedy="save it with a Checkpointer on all ranks, which stores it whole",
                )  # fmt: skip


def own_share(taken: Taken, agreement: Agreement, rank: int) -> Taken:
    """The part of the state that this rank writes."""
    shares: dict[str, dict[str, list[Share]]] = {}
    for (item, name), share in agreement.shares(rank):
        shares.setdefault(item, {}).setdefault(name, []).append(share)
    specs: list[ItemSpec] = []
    sources: list[torch.Tensor] = []
    at = 0
    for spec in taken.specs:
        mine = taken.sources[at : at + len(spec.pieces)]
        at += len(spec.pieces)
        if spec.per_rank:
            specs.append(spec)
            sources += mine
            continue
        wanted = shares.get(spec.name, {})
        layouts = taken.collected[spec.name].layouts
        pieces: list[Piece] = []
        for piece, source in zip(spec.pieces, mine, strict=True):
            if piece.name not in wanted:
                continue
            layout = layouts.get(piece.name)
            where = f"{spec.name}/{piece.name}"
            held = (
                [Held(whole(piece.shape), source)]
                if layout is None
                else held_by(rank, Laid(source, layout), where)
            )
            shape = piece.shape if layout is None else layout.shape
            for share in wanted[piece.name]:
                memory = next((one.memory for one in held if one.box == share.held), source)
                window = box_of(memory, share.box.within(share.held))
                pieces.append(_piece(piece, shape, share, window))
                sources.append(window)
        specs.append(replace(spec, pieces=tuple(pieces)))
    flat = tuple(piece for spec in specs for piece in spec.pieces)
    return replace(taken, specs=tuple(specs), pieces=flat, sources=tuple(sources))


def _piece(piece: Piece, shape: tuple[int, ...], share: Share, window: torch.Tensor) -> Piece:
    if share.box == whole(shape):
        return piece._replace(shape=shape, contiguous=window.is_contiguous())
    start = share.box.start
    return piece._replace(
        # `~6` stands in no name of a tensor's path, so nothing else has this one.
        name=f"{piece.name}~6at{','.join(map(str, start))}",
        shape=share.box.shape,
        size_bytes=window.numel() * window.element_size(),
        contiguous=window.is_contiguous(),
        part=Part(piece.name, shape, start),
    )
