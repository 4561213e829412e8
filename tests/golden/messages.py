"""Write `messages.txt` again: `.venv/bin/python tests/golden/messages.py`.

It lists every text of more than one word in the source, sorted: what errors, warnings, reports and
the command line say. Values appear as `{}`, and no module is named, so that only a change of
wording changes the list. Docstrings are not in it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src" / "laststep"
MESSAGES = HERE / "messages.txt"
_WORDS = re.compile(r"[A-Za-z]{2,}\W* \W*[A-Za-z{]|[}] [a-z]{2,}")
_TYPE = re.compile(r"[A-Za-z.]+\[.*\]")


def messages() -> list[str]:
    """Return every message of the source, as it is listed."""
    found = set[str]()
    for path in SOURCE.rglob("*.py"):
        _collect(ast.parse(path.read_text()), found)
    return sorted(found, key=lambda text: (text.lower(), text))


def listing() -> str:
    """Return the text that `messages.txt` should have."""
    return "".join(f"{text}\n" for text in messages())


def _collect(node: ast.AST, found: set[str]) -> None:
    """Add the texts below a node, but no statement that is only a text: those are docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        text = _template(child)
        if text is None:
            _collect(child, found)
            continue
        if _WORDS.search(text) and not _TYPE.fullmatch(text):
            found.add(text.strip().replace("\n", "\\n"))
        for part in ast.walk(child):
            if isinstance(part, ast.FormattedValue):
                _collect(part, found)


def _template(node: ast.AST) -> str | None:
    """Return a text with `{}` for each value, or None for a node that is no text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or "{}" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]|%\.\d+f", "{}", node.value)
    return None


if __name__ == "__main__":
    MESSAGES.write_text(listing())
