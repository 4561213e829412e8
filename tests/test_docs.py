"""Every Python and shell block of README.md and the guides is executed.

The blocks of a page run in order, in one fresh folder; its Python blocks share one namespace, as if
typed into one session. A `console` block runs the lines that begin with `$ `; what it shows as
output is not compared. Not run are only

- a block after `<!-- not run: REASON -->`;
- a block after `<!-- needs: deepspeed -->`, where that package, or one of several with commas
  between, cannot be imported. Where all that a page needs can be, all its blocks are run once more,
  in their order; else that is skipped, and the reason names what is missing;
- lines `make …` and `git clone …` (with a `cd` right after it): the targets are checked to exist,
  `make test` is what runs this, and `make demo` is an example, which has tests of its own.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from laststep.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(page for page in [ROOT / "README.md"] if page.exists()),
    *sorted(ROOT.glob("docs/guides/*.md")),
]

FRESH = [str(ROOT / "README.md")]
"""Pages whose Python blocks run in a new interpreter, which takes seconds to import torch."""
GUIDE = ROOT / "CONTRIBUTING.md"
HOUSE = ROOT / "docs" / "architecture.md"
TERMS = ROOT / "docs" / "terms.md"
PACKAGE = ROOT / "src" / "laststep"

PYTHON = frozenset({"python", "py"})
SHELL = frozenset({"sh", "bash", "shell", "console"})

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}) *(?P<language>[^\s`]*).*$")
NOT_RUN = re.compile(r"^\s*<!--\s*not run\b:?\s*(?P<reason>.*?)\s*-->\s*$")
NEEDS = re.compile(r"^\s*<!--\s*needs\b:?\s*(?P<packages>.*?)\s*-->\s*$")
MAKE = re.compile(r"^make(\s+[\w.=-]+)*$")

# Runs in the page's folder. A Python block keeps its line numbers, so that a traceback points into
# the page itself and shows the line as it stands there.
DRIVER = """
import json, subprocess, sys, types

blocks = json.load(open(sys.argv[1], encoding="utf-8"))
sys.argv = ["page"]
main = sys.modules["__main__"] = types.ModuleType("__main__")
for block in blocks:
    sys.stderr.flush()
    if block["language"] == "python":
        code = "\\n" * (block["line"] - 1) + block["code"]
        exec(compile(code, block["page"], "exec"), main.__dict__)
    else:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block["code"]])
        if done.returncode:
            where = f'{block["page"]}:{block["line"]}'
            sys.exit(f'{where}: the shell block ended with status {done.returncode}')
