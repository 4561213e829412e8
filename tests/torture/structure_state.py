"""The state of the structure fuzz: a model, its optimizer and a plain dict, whose every bit can be
written down, compared with what was loaded, and put back after it was wrecked."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    import random

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
LARGE = 6 << 20
"""Elements of a large tensor: more than one slot."""


class World:
    """What is saved. Every change to it is made through its three members."""

    def __init__(self, chance: random.Random, device: str, *, large: bool) -> None:
        self.chance, self.device, self.large = chance, device, large
        self.model = nn.Module()
        for number in range(chance.randint(1, 6)):
            self.model.register_parameter(f"p{number}", nn.Parameter(self.tensor()))
        for number in range(chance.randint(0, 3)):
            self.model.register_buffer(f"b{number}", self.tensor())
        if large:
            for number in range(3):
                big = torch.randn(LARGE + 1000 * number, device=device)
                self.model.register_parameter(f"big{number}", nn.Parameter(big))
        kinds = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop]
        self.optimizer = chance.choice(kinds)(self.model.parameters(), lr=0.01)
        self.extra: dict[str, object] = {"step": 0, "t": self.tensor(), "nested": {"x": [1, 2.0]}}

    def tensor(self) -> torch.Tensor:
        """A new one of any small size; of float32, as parameters are."""
        shape = self.chance.choice([(), (1,), (7,), (3, 5), (33, 17), (2, 3, 4), (1000,)])
        return torch.randn(shape, device=self.device)

    def train(self) -> None:
        """A step of the optimizer, which makes its state and waits for lazy captures."""
        for parameter in self.model.parameters():
            if parameter.is_floating_point() and not parameter.is_complex():
                parameter.grad = torch.ones_like(parameter)
            else:
                parameter.grad = None
        self.optimizer.step()

    def parameter(self) -> tuple[str, nn.Parameter]:
        """One of the model's, with its name."""
        return self.chance.choice(list(self.model.named_parameters()))

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop what the optimizer has on a parameter, which has another form now."""
        self.optimizer.state.pop(parameter, None)
        parameter.grad = None

    def tensors(self) -> list[torch.Tensor]:
        """All live dense tensors, wherever they are kept."""
        found = [*self.model.parameters(), *self.model.buffers()]
        found += [v for s in self.optimizer.state.values() for v in s.values() if _dense(v)]
        return found + [value for value in self.extra.values() if _dense(value)]

    def written_down(self) -> dict[str, object]:
        """Every bit of it, as plain values."""
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self.model.named_parameters():
            names.setdefault(parameter, name)
        state = {
            names[parameter]: written_down(entries)
            for parameter, entries in self.optimizer.state.items()
            if entries
        }
        options = [options_of(group) for group in self.optimizer.param_groups]
        return {
            "model": written_down(dict(self.model.state_dict())),
            "state": ("dict", sorted(state.items())),
            "options": written_down(options),
            "extra": written_down(self.extra),
        }

    def copied(self) -> list[object]:
        """Copies of all that can be wrecked, for `heal`."""
        return [
            {name: p.detach().clone() for name, p in self.model.named_parameters()},
            {name: b.detach().clone() for name, b in self.model.named_buffers()},
            {p: _copied(s) for p, s in self.optimizer.state.items()},
            _copied(self.extra),
        ]

    def heal(self, copies: list[object]) -> None:
        """Put back what was copied."""
        parameters, buffers, state, extra = copies
        with torch.no_grad():
            for name, parameter in list(self.model.named_parameters()):
                if name in parameters:  # type: ignore[operator]
                    parameter.data = parameters[name].clone()  # type: ignore[index]
                    parameter.grad = None
            for name, buffer in buffers.items():  # type: ignore[attr-defined]
                setattr(self.model, name, buffer.clone())
        for parameter, entries in state.items():  # type: ignore[attr-defined]
            self.optimizer.state[parameter] = _copied(entries)
        self.extra.clear()
        self.extra.update(_copied(extra))  # type: ignore[call-overload]


def options_of(group: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def loaded_as_written(loaded: dict[str, object]) -> dict[str, object]:
    """What `laststep.load` gives, in the form of `World.written_down`."""
    optimizer = loaded["optimizer"]
    state = {name: written_down(s) for name, s in optimizer["state"].items() if s}  # type: ignore[index]
    return {
        "model": written_down(loaded["model"]),
        "state": ("dict", sorted(state.items())),
        "options": written_down([options_of(group) for group in optimizer["param_groups"]]),  # type: ignore[index]
        "extra": written_down(loaded["extra"]),
    }


def written_down(value: object) -> object:
    """A value by its type and bits, at every depth."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.layout is torch.sparse_coo:
            return "sparse", written_down(value._indices()), written_down(value._values())
        dense = value.resolve_conj().resolve_neg().cpu().contiguous()
        # By its address: a tensor that is asked for an array can never be resized again.
        raw = ctypes.string_at(dense.data_ptr(), dense.nbytes) if dense.numel() else b""
        return "tensor", str(value.dtype), tuple(value.shape), raw
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return "dict", [(written_down(key), written_down(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [written_down(one) for one in value]
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    return type(value).__name__, repr(value)


def _dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def _copied(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(one) for one in value)
    return value
