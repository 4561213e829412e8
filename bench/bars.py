"""What laststep has to reach, against what was measured in the same run. Pure: figures in, verdicts
out. A bar whose figures were not all measured is `not measured`, never `met`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.spread import RawSummary, Spread, Summary, summarise, summarise_raw

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.device import CopyLimits
    from bench.rotation import Rotation
    from bench.scenarios import EveryIteration

OURS = "laststep"
LAZY = "laststep lazy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One thing to reach. `met` is None where it was not measured."""

    name: str
    wanted: str
    found: str
    met: bool | None


def cpu_bars(main: Rotation | None, small: Rotation | None) -> list[Bar]:
    """The bars of a machine without a GPU."""
    peers, raw, size = _unpack(main)
    ours = peers.get(OURS)
    return [
        _rate("durable, share of the raw write rate", 0.85, size, _durable(ours), raw.write),
        _faster("durable, against dcp", 3, _durable(ours), _durable(peers.get("dcp"))),
        _faster(
            "durable, against torch.save", 2, _durable(ours), _durable(peers.get("torch.save"))
        ),
        _faster(
            "durable, against safetensors", 2, _durable(ours), _durable(peers.get("safetensors"))
        ),
        _share(
            "time lost, share of torch.save's", 0.20, _lost(ours), _lost(peers.get("torch.save"))
        ),
        _rate("cold restore, share of the raw read rate", 0.85, size, _load(ours), raw.read),
        *_small_bars(small),
    ]


def gpu_bars(
    long: Rotation | None,
    short: Rotation | None,
    small: Rotation | None,
    every: list[EveryIteration],
    copies: CopyLimits | None,
    host_memory_bytes: int,
) -> list[Bar]:
    """The bars of a machine with a GPU; `long` and `short` are the two lengths of iteration."""
    peers, raw, size = _unpack(long)
    ours = peers.get(OURS)
    best = [summary for name, summary in peers.items() if not name.startswith(OURS)]
    peak = ours.peak_bytes if ours else None
    drained = next((e.ratio() for e in every if e.name == "drains"), None)
    return [
        _rate("durable, share of the raw write rate", 0.90, size, _durable(ours), raw.write),
        _faster("durable, against the best peer", 1.4, _durable(ours), _best(map(_durable, best))),
        *_capture_bars("long iteration", long, copies),
        *_capture_bars("short iteration", short, copies),
        _rate(
            "cold restore, share of raw read and copy", 0.90, size, _load(ours), raw.read_to_device
        ),
        _faster("cold restore, against the best peer", 1.5, _load(ours), _best(map(_load, best))),
        _at_most("peak host memory", host_memory_bytes / 1e9, _scaled(peak, 1e-9), "GB"),
        _at_most("save every iteration while the disk drains", 1.03, drained, "times"),
        *_small_bars(small),
    ]


def _capture_bars(
    step_timer: str, rotation: Rotation | None, copies: CopyLimits | None
) -> list[Bar]:
    peers, _, size = _unpack(rotation)
    ours, lazy = peers.get(OURS), peers.get(LAZY)
    device_copy_s = size / copies.on_device if copies else None
    beyond_s = None
    if copies and rotation:
        beyond_s = max(0.0, size / copies.to_host - rotation.forward_backward_s)
    worst_s = ours.worst_s.median if ours and ours.worst_s else None
    return [
        _at_most(
            f"{step_timer}: time lost, device-first, worse of first and next",
            10.0,
            _scaled(_worse_lost(ours), 1e3),
            "ms",
        ),
        _at_most(
            f"{step_timer}: worst iteration longer by, device-first",
            None if device_copy_s is None else 1.5e3 * device_copy_s + 2,
            _scaled(worst_s, 1e3),
            "ms",
        ),
        _at_most(
            f"{step_timer}: time lost, lazy, after the first",
            None if beyond_s is None else 1e3 * beyond_s + 10,
            _scaled(lazy.lost_next_s.median if lazy and lazy.lost_next_s else None, 1e3),
            "ms",
        ),
    ]


def _small_bars(small: Rotation | None) -> list[Bar]:
    peers, _, _ = _unpack(small)
    ours = peers.get(OURS)
    bars = []
    for name, times in (("dcp", 40), ("torch.save", 2)):
        peer = peers.get(name)
        title = f"small tensors, {{}}, against {name}"
        bars.append(_faster(title.format("durable"), times, _durable(ours), _durable(peer)))
        bars.append(_faster(title.format("time lost"), times, _lost(ours), _lost(peer)))
    return bars


def _unpack(rotation: Rotation | None) -> tuple[dict[str, Summary], RawSummary, int]:
    if rotation is None:
        return {}, summarise_raw([]), 0
    summaries = {peer.name: summarise(peer) for peer in rotation.peers if peer.saves}
    return summaries, summarise_raw(rotation.raw), rotation.state_bytes


def _durable(summary: Summary | None) -> float | None:
    return summary.durable_s.median if summary and summary.durable_s else None


def _lost(summary: Summary | None) -> float | None:
    return summary.lost_s.median if summary and summary.lost_s else None


def _load(summary: Summary | None) -> float | None:
    """Of peers whose loads were right only."""
    return summary.load_s.median if summary and summary.load_s and summary.bit_equal else None


def _worse_lost(summary: Summary | None) -> float | None:
    if summary is None:
        return None
    known = [s.median for s in (summary.lost_first_s, summary.lost_next_s) if s is not None]
    return max(known, default=None)


def _best(seconds: Iterable[float | None]) -> float | None:
    return min((s for s in seconds if s is not None), default=None)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _rate(name: str, share: float, size: int, ours_s: float | None, raw: Spread | None) -> Bar:
    wanted = f"≥ {share:.0%}"
    if ours_s is None or raw is None:
        return _not_measured(name, wanted)
    rate = size / ours_s
    found = f"{rate / raw.median:.0%} ({rate / 1e9:.2f} of {raw.median / 1e9:.2f} GB/s)"
    return Bar(name=name, wanted=wanted, found=found, met=rate >= share * raw.median)


def _faster(name: str, times: float, ours_s: float | None, theirs_s: float | None) -> Bar:
    wanted = f"≥ {times:g} times"
    if ours_s is None or theirs_s is None:
        return _not_measured(name, wanted)
    # Time lost may be nothing, or by noise less than nothing: then no factor says anything.
    factor = f"{theirs_s / ours_s:.1f} times" if ours_s > 0 else "nothing lost"
    found = f"{factor} ({ours_s:.3f} s, {theirs_s:.3f} s)"
    return Bar(name=name, wanted=wanted, found=found, met=ours_s * times <= theirs_s)


def _share(name: str, share: float, ours_s: float | None, theirs_s: float | None) -> Bar:
    wanted = f"≤ {share:.0%}"
    if ours_s is None or theirs_s is None:
        return _not_measured(name, wanted)
    found = f"{ours_s / theirs_s:.0%} ({ours_s:.3f} s of {theirs_s:.3f} s)"
    return Bar(name=name, wanted=wanted, found=found, met=ours_s <= share * theirs_s)


def _at_most(name: str, limit: float | None, found: float | None, unit: str) -> Bar:
    if limit is None or found is None:
        return _not_measured(name, "≤ ?" if limit is None else f"≤ {limit:.3g} {unit}")
    return Bar(
        name=name, wanted=f"≤ {limit:.3g} {unit}", found=f"{found:.3g} {unit}", met=found <= limit
    )


def _not_measured(name: str, wanted: str) -> Bar:
    return Bar(name=name, wanted=wanted, found="not measured", met=None)
