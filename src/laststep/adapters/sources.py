"""Digests of source code: they tell if a framework has changed what an adapter relies on.

Modules are read, not imported, so this also works for a release whose modules the adapter could not
import. A digest ignores comments, docstrings and layout, and is the same with every version of
Python: it is computed from tokens, since the syntax tree has other fields in each version.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import itertools
import tokenize
from collections.abc import Mapping
from pathlib import Path

Uses = Mapping[str, Mapping[str, str]]
"""The digest of each function, class or constant, by file and by name in that file."""

_IGNORED = {tokenize.COMMENT, tokenize.NL}
_BREAKS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_OPENS = {getattr(tokenize, f"{kind}STRING_START", None) for kind in "FT"}
_CLOSES = {getattr(tokenize, f"{kind}STRING_END", None) for kind in "FT"}
"""Python 3.12 and later divide f-strings into tokens; here each is taken as a whole."""


def digests(uses: Uses) -> dict[str, dict[str, str]]:
    """Return the digests of the installed sources; an empty one for what is not there."""
    return {file: _digests_in(file, names) for file, names in uses.items()}


def changed(uses: Uses) -> list[str]:
    """Return what differs from its digest, or is missing, as `file: name`."""
    present = digests(uses)
    return [
        f"{file}: {name}" + ("" if present[file][name] else " (missing)")
        for file, names in uses.items()
        for name, digest in names.items()
        if present[file][name] != digest
    ]


def _digests_in(file: str, names: Mapping[str, str]) -> dict[str, str]:
    path = _path_of(file)
    if path is None:
        return dict.fromkeys(names, "")
    source = path.read_text("utf-8")
    tree, lines = ast.parse(source), source.split("\n")
    found = {name: _found(tree, name) for name in names}
    return {
        name: digest("".join(_text(node, lines) for node in nodes)) if nodes else ""
        for name, nodes in found.items()
    }


def _path_of(file: str) -> Path | None:
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)  # does not import a package without dots
    folders = (spec and spec.submodule_search_locations) or ()  # a namespace may have several
    return next((path for folder in folders if (path := Path(folder, rest)).is_file()), None)


def _found(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return the definitions of a dotted name; a property has one each to get and to set it."""
    nodes: list[ast.stmt] = [*tree.body]
    for i, part in enumerate(name.split(".")):
        if i:
            nodes = [inner for node in nodes for inner in getattr(node, "body", ())]
        nodes = [node for node in nodes if part in _names_of(node)]
    return nodes


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _text(node: ast.stmt, lines: list[str]) -> str:
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    return "\n".join([*lines[first - 1 : node.end_lineno], ""])


def digest(source: str) -> str:
    """Return a short digest of the tokens of a definition."""
    every = tokenize.generate_tokens(io.StringIO(source).readline)
    tokens = [token for token in every if token.type not in _IGNORED]
    lines, kept, depth, begin, before = source.split("\n"), [""], 0, (0, 0), tokenize.NEWLINE
    for token, after in itertools.pairwise([*tokens, tokens[-1]]):
        is_string = token.type == tokenize.STRING and after.type == tokenize.NEWLINE
        if before in _BREAKS and (is_string or token.type == tokenize.NEWLINE):
            continue  # a docstring, or the end of its line
        before = token.type
        if before in _OPENS:
            depth, begin = depth + 1, begin if depth else token.start
        elif before in _CLOSES:
            depth -= 1
            if not depth:
                kept.append(_between(lines, begin, token.end))
        elif not depth:
            kept.append(tokenize.tok_name[before] if before in _BREAKS else token.string)
    return hashlib.sha256(" ".join(kept).encode()).hexdigest()[:10]


def _between(lines: list[str], begin: tuple[int, int], end: tuple[int, int]) -> str:
    inside = lines[begin[0] - 1 : end[0]]
    inside[-1] = inside[-1][: end[1]]
    inside[0] = inside[0][begin[1] :]
    return "\n".join(inside)