"""


class PageError(Exception):
    """A page breaks the rules for blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: the line of its first line of code, and the code as it is to be run."""

    page: str
    line: int
    language: str
    code: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A comment that says of the block after it when it is run."""

    where: str
    text: str
    needs: tuple[str, ...] = ()
    """Packages; none: it is never run."""


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of a page that are to be run, in order."""
    found: list[Block] = []
    lines = text.splitlines()
    mark: Mark | None = None
    at = 0
    while at < len(lines):
        if marked := read_mark(lines[at], f"{page}:{at + 1}"):
            mark = marked
        elif opened := FENCE.match(lines[at]):
            end = closing(lines, at, opened["fence"], page)
            body = textwrap.dedent("\n".join(lines[at + 1 : end]))
            block = read_block(opened["language"], body, f"{page}:{at + 1}")
            if block is None and mark is not None:
                raise PageError(f"{mark.where}: `{mark.text}` before what is never run")
            if block is not None and (mark is None or mark.needs):
                language, code = block
                needs = mark.needs if mark else ()
                found.append(
                    Block(page=page, line=at + 2, language=language, code=code, needs=needs)
                )
            mark = None
            at = end
        elif lines[at].strip() and mark is not None:
            break
        at += 1
    if mark is not None:
        raise PageError(f"{mark.where}: `{mark.text}` is not followed by a block")
    return found


def read_mark(line: str, where: str) -> Mark | None:
    if not_run := NOT_RUN.match(line):
        if len(not_run["reason"].split()) < 2:
            raise PageError(f"{where}: `not run` without saying why")
        return Mark(where=where, text="not run")
    if needs := NEEDS.match(line):
        packages = tuple(re.split(r",\s*", needs["packages"]))
        if not all(re.fullmatch(r"\w+", package) for package in packages):
            raise PageError(f"{where}: `needs` without the names of packages")
        return Mark(where=where, text="needs", needs=packages)
    return None


def closing(lines: list[str], opened_at: int, fence: str, page: str) -> int:
    for at in range(opened_at + 1, len(lines)):
        line = lines[at].strip()
        if line.startswith(fence) and not line.strip(fence[0]):
            return at
    raise PageError(f"{page}:{opened_at + 1}: the block is never closed")


def read_block(language: str, body: str, where: str) -> tuple[str, str] | None:
    """How to run a block: ("python" or "sh", code); None for one in another language."""
    if not language:
        raise PageError(f"{where}: name the block's language; `text` if it is not to be run")
    if language in PYTHON:
        return "python", body
    if language in SHELL:
        commands = console_commands(body) if language == "console" else body.splitlines()
        return "sh", "\n".join(without_covered(commands))
    return None


def console_commands(body: str) -> list[str]:
    """The lines after `$ `, each with the lines that a backslash at its end joins to it."""
    commands: list[str] = []
    joined = False
    for line in body.splitlines():
        if line.startswith("$ ") or joined:
            commands.append(line if joined else line.removeprefix("$ "))
            joined = line.endswith("\\")
    return commands


def without_covered(commands: list[str]) -> list[str]:
    """The commands less those that other tests cover."""
    kept: list[str] = []
    cloned = False
    for command in commands:
        bare = command.partition(" #")[0].strip()
        enters_clone = cloned and bare.startswith("cd ")
        cloned = bare.startswith("git clone ")
        if not (cloned or enters_clone or MAKE.match(bare)):
            kept.append(command)
    return kept


def run_page(blocks: list[Block], folder: Path) -> subprocess.CompletedProcess[str]:
    work = folder / "page"
    work.mkdir()
    script = folder / "blocks.json"
    script.write_text(json.dumps([asdict(block) for block in blocks]), encoding="utf-8")
    programs = warm_programs(folder / "bin")
    python = sys.executable if blocks and blocks[0].page in FRESH else os.environ["WARM_PYTHON"]
    return subprocess.run(
        [python, "-c", DRIVER, str(script)],
        cwd=work,
        env={
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHON_EXEC": os.environ["WARM_PYTHON"],  # with which torchrun starts ranks
            "PYTHONPATH": str(ROOT / "src"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def warm_programs(folder: Path) -> Path:
    """The programs that pages use, in a folder: the installed ones, run by the warm interpreter."""
    folder.mkdir()
    warm = os.environ["WARM_PYTHON"]
    (folder / "python").symlink_to(warm)
    for name in ("laststep", "torchrun"):
        # Not resolved: the interpreter of a virtual environment is a link to another folder's.
        program = Path(sys.executable).with_name(name)
        (folder / name).write_text(f'#!/bin/sh\nexec {warm} {program} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def run_text(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return run_page(blocks_of(text, str(page)), folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"), str(page))
    done = run_page([block for block in blocks if not block.needs], tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "<!-- needs" in page.read_text("utf-8")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_block_of_the_page_runs_with_what_it_needs(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"), str(page))
    if missing := not_installed(blocks):
        pytest.skip(f"{page.name} needs {', '.join(missing)}, not installed here")
    done = run_page(blocks, tmp_path)
    assert done.returncode == 0, done.stdout


def not_installed(blocks: list[Block]) -> list[str]:
    needed = {package for block in blocks for package in block.needs}
    return sorted(package for package in needed if importlib.util.find_spec(package) is None)


DOCSTRINGS = sorted([*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__init__.py")])


@pytest.mark.parametrize("page", [*PAGES, *DOCSTRINGS], ids=lambda page: str(page.name))
def test_no_item_of_the_page_has_the_name_of_a_setting(page: Path) -> None:
    """Of the blocks that are not run too: what is called there is no plain value of a setting."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```py.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if page in DOCSTRINGS:
        paragraphs = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")
        blocks = [textwrap.dedent(one) for one in paragraphs if "Checkpointer(" in one]
    calls = [
        node
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Checkpointer")
    ]
    taken = [
        ast.unparse(keyword)
        for call in calls
        for keyword in call.keywords
        if keyword.arg in Settings.__struct_fields__
        and any(isinstance(node, ast.Call | ast.Dict) for node in ast.walk(keyword.value))
    ]
    assert taken == []


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))


