"""Regenerates the hostile files of this folder: `PYTHONPATH=src python tests/hostile/make.py`.

One file per lie, each derived from a sound one by one change. The beginning of a file's name says
who must refuse it: `manifest-` the manifest's decode, `index-` the index's, `object-` the typed
JSON's, `plain-` decode_plain, which reads safetensors files of others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hostile_indexes import index_cases
from hostile_manifests import manifest_cases
from hostile_objects import object_cases
from hostile_plain import plain_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hostile_case import Case


def cases() -> list[Case]:
    makers: tuple[Callable[[], Iterator[Case]], ...] = (
        manifest_cases,
        index_cases,
        object_cases,
        plain_cases,
    )
    return [case for make in makers for case in make()]


def readme() -> str:
    rows = "\n".join(f"| `{case.name}` | {case.raises} | {case.why} |" for case in cases())
    return (
        "# Hostile files\n\n"
        "Each differs from a sound file in one way and MUST be refused with the error named.\n"
        "`make.py` regenerates them and this page.\n\n"
        f"| file | error | what it is |\n| --- | --- | --- |\n{rows}\n"
    )


def main() -> None:
    folder = Path(__file__).parent
    for case in cases():
        (folder / case.name).write_bytes(case.data)
    (folder / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
