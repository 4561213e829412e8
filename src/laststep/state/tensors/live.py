"""Single live tensors: make one, see one's memory, give one a value; metrics and generators."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from laststep.errors import Usage
from laststep.process import kernel
from laststep.state.tensors.freed_storage import is_backed
from laststep.state.tensors.kinds import TORCH_DTYPES
from laststep.state.tensors.local_parts import is_dtensor, unlaid

if TYPE_CHECKING:
    from laststep.state.boxes import Box
    from laststep.state.pieces import View


def allocate(dtype: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """A new tensor with undefined content. On a host it lies in huge pages, where there are some:
    1 GB was filled in 0.14 s, not 0.64."""
    made = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
    if made.device.type == "cpu":
        kernel.prefer_huge_pages(made.data_ptr(), made.nbytes)
    return made


def open_view(base: torch.Tensor, view: View) -> torch.Tensor:
    """The strided window that `view` describes, in the bytes of `base`."""
    typed = torch.empty(0, dtype=TORCH_DTYPES[view.dtype], device=base.device)
    storage_offset = base.storage_offset() + view.offset_bytes
    return typed.set_(
        base.untyped_storage(), storage_offset // typed.element_size(), view.shape, view.stride
    )


def from_bytes(data: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A CPU tensor over bytes in row-major order; takes the buffer over."""
    if not data:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[dtype]).view(shape)


def share_bytes(tensor: torch.Tensor, ranks: int) -> int:
    """About what a rank writes of a tensor, as far as that can be said: of a DTensor its own part,
    of a plain one, which so many may hold, an equal part; a sparse one counts as nothing."""
    if is_dtensor(tensor):
        return unlaid(tensor).nbytes
    return tensor.nbytes // ranks if tensor.layout is torch.strided else 0


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same window of the same storage; False where they have none."""
    a, b = unlaid(a), unlaid(b)
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one form have the same bytes, where a NaN is what its bits are."""
    rows = (t.detach().contiguous() for t in (a, b))
    # as_strided, not view: a contiguous tensor of one element may have any stride.
    return torch.equal(*(t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in rows))


def repeats_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements are one place in memory, as after `expand`: torch refuses to write
    into such a tensor."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and step == 0 for size, step in pairs)


def put_tensor(live: torch.Tensor, loaded: torch.Tensor | float) -> torch.Tensor:
    """Give a live tensor a loaded value, unless it was restored in place; returns what is to stand:
    the live tensor, or the loaded one where a sparse tensor of another size cannot be filled."""
    with torch.no_grad():
        if not isinstance(loaded, torch.Tensor):
            live.fill_(loaded)
        elif live.layout is not torch.strided or live.shape != loaded.shape:
            return loaded
        elif not same_memory(live, loaded) or live.is_conj() or live.is_neg():
            live.copy_(loaded)
    return live


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The window of a tensor that is this box of it; the tensor itself where that is all of it."""
    if box.shape == tuple(tensor.shape):
        return tensor
    return tensor[_indices(box)]


def put_box(target: torch.Tensor, at: Box, source: torch.Tensor, taken: Box) -> None:
    """Copy a box of one tensor into a box of another."""
    with torch.no_grad():
        target[_indices(at)].copy_(source[_indices(taken)])


def _indices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def copy_tensors(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first, whatever their strides and devices."""
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


class HeldScalar(NamedTuple):
    """A metric that is still on its device, and when it is there."""

    tensor: torch.Tensor
    event: torch.cuda.Event | None


def hold_scalar(name: str, value: object) -> object:
    """A metric as it is now: a tensor is copied on its device, without waiting for it."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise Usage(
                f"metric {name!r} is not one number",
                expected="a number, a string or a tensor of one element",
                found=f"{value.dtype}{list(value.shape)}",
                remedy="reduce it first, e.g. with mean()",
            )
        if value.is_meta or value.layout is not torch.strided or not is_backed(value):
            raise Usage(
                f"metric {name!r} has no number",
                expected="a tensor of one element, with memory",
                found=f"{value.device}, {value.layout}",
                remedy="pass float(value) while it has one",
            )  # fmt: skip
        held = value.detach().clone()
        event = None
        if held.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(held.device))
        return HeldScalar(held, event)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) not in (int, float, str, bool):
        raise Usage(
            f"metric {name!r} is not a number",
            expected="a number, a string or a tensor of one element",
            found=type(value).__name__,
            remedy="pass float(value), or put it into metadata",
        )
    return value


def plain_scalar(value: object) -> object:
    """The number in a held metric; waits for the device if it must."""
    if not isinstance(value, HeldScalar):
        return value
    if value.event is not None:
        value.event.synchronize()  # it was copied on training's stream, which is not this thread's
    return value.tensor.item()


def torch_rng_states() -> dict[str, object]:
    """The states of torch's generators: the CPU's, and every CUDA device's once CUDA is in use."""
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state_all()
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def seed_torch(seed: int) -> None:
    """Seed torch's generators, on all devices."""
    torch.manual_seed(seed)


def set_torch_rng_states(states: dict[str, object]) -> None:
    torch.set_rng_state(states["cpu"])  # type: ignore[arg-type]
    cuda = states["cuda"]
    if cuda and torch.cuda.is_available():
        count = torch.cuda.device_count()
        torch.cuda.set_rng_state_all(cuda[:count])  # type: ignore[index]
