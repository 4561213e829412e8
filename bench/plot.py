"""Draw a benchmark's JSON as a plain SVG: `python bench/plot.py bench/out/cpu.json`.

Needs nothing but the standard library. One panel for each figure, one bar for each peer, a line
from the least to the most measured, and the raw limit as a dashed line where there is one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, LABELS, ROW, HEAD = 760, 190, 22, 56
OURS_COLOUR, THEIRS_COLOUR, LIMIT_COLOUR = "#1f6f8b", "#b8bfc6", "#c0392b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bar: a value with what it varied between."""

    name: str
    value: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure for all peers."""

    title: str
    unit: str
    rows: list[Row]
    limit: float | None = None


def panels(report: dict) -> list[Panel]:  # type: ignore[type-arg]  # JSON of our own
    """The figures of every rotation in a report."""
    found = []
    for name, summary in report["summaries"].items():
        size_bytes = report["rotations"][name]["state_bytes"]
        raw = summary["raw_bytes_per_s"]
        read = raw["read_to_device"] or raw["read"]
        peers = summary["peers"]
        found += [
            Panel(
                title=f"{name}: training time lost by a save",
                unit="s (less is better)",
                rows=_rows(peers, "lost_s"),
            ),
            Panel(
                title=f"{name}: until durable",
                unit="GB/s (more is better)",
                rows=_rates(peers, "durable_s", size_bytes),
                limit=_limit(raw["write"]),
            ),
            Panel(
                title=f"{name}: cold load",
                unit="GB/s (more is better)",
                rows=_rates(peers, "load_s", size_bytes),
                limit=_limit(read),
            ),
        ]
    return [panel for panel in found if panel.rows]


def _rows(peers: list[dict], key: str) -> list[Row]:  # type: ignore[type-arg]
    return [
        Row(name=p["name"], value=p[key]["median"], least=p[key]["least"], most=p[key]["most"])
        for p in peers
        if p[key]
    ]


def _rates(peers: list[dict], key: str, size_bytes: int) -> list[Row]:  # type: ignore[type-arg]
    return [
        Row(
            name=row.name,
            value=size_bytes / row.value / 1e9,
            least=size_bytes / row.most / 1e9,
            most=size_bytes / row.least / 1e9,
        )
        for row in _rows(peers, key)
    ]


def _limit(spread: dict | None) -> float | None:  # type: ignore[type-arg]
    return spread["median"] / 1e9 if spread else None


def draw(report: dict) -> str:  # type: ignore[type-arg]
    """The whole picture."""
    machine = report["hardware"]
    where = machine["gpu"] if machine["gpu"] != "none" else machine["cpu"]
    title = f"laststep benchmark, {report['date'][:10]}, {where}, torch {machine['torch']}"
    return draw_panels(title, panels(report))


def draw_panels(title: str, shown: list[Panel]) -> str:
    """Return an SVG with these panels below each other."""
    height = HEAD + sum(_height(panel) for panel in shown)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(16, 26, title, size=15),
    ]
    top = HEAD
    for panel in shown:
        parts.append(_panel(panel, top))
        top += _height(panel)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _height(panel: Panel) -> int:
    return ROW * len(panel.rows) + 52


def _panel(panel: Panel, top: int) -> str:
    most = max([row.most for row in panel.rows] + [panel.limit or 0.0, 1e-9])
    scale = (WIDTH - LABELS - 90) / most
    parts = [_text(16, top, f"{panel.title}, {panel.unit}", weight="bold")]
    for i, row in enumerate(panel.rows):
        y = top + 12 + i * ROW
        colour = OURS_COLOUR if row.name.startswith("laststep") else THEIRS_COLOUR
        width = max(row.value, 0.0) * scale
        left, right = (LABELS + max(v, 0.0) * scale for v in (row.least, row.most))
        parts += [
            _text(LABELS - 8, y + 13, row.name, anchor="end"),
            f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{ROW - 6}" fill="{colour}"/>',
            _line(left, y + 8, right, y + 8, "#333"),
            _text(max(LABELS + width, right) + 6, y + 13, f"{row.value:.3g}"),
        ]
    if panel.limit is not None:
        x = LABELS + panel.limit * scale
        bottom = top + 12 + ROW * len(panel.rows)
        parts.append(_line(x, top + 8, x, bottom, LIMIT_COLOUR, dashes="4 3"))
        label = f"raw limit {panel.limit:.3g}"
        parts.append(_text(x, bottom + 12, label, anchor="middle", colour=LIMIT_COLOUR))
    return "\n".join(parts)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
    colour: str = "#222",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'
    )


def main() -> None:
    """Read a JSON, write an SVG beside it."""
    parser = argparse.ArgumentParser(prog="bench/plot.py", description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("--out", type=Path, help="the SVG (default beside the JSON)")
    given = parser.parse_args()
    out = given.out or given.json.with_suffix(".svg")
    out.write_text(draw(json.loads(given.json.read_text())))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
