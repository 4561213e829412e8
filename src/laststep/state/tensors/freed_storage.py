"""Whether a tensor has the memory that its sizes speak of.

A storage can be freed or made smaller under its tensors (`untyped_storage().resize_`, as FSDP and
offloading do), which keep their shapes and then point to nothing: whoever copies from one dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.errors import Usage

if TYPE_CHECKING:
    import torch


def needed_bytes(tensor: torch.Tensor) -> int:
    """How far into its storage a tensor reaches."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_contiguous():
        reach = tensor.numel()
    else:
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * step for size, step in pairs)
    return (int(tensor.storage_offset()) + reach) * tensor.element_size()


def is_backed(tensor: torch.Tensor) -> bool:
    """Whether a plain, strided tensor lies within its storage."""
    needed = needed_bytes(tensor)
    return needed == 0 or (needed <= tensor.untyped_storage().nbytes() and tensor.data_ptr() != 0)


def not_backed(tensor: torch.Tensor, where: str) -> Usage:
    """The error for one that does not."""
    there, needed = tensor.untyped_storage().nbytes(), needed_bytes(tensor)
    is_large_enough = there >= needed  # then its address is 0, as that of a ZeroTensor
    what = "its memory was freed" if there == 0 else "its storage is too small"
    what = "it has no memory" if is_large_enough else what
    return Usage(
        f"cannot copy a tensor: {what}",
        where=where,
        expected=f"a storage of at least {needed} bytes",
        found="a storage at address 0" if is_large_enough else f"{there} bytes",
        remedy="bring its data back first, e.g. unshard or reload what was offloaded",
    )
