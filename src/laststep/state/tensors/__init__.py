"""Everything that must know what a tensor is: take it apart, describe it, allocate it, revive it.

The only part of `state` that imports torch. Moves no tensor from one device to another: `capture`
does that on a save, `restoring` on a restore.
"""

from laststep.state.tensors.collecting import CollectCache, collect
from laststep.state.tensors.kinds import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    is_module,
    is_optimizer,
    is_tensor,
    is_tensor_type,
    register_tensor_type,
)
from laststep.state.tensors.live import (
    allocate,
    box_of,
    copy_tensors,
    from_bytes,
    hold_scalar,
    open_view,
    plain_scalar,
    put_box,
    put_tensor,
    repeats_itself,
    same_bytes,
    same_memory,
    seed_torch,
    set_torch_rng_states,
    share_bytes,
    torch_rng_states,
)
from laststep.state.tensors.local_parts import (
    Laid,
    LocalBox,
    check_held,
    held_by,
    is_dtensor,
    laid_of,
    like,
    unlaid,
)
from laststep.state.tensors.reviving import revive
from laststep.state.tensors.tensor_places import KnownTensors, in_batches

__all__ = [
    "DTYPE_NAMES", "TORCH_DTYPES", "CollectCache", "KnownTensors", "Laid", "LocalBox",
    "allocate", "box_of", "check_held", "collect", "copy_tensors", "from_bytes", "held_by",
    "hold_scalar", "in_batches", "is_dtensor", "is_module", "is_optimizer", "is_tensor",
    "is_tensor_type", "laid_of", "like", "open_view",
    "plain_scalar", "put_box", "put_tensor", "register_tensor_type",
    "repeats_itself", "revive", "same_bytes", "same_memory", "seed_torch",
    "set_torch_rng_states", "share_bytes", "torch_rng_states", "unlaid",
]  # fmt: skip
