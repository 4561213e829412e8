"""Training states to checkpoint: a GPT with AdamW of a given size, and a bag of tiny tensors.

Both are a `Training`: something with an iteration that can be timed and a state that can be saved.
Knows nothing of checkpointing. All work is queued on the current stream, and `finish` waits for
that stream alone: waiting for the device would charge other streams' copies to the iteration.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

Guard = Callable[[], AbstractContextManager[object]]
State = dict[str, object]


class Stateful(Protocol):
    """What torch calls stateful."""

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state_dict: dict[str, object]) -> object: ...


class Training:
    """A model, perhaps its optimizer, and an iteration that changes both."""

    def __init__(self, model: Stateful, optimizer: torch.optim.Optimizer | None) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = next(iter(tensors_of(model.state_dict()))).device

    def forward_backward(self) -> None:
        """The part of an iteration that leaves the state alone."""
        raise NotImplementedError

    def update(self) -> None:
        """The part of an iteration that changes the state."""
        raise NotImplementedError

    def iteration(self, guard: Guard = nullcontext) -> None:
        """One iteration, waited for; `guard` is what a peer wants around the update."""
        self.forward_backward()
        with guard():
            self.update()
        self.finish()

    def finish(self) -> None:
        """Wait for the training stream, and for nothing else."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def items(self) -> dict[str, Stateful]:
        """The named parts, as objects with `state_dict`."""
        if self.optimizer is None:
            return {"model": self.model}
        return {"model": self.model, "optimizer": self.optimizer}

    def state(self) -> State:
        """The named parts as dicts; their tensors are the live ones."""
        return {name: item.state_dict() for name, item in self.items().items()}

    def restore(self, state: dict[str, dict[str, object]]) -> None:
        """Put back what `state` gave."""
        for name, item in self.items().items():
            item.load_state_dict(state[name])

    def size_bytes(self) -> int:
        """Bytes of all tensors of the state."""
        return sum(t.numel() * t.element_size() for t in tensors_of(self.state()))

    def tensor_count(self) -> int:
        """How many tensors the state has."""
        return len(tensors_of(self.state()))

    def fingerprint(self) -> int:
        """A number that changes when the state does; equal before a save and after its load."""
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        for i, tensor in enumerate(tensors_of(self.state())):
            bits = tensor.detach().view(words[tensor.element_size()])
            total += (bits.sum(dtype=torch.int64) * (2 * i + 1)).to(self.device)
        return int(total.item())

    def iteration_s(self, count: int) -> list[float]:
        """Seconds of each of `count` iterations without any checkpointing."""
        return [_timed(self.iteration) for _ in range(count)]

    def forward_backward_s(self, count: int = 5) -> float:
        """Median seconds of the part of an iteration in which the state does not change."""

        def part() -> None:
            self.forward_backward()
            self.finish()

        seconds = statistics.median([_timed(part) for _ in range(count)])
        self.iteration()
        return seconds


class GPT(nn.Module):
    """A plain decoder-only transformer: twelve tensors a layer, as in GPT-2."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(functional.layer_norm(hidden, hidden.shape[-1:]))
        loss: Tensor = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        return loss


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, 64)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(functional.gelu(self.up(self.norm2(hidden))))


class GPTTraining(Training):
    """A GPT under AdamW, with state in every slot. `batch` sequences of `length` set the pace."""

    def __init__(self, size_bytes: float, device: str, *, batch: int, length: int) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        parameters = size_bytes / 3 / dtype.itemsize  # the weights and two moments
        layers, width, self._vocabulary = _shape(parameters)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = GPT(layers, width, self._vocabulary)
        finally:
            torch.set_default_dtype(torch.float32)
        self._module = model
        self._adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        super().__init__(model, self._adamw)
        self.step_timer(batch, length)
        for _ in range(2):
            self.iteration()

    def step_timer(self, batch: int, length: int) -> None:
        """Set how much one iteration computes."""
        self._tokens = torch.randint(self._vocabulary, (batch, length), device=self.device)

    def pace_for(self, iteration_s: float, length: int) -> int:
        """Choose the batch for an iteration of about `iteration_s`; returns it."""
        batch = 1
        while True:
            self.step_timer(batch, length)
            self.iteration_s(2)
            seconds = statistics.median(self.iteration_s(3))
            # Below, launches and memory may decide, and time does not grow with the batch.
            if seconds > 0.6 * iteration_s or batch >= 1024:
                break
            batch *= 2
        batch = max(1, round(batch * iteration_s / seconds))
        self.step_timer(batch, length)
        self.iteration_s(2)
        return batch

    @property
    def module(self) -> GPT:
        return self._module

    def loss(self) -> Tensor:
        """Of the tokens that set the pace."""
        loss: Tensor = self._module(self._tokens)
        return loss

    def forward_backward(self) -> None:
        self._adamw.zero_grad()
        loss = self.loss()
        loss.backward()
        # As a trainer that logs its loss: this copy must not queue behind those of a capture.
        loss.item()

    def update(self) -> None:
        self._adamw.step()


class Bag:
    """Many small tensors under one name each."""

    def __init__(self, count: int, bytes_each: int, device: str) -> None:
        torch.manual_seed(0)
        whole = torch.randn(count, bytes_each // 4, device=device)
        # Cloned: rows of one tensor would share a storage, which some peers then write once.
        self.tensors = {f"t.{i:06d}": row.clone() for i, row in enumerate(whole)}

    def state_dict(self) -> dict[str, object]:
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        mine = list(self.tensors.values())
        theirs = tensors_of([state_dict[name] for name in self.tensors])
        if any(a is not b for a, b in zip(mine, theirs, strict=True)):
            torch._foreach_copy_(mine, theirs)


class SmallTensors(Training):
    """The bag, changed in place after some arithmetic that stands for forward and backward."""

    def __init__(self, count: int = 100_000, bytes_each: int = 1024, device: str = "cpu") -> None:
        bag = Bag(count, bytes_each, device)
        super().__init__(bag, None)
        self._tensors = list(bag.tensors.values())
        side = 8192 if device.startswith("cuda") else 1024
        self._operand = torch.randn(side, side, device=device)

    def forward_backward(self) -> None:
        for _ in range(2):
            torch.mm(self._operand, self._operand)

    def update(self) -> None:
        torch._foreach_mul_(self._tensors, 1.0001)


def tensors_of(state: object) -> list[Tensor]:
    """All tensors in nested dicts and lists, in order."""
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    if isinstance(state, (list, tuple)):
        return [tensor for value in state for tensor in tensors_of(value)]
    return []


def _shape(parameters: float) -> tuple[int, int, int]:
    """Layers, width and vocabulary for about that many parameters."""
    for width, vocabulary in ((2048, 50304), (768, 25600), (512, 8192), (256, 4096)):
        layers = round((parameters - 2 * vocabulary * width) / (12 * width * width))
        if layers >= 6:
            return layers, width, vocabulary
    return 2, 256, 1024


def _timed(act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
