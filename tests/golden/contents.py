"""What the golden runs hold, made by arithmetic that no version of torch changes.

Each function makes live state: with the values that are stored (`filled`), or with others, to
restore into. Nothing here is trained.
"""

from __future__ import annotations

import collections
import hashlib
import math

import torch
from torch import nn

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def pattern(shape: tuple[int, ...], salt: int) -> torch.Tensor:
    """Numbers from -64 to 63.5, other ones for another salt; exact in every float type of 16 bits
    and more."""
    numbers = torch.arange(math.prod(shape), dtype=torch.int64)
    return (((numbers * 37 + salt * 101) % 256) / 2 - 64).to(torch.float32).view(shape)


class Net(nn.Module):
    """Parameters of odd sizes, a tie, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, salt: int) -> None:
    """Give every tensor its values, and the optimizer the state that it has after some steps.
    `model` lies whole in memory."""
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.copy_(pattern(tuple(tensor.shape), salt + number))
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = state_of(tuple(parameter.shape), salt + 100 + number)


def state_of(shape: tuple[int, ...], salt: int) -> dict[str, torch.Tensor]:
    """AdamW's state of one parameter."""
    return {
        "step": torch.tensor(float(salt)),
        "exp_avg": pattern(shape, salt + 1),
        "exp_avg_sq": pattern(shape, salt + 2).abs(),
    }


def training(salt: int | None) -> dict[str, nn.Module | torch.optim.Optimizer]:
    """A model and its optimizer; without a salt as they are made."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.125)
    if salt is not None:
        fill(model, optimizer, salt)
    return {"model": model, "optimizer": optimizer}


def tensors_of(items: dict[str, nn.Module | torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """All tensors of a model and its optimizer, by name."""
    model, optimizer = items["model"], items["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    found = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            found[f"{name}:{key}"] = tensor
    return found


def values() -> dict[str, object]:
    """A value of every plain kind, and a tensor of every dtype."""
    odd = torch.arange(24, dtype=torch.float32).view(4, 6)
    return {
        "none": None,
        "yes": True,
        "int": -(2**63),
        "wide": 2**100,
        "float": 0.1,
        "zero": -0.0,
        "infinite": -math.inf,
        "complex": complex(1.5, -0.0),
        "text": "größer\n",
        "lone": "\ud800",
        "bytes": b"\x00\xff",
        "long": bytes(range(256)) * 20,
        "array": bytearray(b"ab"),
        "list": [1, [2.5, []]],
        "tuple": (1, (True, ())),
        "set": {1, "a"},
        "frozen": frozenset({2}),
        "keys": {1: "int", "1": "str", (1, "a"): "tuple", None: "none"},
        "ordered": collections.OrderedDict(b=1, a=2),
        "deque": collections.deque([1, 2], maxlen=3),
        "counter": collections.Counter(x=2),
        "range": range(1, 9, 2),
        "slice": slice(1, None, 2),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "tensors": {str(dtype): pattern((3, 2), n).to(dtype) for n, dtype in enumerate(DTYPES)},
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "strided": odd.t()[1:, ::2],
        "sparse": torch.eye(3).to_sparse(),
    }


def of_rank(rank: int) -> dict[str, object]:
    """What each rank has for itself."""
    return {"rank": rank, "seen": pattern((3 + rank,), 40 + rank), "name": f"rank {rank}"}


def borrowed(step: int) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """A model that changes with step 2 only, and a small item whose tensor stays while a value
    changes."""
    weight = torch.arange(501, dtype=torch.int32) // 10
    if step == 2:
        weight[:10] = 7
    kept = torch.arange(1_500, dtype=torch.int32) // 100
    return {"w": weight}, {"seen": 4096 * step, "kept": kept}


class Kept(nn.Module):
    """Tensors that get a file of their own, however small."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def bits(count: int, seed: str, mask: int) -> torch.Tensor:
    """Integers of 16 bits that are noise in those bits of the mask."""
    noise = torch.frombuffer(
        bytearray(hashlib.shake_128(seed.encode()).digest(2 * count)), dtype=torch.int16
    )
    return noise & mask


def coded(step: int) -> dict[str, object]:
    """Items that are told in every way from step to step: as they are, by planes, by few or by all
    of their elements, not at all; and an image of two blocks. In step 3 the end of that and a plain
    value alone are others than in step 2."""
    last, step = step == 3, min(step, 2)
    few, many = (bits(3_000, name, 0x007F) + 0x3F80 for name in ("few", "many"))
    few[::97] += step
    many += bits(3_000, "added", 3) * step
    other = bits(3_000, f"other {step}", 0x007F) + 0x3F80
    wide = torch.zeros(2 * 135_001, dtype=torch.int32)
    wide[:: 40_000 // (step + 1)] = 1 + step
    wide[-1] = 9 * last
    kept = bits(900, "kept", 0x3F)
    return {
        "few": Kept(w=few.view(torch.bfloat16), b=bits(500, "noise", -1).view(torch.float8_e5m2)),
        "many": Kept(w=many.view(torch.bfloat16)),
        "other": Kept(w=other.view(torch.float16)),
        "noise": Kept(w=bits(2_001, f"noise {step // 2}", -1)),
        "same": Kept(w=bits(1_000, "same", 0xFF)),
        "wide": Kept(w=wide.view(torch.complex64)),
        "position": {"seen": 4096 * (step + last), "kept": kept, "n": bits(3, "n", 7 * step)},
    }
