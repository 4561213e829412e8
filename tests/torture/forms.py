"""States of several forms, every bit of which follows from a number, the mark.

Bytes are random, so floats are also infinities and nans with any payload; they are compared as
bytes. Plain values are compared with their types.
"""

from __future__ import annotations

import math

import torch

Form = int
Shape = dict[str, tuple[torch.dtype, tuple[int, ...]]]

FORMS: tuple[Shape, ...] = (
    {"w": (torch.float32, (64, 33)), "b": (torch.bfloat16, (7,)), "n": (torch.int64, ())},
    {
        "w": (torch.float32, (64, 33)),
        "b": (torch.bfloat16, (7,)),
        "n": (torch.int64, ()),
        "x": (torch.float64, (1000,)),
    },
    {"w": (torch.float16, (64, 33)), "n": (torch.int64, ()), "e": (torch.uint8, (0, 4))},
    {"w": (torch.float32, (1300, 1000)), "t": (torch.bool, (13,)), "c": (torch.complex64, (5, 3))},
)
"""Of each tensor its dtype and shape. The last has more than one block of 1 MiB."""


class Live:
    """A live state: two items, a dict of tensors and a dict of plain values."""

    def __init__(self, form: Form, mark: int) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.plain: dict[str, object] = {}
        self.become(form, mark)

    @property
    def items(self) -> dict[str, object]:
        """What a Checkpointer is given."""
        return {"weights": self.weights, "plain": self.plain}

    def become(self, form: Form, mark: int) -> None:
        """Take that form and those bits; in place where a tensor fits, as training does."""
        self.form, self.mark = form, mark
        wanted = tensors(form, mark)
        for name in [name for name in self.weights if name not in wanted]:
            del self.weights[name]
        for name, tensor in wanted.items():
            old = self.weights.get(name)
            if old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape):
                old.copy_(tensor)
            else:
                self.weights[name] = tensor
        self.plain.clear()
        self.plain.update(plain(form, mark))

    def wrong(self, form: Form, mark: int) -> list[str]:
        """All that is not as that form and mark say."""
        return differences(self.weights, self.plain, form, mark)


def tensors(form: Form, mark: int) -> dict[str, torch.Tensor]:
    """The tensors of a form with the bits of a mark."""
    generator = torch.Generator().manual_seed(mark * 16 + form)
    made = {}
    for name, (dtype, shape) in FORMS[form].items():
        count = math.prod(shape)
        top = 2 if dtype is torch.bool else 256
        size = count * dtype.itemsize
        data = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)
        made[name] = data.view(dtype).reshape(shape)
    return made


def plain(form: Form, mark: int) -> dict[str, object]:
    """The plain values."""
    return {
        "mark": mark,
        "form": form,
        "half": mark / 2,
        "text": f"mark {mark}",
        "pair": (mark, -0.0 if mark % 2 else 0.0),
        "flag": bool(mark % 2),
        "none": None,
        "nested": [{"a": mark, 1: [mark % 3 == 0]}, {mark % 5}],
    }


def differences(
    weights: dict[str, torch.Tensor], values: dict[str, object], form: Form, mark: int
) -> list[str]:
    """What is not bit for bit what it must be, by name."""
    wanted = tensors(form, mark)
    found = [f"{name} is missing" for name in wanted if name not in weights]
    found += [f"{name} is too many" for name in weights if name not in wanted]
    for name in wanted.keys() & weights.keys():
        one, two = weights[name], wanted[name]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            found.append(f"{name} is {one.dtype} {tuple(one.shape)}")
        elif not torch.equal(_bytes(one), _bytes(two)):
            found.append(f"{name} has other bytes")
    if repr(values) != repr(plain(form, mark)):
        found.append(f"plain values are {values!r}")
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
