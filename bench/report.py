"""Prints what was measured and writes it, with every repetition, as JSON."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bench.spread import Spread, spread, summarise, summarise_raw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.bars import Bar
    from bench.device import CopyLimits
    from bench.hardware import Hardware
    from bench.raw import DiskLimits
    from bench.rotation import Rotation
    from bench.scenarios import EveryIteration


FULL_BYTES = {"cpu": 1_000_000_000, "gpu": 7_000_000_000}
"""The least state for which the bars are meant."""


@dataclass(slots=True, kw_only=True)
class Report:
    """One run of the benchmark, filled part by part."""

    kind: str
    hardware: Hardware
    disk: DiskLimits
    commit: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    copies: CopyLimits | None = None
    rotations: dict[str, Rotation] = field(default_factory=dict)
    every_iteration: list[EveryIteration] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    seconds: float = 0.0


def write_json(report: Report, path: Path) -> None:
    """Everything, with the medians that the tables show beside the raw samples."""
    whole = asdict(report)
    whole["date"] = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    whole["summaries"] = {
        name: {
            "peers": [asdict(summarise(peer)) for peer in rotation.peers],
            "raw_bytes_per_s": asdict(summarise_raw(rotation.raw)),
        }
        for name, rotation in report.rotations.items()
    }
    for row, every in zip(whole["every_iteration"], report.every_iteration, strict=True):
        row["ratio"] = every.ratio()
        row["ratio_without_waiting"] = every.ratio_without_waiting()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1, default=str) + "\n")


def show(report: Report) -> None:
    """The tables."""
    _show_machine(report)
    for name, rotation in report.rotations.items():
        _show_rotation(name, rotation)
    if report.every_iteration:
        _show_every(report.every_iteration)
    words = {True: "met", False: "NOT MET", None: "not measured"}
    rows = [[bar.name, bar.wanted, bar.found, words[bar.met]] for bar in report.bars]
    title = "Bars"
    if report.options.get("quick") or report.options.get("size_bytes", 0) < FULL_BYTES[report.kind]:
        title += " (set for the default size; of a smaller state they say little)"
    _table(title, ["bar", "wanted", "found", ""], rows)


def _show_machine(report: Report) -> None:
    hardware = report.hardware
    rows = [
        ["machine", f"{hardware.cpu}, {hardware.cores} cores, {hardware.ram_bytes / 1e9:.0f} GB"],
        ["gpu", hardware.gpu],
        ["disk", hardware.filesystem],
        ["software", f"torch {hardware.torch}, Python {hardware.python}, Linux {hardware.kernel}"],
        ["commit", report.commit],
        ["took", f"{report.seconds:.0f} s"],
    ]
    rows.append(["fastest write", str(report.disk.best_write)])
    rows.append(["fastest read", str(report.disk.best_read)])
    if not report.disk.direct:
        rows.append(["note", "the filesystem refuses O_DIRECT; limits are buffered + fsync"])
    if report.copies:
        copies = report.copies
        rates = (copies.to_host, copies.to_device, copies.on_device)
        text = "{:.1f} GB/s to host, {:.1f} to device, {:.0f} on device"
        rows.append(["copies", text.format(*(rate / 1e9 for rate in rates))])
    _table(f"laststep benchmark ({report.kind})", ["", ""], rows)


def _show_rotation(name: str, rotation: Rotation) -> None:
    size = rotation.state_bytes
    raw = summarise_raw(rotation.raw)
    rows = []
    if raw.write and raw.read:
        device = f" | to GPU {_rate(raw.read_to_device)}" if raw.read_to_device else ""
        rows.append(["raw disk", "", "", "", "", _rate(raw.write), "", _rate(raw.read) + device])
    for peer in rotation.peers:
        figures = summarise(peer)
        if figures.durable_s is None:
            rows.append([peer.name, figures.status])
            continue
        memory = "" if figures.peak_bytes is None else f"{figures.peak_bytes / 1e9:.2f}"
        durable, load = figures.durable_s, figures.load_s
        loaded = "" if load is None else f"{load.median:.2f} s, {size / load.median / 1e9:.2f} GB/s"
        if figures.bit_equal is False:
            loaded += " WRONG STATE"
        rows.append(
            [
                peer.name,
                _ms(figures.lost_first_s),
                _ms(figures.lost_next_s),
                _ms(figures.worst_s),
                _seconds(durable),
                f"{size / durable.median / 1e9:.2f}",
                memory,
                loaded,
            ]
        )
    title = (
        f"{name}: {size / 1e9:.2f} GB in {rotation.tensors} tensors, iteration "
        f"{rotation.iteration_s * 1e3:.0f} ms (forward and backward "
        f"{rotation.forward_backward_s * 1e3:.0f}); median [least, most]"
    )
    columns = [
        "",
        "lost, first save (ms)",
        "lost, next (ms)",
        "worst iteration + (ms)",
        "durable (s)",
        "GB/s",
        "peak host (GB)",
        "cold load",
    ]
    _table(title, columns, rows)
    noise = spread(rotation.noise_s)
    if noise is not None:
        print(f"  noise: {_ms(noise)} ms seem lost in as long without any save")
    for peer in rotation.peers:
        for note in peer.notes:
            print(f"  {peer.name}: {note}")


def _show_every(results: Sequence[EveryIteration]) -> None:
    rows = []
    for every in results:
        ratio, own = every.ratio(), every.ratio_without_waiting()
        if ratio is None or own is None:
            rows.append([every.name, f"{every.state_bytes / 1e9:.3f}", every.status])
            continue
        waited = f"{sum(every.waited_s):.2f} of {sum(every.saved_s):.2f}"
        if every.status != "measured":
            waited += f" ({every.status})"
        rows.append(
            [every.name, f"{every.state_bytes / 1e9:.3f}", f"{ratio:.3f}", f"{own:.3f}", waited]
        )
    columns = ["state", "GB", "iteration, times baseline", "less waiting", "waited (s)"]
    _table("A save after every iteration", columns, rows)


def _ms(value: Spread | None) -> str:
    if value is None:
        return ""
    text = f"{value.median * 1e3:.1f}"
    if value.count > 1:
        text += f" [{value.least * 1e3:.1f}, {value.most * 1e3:.1f}]"
    return text


def _seconds(value: Spread) -> str:
    text = f"{value.median:.2f}"
    return text if value.count == 1 else f"{text} [{value.least:.2f}, {value.most:.2f}]"


def _rate(value: Spread | None) -> str:
    return "" if value is None else f"{value.median / 1e9:.2f} GB/s"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}")
        widths = [
            max(len(row[i]) if i < len(row) else 0 for row in [columns, *rows])
            for i in range(len(columns))
        ]
        for row in [columns, *rows]:
            cells = zip(row, widths, strict=False)
            print("  " + "  ".join(cell.ljust(width) for cell, width in cells).rstrip())
        return
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    # Piped into a file rich assumes 80 columns and folds every cell.
    Console(width=None if console.is_terminal else 180).print(table)
