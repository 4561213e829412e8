"""The public surface: what `laststep` exports and the commands, each of them documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import pytest
import typer

import laststep
from laststep.checks import allowed
from laststep.settings import DEFAULTS, OWN_KEYWORDS, Settings
from laststep.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "laststep"
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", flags=re.MULTILINE | re.DOTALL)


def documented_code() -> str:
    """All code in README.md and docs, in blocks and in lines.

    Prose does not count: it uses words such as save and open without meaning the function. Nor do
    decision records, which nobody reads to learn how to use something.
    """
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/**/*.md")]
    return "\n".join(
        code
        for page in pages
        if page.exists()
        for code in CODE.findall(page.read_text(encoding="utf-8"))
    )


def is_documented(words: str) -> bool:
    pattern = r"\s+".join(re.escape(word) for word in words.split())
    return re.search(rf"(?<![\w-]){pattern}(?![\w-])", documented_code()) is not None


def commands() -> Iterator[str]:
    """Every command as it is typed, `laststep verify`; `laststep.cli` keeps them in `app`."""
    from laststep import cli

    root = typer.main.get_command(cli.app)

    def walk(command: object, typed: str) -> Iterator[str]:
        children = getattr(command, "commands", {})
        if not children:
            yield typed
        for name, child in children.items():
            if not child.hidden:
                yield from walk(child, f"{typed} {name}")

    return walk(root, "laststep")


def test_the_public_names_are_listed_once() -> None:  # ruff keeps their order
    assert len(laststep.__all__) == len(set(laststep.__all__))


@pytest.mark.parametrize("name", getattr(laststep, "__all__", ()))
def test_a_public_name_resolves(name: str) -> None:
    assert getattr(laststep, name) is not None


def test_dir_shows_every_public_name() -> None:
    assert set(laststep.__all__) <= set(dir(laststep))


def test_every_public_name_is_documented() -> None:
    missing = [name for name in laststep.__all__ if not is_documented(name)]
    assert not missing, f"in neither README.md nor docs: {missing}"


def test_every_command_is_documented() -> None:
    missing = [typed for typed in commands() if not is_documented(typed)]
    assert not missing, f"in neither README.md nor docs: {missing}"


def guides() -> Iterator[tuple[str, str]]:
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/guides/*.md"))):
        yield page.name, page.read_text(encoding="utf-8")


def submodules() -> dict[str, list[str]]:
    """The public submodules, as api.md lists them, and their names."""
    _, _, listed = dict(guides())["api.md"].partition("## Submodules")
    found = re.findall(r"^\| `(laststep\.[\w.]+)` \|", listed, flags=re.MULTILINE)
    return {name: importlib.import_module(name).__all__ for name in found}


def named_in(code: str) -> Iterator[str]:
    """Every name of laststep in some code, dotted: what is imported, and what is written out."""
    for module, names in re.findall(r"^from (laststep[\w.]*) import ([\w ,]+)", code, re.MULTILINE):
        for name in names.split(","):
            yield f"{module}.{name.split()[0]}"
    for name in re.findall(r"(?<![\w./-])laststep(?:\.[A-Za-z_]\w*)+", code):
        yield name


def of_frameworks() -> dict[str, list[str]]:
    """The adapters of frameworks, as `laststep.NAME`, and the names that they list. They are only
    read: what they import is not installed here."""
    found = {}
    for file in (*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__init__.py")):
        listed = re.search(r"^__all__ = (\[.*?\])", file.read_text(), re.MULTILINE | re.DOTALL)
        name = file.parent.name if file.stem == "__init__" else file.stem
        found[f"laststep.{name}"] = ast.literal_eval(listed[1]) if listed else []
    return {
        name: names for name, names in found.items() if name.rpartition(".")[2] in dir(laststep)
    }


def is_public(name: str) -> bool:
    modules = {"laststep": [*laststep.__all__, "__all__"], **submodules(), **of_frameworks()}
    if name in modules or any(module.startswith(f"{name}.") for module in modules):
        return True
    return any(
        name.startswith(f"{module}.") and name.removeprefix(f"{module}.").split(".")[0] in names
        for module, names in modules.items()
    )


def test_submodules_are_public_by_the_names_that_they_list() -> None:
    modules = submodules()
    assert "laststep.events" in modules
    for module, names in modules.items():
        there = dir(importlib.import_module(module))  # which does not import a framework
        assert [n for n in names if n not in there] == []
        assert [n for n in names if not is_documented(n)] == [], module


def test_everything_that_a_guide_names_is_public() -> None:
    named = {
        (page, name) for page, text in guides() for name in named_in("\n".join(CODE.findall(text)))
    }
    assert ("api.md", "laststep.Checkpointer") in named
    assert [one for one in sorted(named) if not is_public(one[1])] == []


def test_every_class_in_the_tables_of_the_api_is_public() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", dict(guides())["api.md"], flags=re.MULTILINE)
    classes = {name for row in rows for name in re.findall(r"`([A-Z]\w+)[`(.]", row)}
    public = {*laststep.__all__, *(name for names in submodules().values() for name in names)}
    assert {"PerRank", "Committed", "Capture"} <= classes
    assert sorted(classes - public) == []


def local_layout_of(column: str) -> dict[str, tuple[str, str]]:
    """(default, meaning) of each setting, in the table of api.md with this first column."""
    page = dict(guides())["api.md"]
    _, _, table = page.partition(f"| {column} | default | meaning |\n")
    rows = table.partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`"): (default, meaning) for name, default, meaning in cells}


def as_a_cell(default: object) -> str:
    """A default as the table writes it, unless it is None, which is told in words."""
    if isinstance(default, bool):
        return f"`{default}`"
    if isinstance(default, str):
        return f'`"{default}"`'
    if default == 1 << 30:
        return "1 GiB"
    return f"{default:g}"


def test_a_checkpointer_has_ten_keywords_and_the_guide_lists_them() -> None:
    parameters = inspect.signature(laststep.Checkpointer).parameters.values()
    names = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    assert names == list(OWN_KEYWORDS)
    assert len(names) == 10
    assert list(local_layout_of("setting")) == ["run", *names]
    assert list(local_layout_of("option")) == list(laststep.Options.__struct_fields__)


@pytest.mark.parametrize("name", Settings.__struct_fields__)
def test_a_setting_is_in_the_guide_and_in_the_signature_as_it_is_declared(name: str) -> None:
    default = getattr(DEFAULTS, name)
    if name in OWN_KEYWORDS:
        assert inspect.signature(laststep.Checkpointer).parameters[name].default == default
    cell, meaning = (local_layout_of("setting") | local_layout_of("option"))[name]
    if default is not None and default != ():
        assert cell == as_a_cell(default)
    bounds = re.findall(r"\d+", allowed(get_type_hints(Settings, include_extras=True)[name]))
    text = meaning.replace("64 MiB", str(64 << 20))
    assert [bound for bound in bounds if not re.search(rf"\b{bound}\b", text)] == []


@pytest.mark.parametrize("name", ["Capture", "FlushIn", "OnBusy", "OnError", "CompareReplicas"])
def test_every_choice_of_a_setting_is_in_the_guide(name: str) -> None:
    (values,) = re.findall(rf"^\| `{name}` \| (.*) \|$", dict(guides())["api.md"], re.MULTILINE)
    listed = re.findall(r'`([A-Z]+)` \("(\w+)"\)', values)
    assert listed == [(choice.name, choice.value) for choice in getattr(laststep, name)]


def test_the_version_is_the_one_that_is_installed() -> None:
    assert metadata.version("laststep") == VERSION


IMPORTS = (
    "import laststep.dcp; assert laststep.dcp.Writer",
    "from laststep.dcp import Writer",
    "from laststep import dcp; assert dcp.Writer",
    "import laststep; assert laststep.dcp.Writer",
)


def test_an_adapter_can_be_imported_in_every_way() -> None:
    """Each line runs where nothing of laststep has been imported; torch is imported only once."""
    program = f"""
import sys
before = list(sys.meta_path)
for line in {IMPORTS!r}:
    for name in [name for name in sys.modules if name.split(".")[0] == "laststep"]:
        del sys.modules[name]
    exec(line, {{}})
assert [type(finder) for finder in sys.meta_path] == [type(finder) for finder in before]
"""
    subprocess.run([os.environ["WARM_PYTHON"], "-c", program], check=True)


def test_a_submodule_that_is_not_there_is_no_adapter() -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        importlib.import_module("laststep.nowhere")
