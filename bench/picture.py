"""Draw the picture of the README: `python bench/picture.py`.

Training time lost by a save, from two files of bench/results: a Hugging Face Trainer with its own
saves and with laststep, and a plain loop with other libraries.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # from a plain checkout, nothing installed

from bench.plot import Panel, Row, draw_panels  # noqa: E402

TRAINER = "2026-11-17-frameworks-h200.json"
LOOP = "2026-11-15-h200-all-peers.json"
OURS = "2026-11-16-h200-again.json"
NAMES = {"dcp": "DCP", "dcp async thread": "DCP async", "dcp async process": "DCP async, process"}
OUT = ROOT / "docs" / "time-lost.svg"
UNIT = "s (less is better)"


def draw() -> str:
    """Return the picture as an SVG."""
    results = ROOT / "bench" / "results"
    trainer = json.loads((results / TRAINER).read_text())["frameworks"]["hf"]["lost_s"]
    names = {"own": "Trainer's own save", "ours": "laststep"}
    rows = [_row(shown, trainer[name]) for name, shown in names.items()]
    loop = [
        _row(NAMES.get(peer["name"], peer["name"]), peer["lost_s"])
        for file, ours in ((LOOP, False), (OURS, True))
        for peer in json.loads((results / file).read_text())["summaries"]["long iterations"][
            "peers"
        ]
        if peer["lost_s"]
        and (peer["name"] == "laststep" if ours else "laststep" not in peer["name"])
    ]
    loop.sort(key=lambda row: -row.value)
    return draw_panels(
        "Training time lost by a save on one NVIDIA H200",
        [
            Panel(title="Hugging Face Trainer, 12.2 GB", unit=UNIT, rows=rows),
            Panel(title="Plain PyTorch loop, 7.28 GB", unit=UNIT, rows=loop),
        ],
    )


def _row(name: str, spread: dict[str, float]) -> Row:
    return Row(name=name, value=spread["median"], least=spread["least"], most=spread["most"])


if __name__ == "__main__":
    OUT.write_text(draw())
    print(f"written to {OUT.relative_to(ROOT)}")
