"""Where torch may be imported, and what must start without it.

That imports only point down is checked by import-linter (`make layers`); this is the rest.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).resolve().parent.parent / "src"
PACKAGE = SOURCE / "laststep"

# Relative to src/laststep.
MAY_IMPORT_TORCH = (
    "state/collecting.py",
    "state/items.py",
    "state/loaders.py",
    "state/modules.py",
    "state/optimizers.py",
    "state/provider.py",
    "state/tensors.py",
    "capture/*.py",
    "memory/pool.py",
    "restoring/exchange.py",
    "ranks/*.py",
    "adapters/*.py",
    "accelerate/*.py",
    "dcp/*.py",
    "deepspeed/*.py",
    "fsdp1.py",
    "hf/*.py",
    "lightning/*.py",
    "megatron/*.py",
    "ray.py",
    "torchtitan/*.py",
)
TORCH = frozenset({"torch", "torchdata"})
START_WITHOUT_TORCH = ("laststep", "laststep.cli", "laststep.flush", "laststep.tiers.runs")


def is_type_checking(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
    return False


def imported_names(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every module that is imported at run time, also inside functions."""
    match node:
        case ast.If(test=test, orelse=orelse) if is_type_checking(test):
            for child in orelse:
                yield from imported_names(child)
            return
        case ast.Import(names=names):
            yield from ((node.lineno, alias.name) for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            yield node.lineno, module
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            yield node.lineno, module
    for child in ast.iter_child_nodes(node):
        yield from imported_names(child)


def torch_imports(source: str) -> list[int]:
    """The lines that import torch at run time."""
    return [
        line for line, name in imported_names(ast.parse(source)) if name.partition(".")[0] in TORCH
    ]


def may_import_torch(path: Path) -> bool:
    # Folders match with all that is below them; Path.match compares from the right.
    relative = path.relative_to(PACKAGE)
    candidates = [relative, *(parent / "x.py" for parent in relative.parents)]
    return any(
        candidate.match(pattern) and len(candidate.parts) == len(Path(pattern).parts)
        for candidate in candidates
        for pattern in MAY_IMPORT_TORCH
    )


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import torch", [1]),
        ("import torch.nn as nn", [1]),
        ("import os, torch", [1]),
        ("from torch.distributed import TCPStore", [1]),
        ("def f():\n    import torch", [2]),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", [2]),
        ("import importlib\nimportlib.import_module('torch.cuda')", [2]),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch", [4]),
        ("if TYPE_CHECKING:\n    import torch", []),
        ("if typing.TYPE_CHECKING:\n    from torch import Tensor", []),
        ("import torchlike", []),
        ("from laststep import torch", []),
        ("from .torch import x", []),
    ],
)
def test_the_scan_sees_every_way_to_import_torch(source: str, lines: list[int]) -> None:
    assert torch_imports(source) == lines


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("state/tensors.py", True),
        ("state/collecting.py", True),
        ("memory/pool.py", True),
        ("capture/device.py", True),
        ("ranks/__init__.py", True),
        ("ranks/store/client.py", True),
        ("restoring/exchange.py", True),
        ("restoring/restore.py", False),
        ("state/__init__.py", False),
        ("state/tree.py", False),
        ("flush/writer.py", False),
        ("cli.py", False),
        ("hf/trainer.py", True),
        ("web/ranks/x.py", False),
        ("checkpointer.py", False),
    ],
)
def test_the_scan_knows_where_torch_is_allowed(path: str, allowed: bool) -> None:
    assert may_import_torch(PACKAGE / path) is allowed


def test_torch_is_imported_only_where_the_design_says() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not may_import_torch(path)
        for line in torch_imports(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"torch is imported outside {', '.join(MAY_IMPORT_TORCH)}: {found}"


def exists(module: str) -> bool:
    path = SOURCE.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("module", [name for name in START_WITHOUT_TORCH if exists(name)])
def test_it_starts_without_torch(module: str) -> None:
    script = f"import sys, {module}; print(*sorted(sys.modules.keys() & {set(TORCH)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), f"importing {module} imports {done.stdout}"
