"""An interpreter that is warm already behaves as one that is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

BOTH = pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])


def command(*arguments: str, warm: bool) -> list[str]:
    return [os.environ["WARM_PYTHON"] if warm else sys.executable, *arguments]


@BOTH
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("raise SystemExit(7)", 7),
        ("raise KeyError(1)", 1),
        ("import os; os._exit(9)", 9),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
    ],
)
def test_it_ends_as_its_code_does(code: str, status: int, *, warm: bool) -> None:
    done = subprocess.run(command("-c", code, warm=warm), capture_output=True, check=False)
    assert done.returncode == status, done.stderr


@BOTH
def test_a_script_has_its_arguments_streams_folder_and_environment(
    tmp_path: Path, *, warm: bool
) -> None:
    (tmp_path / "neighbour.py").write_text("value = 3\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, neighbour\n"
        "class A: pass\n"
        "print(__name__, __file__, sys.argv[1:], neighbour.value, A.__module__, sys.executable)\n"
        "print(sys.stdin.read(), os.getcwd(), sorted(os.environ.items()))\n"
        "print('and', os.fstat(int(sys.argv[1])).st_size, file=sys.stderr)\n"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    with script.open() as file:
        done = subprocess.run(
            command(str(script), str(file.fileno()), "x", warm=warm),
            input="said",
            cwd=folder,
            env={"A": "b", "LC_CTYPE": "C.UTF-8"},
            pass_fds=[file.fileno()],
            text=True,
            capture_output=True,
            check=False,
        )
        first = f"__main__ {script} ['{file.fileno()}', 'x'] 3 __main__ {sys.executable}\n"
    second = f"said {folder} [('A', 'b'), ('LC_CTYPE', 'C.UTF-8')]\n"
    assert done.stdout == first + second
    assert done.stderr == f"and {script.stat().st_size}\n"


@BOTH
def test_a_module_runs_as_the_program(tmp_path: Path, *, warm: bool) -> None:
    (tmp_path / "mine.py").write_text("import sys\nprint(__name__, sys.argv)\n")
    words = command("-m", "mine", "a", warm=warm)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"__main__ ['{tmp_path / 'mine.py'}', 'a']\n"


@BOTH
def test_a_signal_reaches_the_code(*, warm: bool) -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(command("-c", code, warm=warm), stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 5


@BOTH
def test_the_code_ends_when_the_process_is_killed(*, warm: bool) -> None:
    code = "print('ready', flush=True); import signal; signal.pause()"
    with subprocess.Popen(command("-c", code, warm=warm), stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        assert process.stdout.read() == b""  # nobody holds the other end of the pipe


def test_torch_is_there_and_no_thread_is() -> None:
    code = (
        "import os, sys\nassert 'torch' in sys.modules\nprint(len(os.listdir('/proc/self/task')))\n"
    )
    done = subprocess.run(command("-c", code, warm=True), capture_output=True, check=True)
    assert done.stdout == b"1\n"
