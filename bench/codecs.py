"""`python bench/codecs.py`: how small and how fast each codec of blocks is on real training state.

A GPT of 3.3 million parameters is trained on the pages of this project, then one step further, then
1 and 100 steps at a learning rate of 1e-6. Its state is cut into blocks as a file is. Of each block
the best of several turns counts, in CPU time of one thread and in wall time: others may use the
same cores. What is encoded is dropped at once, as when it has been written. A block for which a
codec says that it does not pay counts as it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from bench.state import GPT  # noqa: E402
from laststep.codecs.blocks import codec_named  # noqa: E402
from laststep.codecs.rounding import to_bf16, to_int8  # noqa: E402
from laststep.constants import BLOCK_BYTES  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.codecs.blocks import BlockCodec

    State = dict[str, torch.Tensor]

SEQUENCES, LENGTH = 8, 128
MOMENTS = ("exp_avg", "exp_avg_sq")
FP32 = ("weights", *MOMENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of a call at its best, by two clocks."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """What a codec made of some state."""

    size_bytes: int
    stored_bytes: int
    encode: Speed
    decode: Speed

    @property
    def ratio(self) -> float:
        return self.size_bytes / self.stored_bytes

    def gb_s(self, seconds: float) -> float:
        return self.size_bytes / max(seconds, 1e-9) / 1e9


def total(parts: list[Coded]) -> Coded:
    """All of it together."""

    def added(speeds: list[Speed]) -> Speed:
        return Speed(
            cpu_s=sum(one.cpu_s for one in speeds), wall_s=sum(one.wall_s for one in speeds)
        )

    return Coded(
        size_bytes=sum(part.size_bytes for part in parts),
        stored_bytes=sum(part.stored_bytes for part in parts),
        encode=added([part.encode for part in parts]),
        decode=added([part.decode for part in parts]),
    )


def train(steps: int) -> tuple[State, State, State, State]:
    """The state after so many steps, one step later, and from there 1 and 100 steps of 1e-6."""
    torch.manual_seed(0)
    text = b"".join(page.read_bytes() for page in sorted(ROOT.glob("docs/**/*.md")))
    letters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT(4, 256, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        starts = torch.randint(len(letters) - LENGTH, (SEQUENCES,)).tolist()
        loss = model(torch.stack([letters[at : at + LENGTH] for at in starts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def state() -> State:
        parameters = list(model.parameters())
        found = {"weights": torch.cat([one.detach().flatten() for one in parameters])}
        for name in MOMENTS:
            found[name] = torch.cat([optimizer.state[one][name].flatten() for one in parameters])
        return {**found, "bf16": found["weights"].bfloat16()}

    losses = [step() for _ in range(steps)]
    print(f"{steps} steps on {len(letters):,} letters: loss {losses[0]:.2f} to {losses[-1]:.2f}")
    trained = state()
    step()
    later = state()
    for group in optimizer.param_groups:
        group["lr"] = 1e-6
    step()
    tuned = state()
    for _ in range(99):
        step()
    return trained, later, tuned, state()


def blocks_of(tensor: torch.Tensor) -> list[memoryview]:
    """Its bytes, in blocks."""
    whole = memoryview(tensor.view(torch.uint8).numpy())
    return [whole[at : at + BLOCK_BYTES] for at in range(0, len(whole), BLOCK_BYTES)]


def best(call: Callable[[], object], turns: int) -> Speed:
    """The least of each clock."""
    cpu_s, wall_s = [], []
    for _ in range(turns):
        cpu, wall = time.thread_time(), time.perf_counter()
        call()
        cpu_s.append(time.thread_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    return Speed(cpu_s=min(cpu_s), wall_s=min(wall_s))


def code(name: str, new: torch.Tensor, old: torch.Tensor | None, turns: int) -> Coded:
    """Encode and decode every block."""
    blocks = blocks_of(new)
    befores = [None] * len(blocks) if old is None else blocks_of(old)
    return total(
        [
            code_block(codec_named(name), data, new.element_size(), before, turns)
            for data, before in zip(blocks, befores, strict=True)
        ]
    )


def code_block(
    codec: BlockCodec, data: memoryview, width: int, before: memoryview | None, turns: int
) -> Coded:
    """Encode and decode one; what comes back must be what it was."""

    def encode() -> bytes | None:
        return codec.encode(data, width, before)

    def decode() -> bytes:
        if found is None:
            return bytes(data)
        return codec.decode(memoryview(found), len(data), width, before)

    found = encode()
    if decode() != data:
        raise AssertionError(f"{codec.name} gives back other bytes")
    return Coded(
        size_bytes=len(data),
        stored_bytes=len(data) if found is None else len(found),
        encode=best(encode, turns),
        decode=best(decode, turns),
    )


def show(what: str, found: Coded, bar: float | None = None) -> None:
    """A line; with a bar, whether the ratio and 0.8 GB/s of CPU time each way are met."""
    line = f"{what:44} {found.ratio:8.2f}"
    for speed in (found.encode, found.decode):
        line += f" {found.gb_s(speed.cpu_s):8.2f} {found.gb_s(speed.wall_s):8.2f}"
    if bar is not None:
        slowest = min(found.gb_s(found.encode.cpu_s), found.gb_s(found.decode.cpu_s))
        met = found.ratio >= bar and slowest >= 0.8
        line += f"   {bar:g}x at 0.8 GB/s: {'met' if met else 'MISSED'}"
    print(line)


def main() -> None:
    """Train, then print a line for each kind of state and codec."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--turns", type=int, default=9, help="of which the best counts")
    options = parser.parse_args()
    trained, later, *tuned = train(options.steps)
    print(f"\n{'':44} {'ratio':>8} {'encode, GB/s':>17} {'decode, GB/s':>17}")
    print(f"{'':44} {'':8} {'CPU':>8} {'wall':>8} {'CPU':>8} {'wall':>8}")
    dense = {name: code("planes", trained[name], None, options.turns) for name in FP32}
    for name, found in dense.items():
        show(f"fp32 {name}, planes", found)
    show("fp32 state, planes", total(list(dense.values())), 1.18)
    show("bf16 weights, planes", code("planes", trained["bf16"], None, options.turns), 1.45)
    for name, to in (("exp_avg", to_int8), ("exp_avg", to_bf16), ("exp_avg_sq", to_bf16)):
        rounded = trained[name].clone()
        to(memoryview(rounded.view(torch.uint8).numpy()), 0)
        found = code("planes", rounded, None, options.turns)
        show(f"{name} rounded {to.__name__.replace('_', ' ')}, planes", found)
    for name in (*FP32, "bf16"):
        found = code("subtract", later[name], trained[name], options.turns)
        show(f"{name}, one step later, subtract", found)
    for steps, state in zip((1, 100), tuned, strict=True):
        for name in ("subtract", "patches"):
            found = code(name, state["bf16"], later["bf16"], options.turns)
            bar = 20 if (steps, name) == (1, "patches") else None
            show(f"bf16, after steps of 1e-6: {steps}, {name}", found, bar)


if __name__ == "__main__":
    main()
