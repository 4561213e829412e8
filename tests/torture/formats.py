"""Lies with valid digests: everything that is read, changed in one place, and read by everybody.

A trial makes a small run, and what `import` reads; then, again and again, it takes a copy, changes
one thing in it (`mutating`), puts the digests right (`forging`), and has all commands and calls
look at it. Whatever they find: an error of laststep's own or none, within seconds and little
memory, and not a byte changes outside of the folders that they were given.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import resource
import runpy
import shutil
import sys
import time
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forging
import mutating
import numpy as np
import torch
from torch import nn
from trials import Violation

import laststep
from laststep.cli import app
from laststep.errors import LaststepError
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trials import Tally

CHANGES = 12
"""So many changes in a trial."""
LIMIT_S = 10.0
ROOM_BYTES = 1 << 30
"""So much more memory than before may be used."""
ADDRESSES_BYTES = 16 << 30
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RUNS = ("run", "ranks", "job", "coded")
_SETTINGS = {"flush": "thread", "host_memory_bytes": 64 << 20, "progress": False}


class Extra(nn.Module):
    """A module with extra state, which takes what it gave and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.count = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"] + 0


class Loader:
    """Something of a user's own, with a place in the data."""

    def __init__(self) -> None:
        self.at, self.order = 5, [3, 1, 2]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])
        self.order = [self.order[number - 1] for number in state["order"]]


