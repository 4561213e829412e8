"""msgspec's structs can be used for the first time by several threads at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
RACE = """
import sys, threading, types
import msgspec
from laststep.process.threads import ready

sys.setswitchinterval(1e-6)
SOURCE = '''
from __future__ import annotations
import msgspec

class Leaf(msgspec.Struct):
    number: int
    names: dict[str, int]

class Inner(msgspec.Struct):
    leaves: list[Leaf]
    more: dict[str, Leaf] | None = None

class Outer(msgspec.Struct, array_like=True):
    inner: Inner
    others: tuple[Inner, ...]
'''
for number in range(100):  # without `ready`, 5 of 5 runs crashed
    module = types.ModuleType(f"race{number}")
    sys.modules[module.__name__] = module
    exec(SOURCE, module.__dict__)
    for kind in (module.Leaf, module.Inner, module.Outer):
        kind.__module__ = module.__name__
    whole = module.Outer(module.Inner([module.Leaf(1, {"a": 1})]), (module.Inner([]),))
    data, start = msgspec.msgpack.encode(whole), threading.Barrier(6)

    def decode():
        start.wait()
        assert msgspec.msgpack.decode(data, type=ready(module.Outer)) == whole

    threads = [threading.Thread(target=decode) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("done")
"""
DECODES = re.compile(r"\b(type=|Decoder\(|msgspec\.convert\(\w+, )(?!ready\()([A-Z_]\w*)")


def test_threads_may_decode_a_struct_for_the_first_time_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_every_struct_is_made_ready_before_it_is_decoded() -> None:
    unready = [
        f"{path.name}: {match[0]}"
        for path in SOURCE.rglob("*.py")
        if "msgspec" in (text := path.read_text())
        for match in DECODES.finditer(text)
    ]
    assert not unready
