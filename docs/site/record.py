"""`python docs/site/record.py`: run the demo, and draw what it prints as docs/demo.svg.

Each line appears when it was printed. Pauses are cut to a second, and the picture starts over at
the end. A browser that shows no animations, or a reader who has turned them off, sees all lines.
"""

from __future__ import annotations

import html
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "demo.svg"
LONGEST_PAUSE_S, REST_S = 1.0, 6.0
TITLE = "make demo: training is killed twice during a save, and every loss is the same"
WIDTH, LINE_HEIGHT, MARGIN, COLUMNS = 1000, 17, 16, 118
STYLE = """
text {{ font: 12.5px ui-monospace, Menlo, Consolas, monospace; white-space: pre; fill: #d7dde3; }}
.start {{ fill: #7fd1ae; }}
@media (prefers-reduced-motion: no-preference) {{
  .line {{ opacity: 0; animation: {length:.2f}s linear infinite; }}
{frames}
}}
"""


def run() -> list[tuple[float, str]]:
    """Return each line of the demo with the seconds at which it was printed."""
    command = [sys.executable, "-u", str(ROOT / "examples" / "demo.py")]
    lines, is_over = [(0.0, "$ make demo")], False
    at, last = 0.5, time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as demo,
    ):
        for line in demo.stdout or ():
            now = time.monotonic()
            at, last = at + min(now - last, LONGEST_PAUSE_S), now
            is_over = is_over or line.startswith("The run is there")
            if is_over:  # what follows names folders of this machine
                continue
            wrapped = textwrap.wrap(
                line.rstrip(), COLUMNS, drop_whitespace=False, subsequent_indent="   "
            ) or [""]
            lines += [(at, part) for part in wrapped]
    return lines


def drawn(lines: list[tuple[float, str]]) -> str:
    length = lines[-1][0] + REST_S
    texts, frames = [], []
    for number, (at, line) in enumerate(lines):
        percent = 100 * at / length
        frames.append(
            f"  #l{number} {{ animation-name: k{number}; }}\n"
            f"  @keyframes k{number} {{ 0%, {percent:.2f}% {{ opacity: 0; }} "
            f"{percent + 0.01:.2f}%, 100% {{ opacity: 1; }} }}"
        )
        kind = "line start" if line.startswith("$") else "line"
        y = MARGIN + LINE_HEIGHT * (number + 1)
        texts.append(
            f'<text xml:space="preserve" id="l{number}" class="{kind}" x="{MARGIN}" y="{y}">'
            f"{html.escape(line)}</text>"
        )
    height = 2 * MARGIN + LINE_HEIGHT * (len(lines) + 1)
    style = STYLE.format(length=length, frames="\n".join(frames))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{TITLE}</title>",
            f"<style>{style}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#1b2127"/>',
            *texts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    TARGET.write_text(drawn(run()))
    sys.stdout.write(f"wrote {TARGET}\n")