def items() -> dict[str, Any]:
    """A bit of everything that can be saved."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own sparse tensors unfinished
        rows = torch.eye(3).to_sparse_csr()
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.BatchNorm1d(4), "c": Extra()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    base = torch.arange(10.0)
    state = {
        "a": [1, (2, 3.5)],
        "sparse": torch.eye(3).to_sparse(),
        "csr": rows,
        "one": base[2:],
        "two": base[:5],
        "array": np.arange(4, dtype=">i2"),
        "zero": torch.tensor(1.0),
        "scalar": np.float32(2),
        "dtype": torch.float16,
        "size": torch.Size((1, 2)),
        3: {"x": None},
        "long": b"x" * 5000,
        (1, "k"): torch.ones(2, dtype=torch.complex128),
    }
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        "scaler": torch.amp.GradScaler("cpu"),
        "rng": laststep.RNG(),
        "state": state,
        "loader": Loader(),
        "group": {"head": nn.Linear(2, 2), "n": 4},
    }


def items_of(run: Path) -> dict[str, Any]:
    """What fits a run of those that `make` makes."""
    if run.name not in ("job", "coded"):
        return items()
    makers = runpy.run_path(str(GOLDEN / "contents.py"))
    return makers["training" if run.name == "job" else "coded"](0)  # type: ignore[no-any-return]


def make(folder: Path) -> None:
    """A run of two checkpoints, one more of two ranks, one of a real job with layouts and their
    table, one that is encoded, and what `import` reads."""
    live = items()
    for name, golden in (("job", "fsdp2"), ("coded", "coded")):
        (source,) = GOLDEN.glob(f"version-*/{golden}")
        shutil.copytree(source, folder / name)
    for name, saves in (("run", 2), ("ranks", 1)):
        with laststep.Checkpointer(
            folder / name, items=live, **as_keywords(_SETTINGS)
        ) as checkpointer:
            for step in range(saves):
                checkpointer.save(step, metrics={"loss": 0.5}, metadata={"k": [1]}).wait()
    forging.into_ranks(max((folder / "ranks").glob("step-*")))
    foreign = folder / "foreign"
    foreign.mkdir()
    state = {"model": live["model"]["a"].state_dict(), "term": 3, "list": [torch.ones(2), "x"]}
    torch.save(state, foreign / "zip.pt")
    torch.save(state, foreign / "old.pt", _use_new_zipfile_serialization=False)
    from safetensors.torch import save_file

    save_file(
        {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int16)}, foreign / "s.safetensors"
    )
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=foreign / "dcp", no_dist=True)


# Each changes one thing in a copy of what `make` made, and returns what it was.


def in_a_tree(folder: Path, chance: random.Random) -> str:
    step = _step(folder, chance)
    item = chance.choice([name for name in items() if name != "model" or chance.random() < 0.5])
    told = ""

    def change(tree: Any) -> Any:
        nonlocal told
        if chance.random() < 0.8:
            inner = chance.choice(("tree", "tree", "tree", "ties", "views"))
            tree[inner], told = mutating.mutate(tree[inner], chance)
        else:
            tree, told = mutating.mutate(tree, chance)
        return tree

    forging.change_tree(step, item, change)
    return f"tree of {item}: {told}"


def in_an_index(folder: Path, chance: random.Random) -> str:
    run = chance.choice(("run", "ranks", "job", "coded", "coded"))
    step = _step(folder, chance, run)
    rank = chance.randrange(len(list(step.glob("index-r*"))))
    told = ""

    def change(index: Any) -> Any:
        nonlocal told
        if chance.random() < 0.5:  # the files, the encodings or the layouts
            place = chance.choice((2, 3, 4, 4))
            index[place], told = mutating.mutate(index[place], chance)
        else:
            index, told = mutating.mutate(index, chance)
        return index

    forging.change_index(step, change, rank)
    return f"index {rank} of {run}: {told}"


def in_a_header(folder: Path, chance: random.Random) -> str:
    step = _step(folder, chance, "run", "job", "coded")
    path = chance.choice(sorted(step.glob("*.safetensors")) or [step / "index-r00000"])
    if path.suffix:
        header, told = mutating.mutate(forging.header_of(path), chance)
        forging.write_header(path, header)
    else:
        data, told = mutating.mutate_bytes(path.read_bytes(), chance)
        path.write_bytes(data)
    return f"{path.name}: {told}"


def in_the_data(folder: Path, chance: random.Random) -> str:
    step = _step(folder, chance, "run", "coded")
    path = chance.choice([*step.glob("*.safetensors"), *step.glob("*.pack")])
    whole = path.read_bytes()
    at = 8 + int.from_bytes(whole[:8], "little") if path.suffix == ".safetensors" else 0
    data, told = mutating.mutate_bytes(whole[at:], chance)
    size = len(whole) - at
    path.write_bytes(whole[:at] + (data + bytes(size))[:size])
    if chance.random() < 0.8:
        forging.digest_again(step)
    return f"data of {path.name}: {told}"


def in_a_manifest(folder: Path, chance: random.Random) -> str:
    told = ""

    def change(manifest: Any) -> Any:
        nonlocal told
        if chance.random() < 0.1:
            manifest = {"format": 1, "decision": "abort", "reason": "r", "by": "b"}
        manifest, told = mutating.mutate(manifest, chance)
        return manifest

    forging.change_manifest(_step(folder, chance, *RUNS), change)
    return f"manifest: {told}"


def in_a_table(folder: Path, chance: random.Random) -> str:
    told = ""

    def change(table: Any) -> Any:
        nonlocal told
        table, told = mutating.mutate(table, chance)
        return table

    forging.change_table(_step(folder, chance, "job"), change)
    return f"table: {told}"


def in_an_epoch(folder: Path, chance: random.Random) -> str:
    told = ""

    def change(record: Any) -> Any:
        nonlocal told
        record, told = mutating.mutate(record, chance)
        return record

    if chance.random() < 0.3:
        path = folder / "run" / "run.json"
        path.write_bytes(forging.to_json(change(json.loads(path.read_bytes()))))
    else:
        forging.change_epoch(folder / "run" / "terms" / "00000001.json", change)
    return f"term or run: {told}"


def in_the_folder(folder: Path, chance: random.Random) -> str:
    """Links, fifos, folders and odd names where files should be."""
    run = folder / chance.choice(("run", "coded"))
    there = sorted(p for p in run.rglob("*") if p.is_file() or "step-" in p.name)
    path = chance.choice(there)
    how = chance.choice(("link", "dangling", "loop", "fifo", "folder", "empty", "gone", "outside"))
    if how == "outside":  # a whole checkpoint that lies elsewhere
        path = next(one for one in (path, *path.parents) if one.parent.name in (run.name, "terms"))
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
        return f"{path.name} is a link to where it is now"
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    match how:
        case "link":
            path.symlink_to(folder / "outside" / "kept")
        case "dangling":
            path.symlink_to(folder / "outside" / "not-there")
        case "loop":
            path.symlink_to(path.name)
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
    return f"{path.name}: {how}"


def in_what_import_reads(folder: Path, chance: random.Random) -> str:
    foreign = folder / "foreign"
    path = chance.choice(sorted(p for p in foreign.rglob("*") if p.is_file()))
    if path.suffix == ".safetensors":
        whole = path.read_bytes()
        at = 8 + int.from_bytes(whole[:8], "little")
        header, told = mutating.mutate(json.loads(whole[8:at]), chance)
        text = forging.to_json(header)
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[at:])
    elif path.name == "zip.pt" and chance.random() < 0.7:
        told = _change_archive(path, chance)
    else:
        data, told = mutating.mutate_bytes(path.read_bytes(), chance)
        path.write_bytes(data)
    return f"{path.relative_to(foreign)}: {told}"


def _change_archive(path: Path, chance: random.Random) -> str:
    """One member of a zip changed, compressed, renamed or twice; the archive itself is sound."""
    with zipfile.ZipFile(path) as archive:
        members = [(one.filename, archive.read(one)) for one in archive.infolist()]
    number = chance.randrange(len(members))
    name, data = members[number]
    told, how = f"{name} compressed", zipfile.ZIP_STORED
    match chance.randrange(5):
        case 0:
            how, data = zipfile.ZIP_DEFLATED, data + bytes(chance.choice((0, 1 << 28)))
        case 1:
            name, told = (
                chance.choice(("../outside/x", "/x", "archive/data.pkl")),
                f"{name} renamed",
            )
        case 2:
            members.append((name, data))
            told = f"{name} twice"
        case _:
            data, told = mutating.mutate_bytes(data, chance)
    members[number] = (name, data)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", how) as archive:
        warnings.simplefilter("ignore")
        for one, its in members:
            archive.writestr(one, its)
    return f"{name}: {told}"


CHANGE: tuple[Callable[[Path, random.Random], str], ...] = (
    in_a_tree,
    in_a_tree,
    in_a_tree,
    in_an_index,
    in_an_index,
    in_an_index,
    in_a_header,
    in_the_data,
    in_a_manifest,
    in_a_manifest,
    in_a_table,
    in_a_table,
    in_an_epoch,
    in_the_folder,
    in_what_import_reads,
    in_what_import_reads,
)


def _step(folder: Path, chance: random.Random, *runs: str) -> Path:
    """A checkpoint, mostly the newest: that is the one that most look at."""
    there = sorted((folder / chance.choice(runs or ("run",))).glob("step-*"))
    return there[-1] if chance.random() < 0.8 else chance.choice(there)


# What looks at it.


def command(*arguments: str) -> None:
    """A command of the command line, in this process; statuses are its own way to say no."""
    with (
        contextlib.suppress(SystemExit),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        app([*arguments], standalone_mode=True)


def _open(run: Path) -> None:
    for checkpoint in laststep.open(run):
        with checkpoint, contextlib.suppress(LaststepError):
            for name in checkpoint.tensors():
                with contextlib.suppress(LaststepError):
                    stored = checkpoint.tensor(name)
                    _ = stored[:], stored[0:1], stored[...]


def _restore(run: Path, **how: Any) -> None:
    live = items_of(run)
    with laststep.Checkpointer(run, items=live, **as_keywords(_SETTINGS)) as checkpointer:
        checkpointer.restore(**how)


def _save_on(run: Path) -> None:
    """Retention, by a writer that goes on."""
    live = items_of(run)
    keep = laststep.Keep(last=1, best=1, metric="loss")
    with laststep.Checkpointer(
        run, items=live, keep=keep, **as_keywords(_SETTINGS)
    ) as checkpointer:
        with contextlib.suppress(LaststepError):
            checkpointer.restore(strict=False)
        checkpointer.save(7, metrics={"loss": 0.1}, overwrite=True).wait()


def looks(folder: Path, run: Path, chance: random.Random) -> list[tuple[str, Callable[[], object]]]:
    """All that is done with a run, in some order, the ones that change it last."""
    out = folder / "out" / run.name
    part = ["optimizer/*exp*", "model/*" if run.name == "job" else "state/*"]
    part = ["few/w", "wide/*"] if run.name == "coded" else part
    item = ["--item", "few"] if run.name == "coded" else []
    step = next(iter(sorted(run.glob("step-*"))), run)
    found: list[tuple[str, Callable[[], object]]] = [
        ("ls", lambda: command("ls", str(run), "--json")),
        ("show", lambda: command("show", str(run), "--all")),
        ("verify", lambda: command("verify", str(run))),
        ("open", lambda: _open(run)),
        ("load", lambda: laststep.load(run)),
        ("load a folder", lambda: laststep.load(step)),
        ("load into", lambda: laststep.load(run, into=items_of(run), strict=False)),
        ("restore", lambda: _restore(run)),
        ("restore what fits", lambda: _restore(run, strict=False)),
        ("restore a part", lambda: _restore(run, only=part)),
        ("export", lambda: command("export", str(run), str(out / "hf"), "--format", "hf", *item)),
        ("export dcp", lambda: command("export", str(run), str(out / "dcp"), "--format", "dcp")),
    ]
    found += [
        (
            f"import {path.name}",
            lambda path=path: command("import", str(path), str(out / path.name)),
        )
        for path in sorted((folder / "foreign").iterdir())
    ]
    chance.shuffle(found)
    prune = ("prune", str(run), "--last", "1", "--abandoned", "--yes")
    return [*found, ("save on", lambda: _save_on(run)), ("prune", lambda: command(*prune))]


def trial(folder: Path, seed: int, tally: Tally) -> None:
    """Some changes, each to a fresh copy, each looked at by everybody."""
    chance = random.Random(seed)
    torch.set_num_threads(1)
    logging.getLogger("laststep").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    made = folder / "made"
    made.mkdir()
    make(made)
    for number in range(CHANGES):
        place = folder / f"change-{number}"
        shutil.copytree(made, place)
        outside = place / "outside"
        outside.mkdir()
        (outside / "kept").write_bytes(b"kept")
        before = _seen(outside)
        change = chance.choice(CHANGE)
        told = change(place, chance)
        tally.fault(change.__name__.replace("_", " "))
        tally.step(f"change {number}: {told}")
        imports = change is in_what_import_reads
        changed = [name for name in RUNS if _seen(place / name) != _seen(made / name)]
        run = place / (changed or ["run"])[0]
        for name, look in looks(place, run, chance):
            if name.startswith("import") == imports:
                _look(name, look, told, tally)
        if _seen(outside) != before:
            raise Violation("wrong", f"something was written outside, after {told}")
        shutil.rmtree(place)


def _look(name: str, look: Callable[[], object], told: str, tally: Tally) -> None:
    began = time.process_time()  # of its work: how busy the machine is does not count
    try:
        with _bounded(f"by {name}, after {told}"):
            look()
        tally.note("looks that found nothing wrong")
    except LaststepError as error:
        tally.note(f"looks that raised {type(error).__name__}")
    except Violation:
        raise
    except Exception as error:
        tally.step(f"{name}: {type(error).__name__}: {error}")
        raise
    took = time.process_time() - began
    if took > LIMIT_S:
        raise Violation("hang", f"{name} took {took:.1f} s, after {told}")


@contextlib.contextmanager
def _bounded(told: str) -> Iterator[None]:
    """No more memory than a checkpoint as small as these can need. Address space that nobody
    touches is not memory, but even of that there is an end."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + ADDRESSES_BYTES, before[1]))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is used now
    used = _memory("VmHWM")
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    peak = _memory("VmHWM") - used
    if peak > ROOM_BYTES:
        raise Violation("wrong", f"{peak >> 20} MB were used, {told}")


def _memory(what: str) -> int:
    """What this process uses, by a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{what}:"))


def _seen(folder: Path) -> list[tuple[str, bytes]]:
    """What a folder holds, links as links."""
    return sorted(
        (str(p.relative_to(folder)), b"" if p.is_symlink() or not p.is_file() else p.read_bytes())
        for p in folder.rglob("*")
    )


if __name__ == "__main__":  # a short way to try it: python formats.py FOLDER SEED TRIALS
    import trials

    total = trials.run(
        "formats", trial, Path(sys.argv[1]), seed=int(sys.argv[2]), trials=int(sys.argv[3])
    )
    for finding in total.findings:
        print(finding)
    print(total.faults, total.notes, len(total.findings))