@pytest.mark.parametrize("page", [*PAGES, GUIDE], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_make_command_of_the_page_is_a_target(page: Path) -> None:
    lines = re.findall(r"(?:^(?:\$ )?|`)make ([a-z -]+)", page.read_text("utf-8"), re.MULTILINE)
    assert {target for line in lines for target in line.split()} <= targets()


@pytest.mark.parametrize("page", [GUIDE, HOUSE], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_the_page_names_exists(page: Path) -> None:
    paths = named_paths(page.read_text(encoding="utf-8"))
    assert len(paths) > 20
    assert [path for path in paths if not is_there(path)] == []


def test_every_module_of_the_table_of_folders_exists() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|$", HOUSE.read_text("utf-8"), re.MULTILINE)
    folders = [(where, text) for where, text in rows if where.count("`") == 2 and "/`" in where]
    assert len(folders) > 10
    for where, text in folders:
        folder = PACKAGE / where.strip("`/")
        named = re.findall(r"`([a-z_]+)/?`", text)
        missing = [one for one in named if not is_there(f"{folder.relative_to(ROOT)}/{one}")]
        assert missing == [], where


def test_the_hooks_before_a_commit_are_the_checks_of_make_test() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    checks = re.findall(r"--no-print-directory (\S+)", recipe[1])
    assert checks[-1] == "tests"
    assert re.findall(r"entry: make --no-print-directory (\S+)", hooks) == checks[:-1]
    assert re.findall(r"repo: (\S+)", hooks) == ["local"]


def test_what_the_terms_name_is_in_the_code() -> None:
    """A class that is renamed takes its term along."""
    classes = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    rows = re.findall(
        r"^\| (?!term|---)([^|]+) \| ([^|]+) \| ([^|]+) \|$", TERMS.read_text("utf-8"), re.MULTILINE
    )
    assert 40 < len(rows) <= 70
    terms = [term for term, _, _ in rows]
    assert sorted(set(terms)) == sorted(terms)
    named = [one for _, _, where in rows for one in re.findall(r"`([^`]+)`", where)]
    assert [one for one in named if one not in classes and not is_there(one)] == []
    assert all(meaning.endswith(".") for _, meaning, _ in rows)


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found = re.findall(r"^class _?(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        for name in found:
            homes.setdefault(name, []).append(path.name)
    del homes["Checkpointer"]  # ours, and that for Ray Train, which is one
    del homes["Checkpoint"]  # that of the catalog, and Lightning's callback, by Lightning's name
    del homes["Restored"]  # what restore() returns, and the event that tells of it: both public
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def named_paths(text: str) -> list[str]:
    """The paths in a page's code: what has a slash or an ending, but for names within a run."""
    words = re.findall(r"`([\w.*/-]+)`", text)
    words += re.findall(r"(?<=\s)((?:tests|src|docs|bench|examples)/[\w./-]+)", text)
    return [
        word
        for word in dict.fromkeys(words)
        if ("/" in word or re.search(r"\.(py|md|toml|yaml|txt|cu)$", word))
        and not re.search(r"\.(json|safetensors)$|^torch|^\.", word)
    ]


def is_there(path: str) -> bool:
    """Whether that is a file, a folder or a module, from the root or from the package."""
    ways = (path.rstrip("/"), f"{path}.py")
    return any((base / way).exists() for base in (ROOT, PACKAGE) for way in ways)


def test_blocks_share_a_namespace_and_a_folder(tmp_path: Path) -> None:
    text = """
```python
from pathlib import Path
x = 1
```
- in a list
  ```sh
  echo 2 > two
  ```
```py
assert x + int(Path("two").read_text()) == 3
print("reached", __name__)
```
"""
    done = run_text(text, tmp_path)
    assert (done.returncode, done.stdout) == (0, "reached __main__\n")


def test_a_failing_python_block_is_shown_with_its_line_of_the_page(tmp_path: Path) -> None:
    done = run_text("# Title\n\n```python\nx = 1\nx / 0\n```\n", tmp_path)
    assert done.returncode != 0
    assert f'File "{tmp_path / "page.md"}", line 5' in done.stdout
    assert "x / 0" in done.stdout


@pytest.mark.parametrize("code", ["false\necho unreached", "false | true", "echo $UNSET_NAME"])
def test_a_failing_command_fails_the_page(code: str, tmp_path: Path) -> None:
    done = run_text(f"```sh\n{code}\n```\n", tmp_path)
    assert done.returncode != 0
    assert "page.md:2: the shell block ended with status 1" in done.stdout
    assert "unreached" not in done.stdout


def test_only_the_commands_of_a_console_block_run(tmp_path: Path) -> None:
    text = "```console\n$ echo a \\\n    b\noutput that is no command\n$ echo c\n```\n"
    done = run_text(text, tmp_path)
    assert (done.returncode, done.stdout) == (0, "a b\nc\n")


def test_lines_that_other_tests_cover_are_left_out() -> None:
    text = """
```sh
git clone https://example.org/laststep
cd laststep
make demo    # a minute
make test
echo make demo && cd ..
```
"""
    [block] = blocks_of(text, "page.md")
    assert block.code == "echo make demo && cd .."


def test_a_block_with_a_reason_is_not_run() -> None:
    text = "<!-- not run: needs two machines -->\n\n```sh\nfalse\n```\n\n```sh\ntrue\n```\n"
    assert [block.line for block in blocks_of(text, "page.md")] == [8]


def test_a_block_that_needs_a_package_is_known_by_it() -> None:
    text = "<!-- needs: json, no_such_package -->\n```sh\ntrue\n```\n\n```sh\ntrue\n```\n"
    blocks = blocks_of(text, "page.md")
    assert [block.needs for block in blocks] == [("json", "no_such_package"), ()]
    assert not_installed(blocks) == ["no_such_package"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- needs: -->\n```sh\nfalse\n```\n", "page.md:1: `needs` without the names"),
        ("<!-- needs: a or b -->\n```sh\n```\n", "page.md:1: `needs` without the names"),
        ("<!-- needs: json -->\ntext\n", "page.md:1: `needs` is not followed"),
        ("<!-- needs: json -->\n```json\n```\n", "page.md:1: `needs` before what"),
        ("<!-- not run -->\n```sh\nfalse\n```\n", "page.md:1: `not run` without saying why"),
        ("<!-- not run: -->\n```sh\nfalse\n```\n", "page.md:1: `not run` without saying why"),
        ("<!-- not run: no network -->\ntext\n", "page.md:1: `not run` is not followed"),
        ("<!-- not run: no network -->\n", "page.md:1: `not run` is not followed"),
        ("<!-- not run: no network -->\n```json\n```\n", "page.md:1: `not run` before what"),
        ("```\nwhat is this\n```\n", "page.md:1: name the block's language"),
        ("```python\nx = 1\n", "page.md:1: the block is never closed"),
    ],
)
def test_nothing_is_left_out_silently(text: str, message: str) -> None:
    with pytest.raises(PageError, match=re.escape(message)):
        blocks_of(text, "page.md")


def test_the_picture_of_the_readme_is_drawn_from_the_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from bench import picture

    assert picture.OUT.read_text() == picture.draw(), "run bench/picture.py"


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    """mkdocs ends with an error at a broken link, a missing anchor and an unknown name."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first = (tmp_path / "index.html").read_text()
    assert 'href="guides/quick-start.html"' in first
    assert "Checkpointer" in (tmp_path / "reference.html").read_text()
    assert "fonts.googleapis" not in first
