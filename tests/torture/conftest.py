"""Lets the tests here import the parts of the torture by their names, as torture.py does."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
for _folder in (str(_HERE.parent / "crash"), str(_HERE)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)
