"""Write a `checkpoint-N` folder from which the Trainer of transformers resumes by itself.

It has what the Trainer writes: weights, `optimizer.pt`, `scheduler.pt`, `rng_state.pth` and
`trainer_state.json`. Configuration, tokenizer and arguments are copied from a `checkpoint-…` folder
beside the run, because a checkpoint does not contain them. The folder that laststep made for the
same checkpoint, which lacks the optimizer, is replaced. Does not import transformers.
"""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laststep.adapters.export.folder import Exported, check_absent, new_file, new_folder
from laststep.adapters.export.hf import Choices, write_weights
from laststep.adapters.export.torch_file import save_file, state_of
from laststep.errors import UsageError
from laststep.storage.files import absolute

if TYPE_CHECKING:
    import os

    from laststep.browse import Checkpoint

MARK = "laststep.json"
"""Marker file that distinguishes our folders from those that the Trainer has saved itself."""
_MADE = (
    *("model*.safetensors*", "pytorch_model*", "optimizer.pt", "scheduler.pt", "scaler.pt"),
    *("rng_state*.pth", "trainer_state.json", MARK),
)
"""The files of a folder that belong to one step."""
_STATES = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}


def export_trainer(
    checkpoint: Checkpoint, target: str | os.PathLike[str], *, run: Path | None
) -> Exported:
    """Write a new folder, or replace the one that laststep made for this checkpoint. `run` is the
    folder of the run, if it is on this machine. Raise AlreadyExistsError if anything else exists
    under this name."""
    items, stamp = checkpoint.items(), checkpoint.metadata
    is_trainers = isinstance(stamp, dict) and stamp.get("framework") == "transformers"
    beside = [] if run is None else sorted(run.parent.glob("checkpoint-*/"), key=_number)
    if not is_trainers or "counts" in items or checkpoint.ranks > 1:
        raise UsageError(
            "only the checkpoints of a Trainer with one rank and without DeepSpeed can become its "
            "folders",
            where=checkpoint.folder,
            remedy="--format hf writes the weights, --format torch everything",
        )
    if any((folder / "adapter_config.json").exists() for folder in beside):
        raise UsageError(
            "the checkpoints of peft cannot become a Trainer's folders",
            where=checkpoint.folder,
            remedy="--format torch writes everything; load the adapter from checkpoint-N, which "
            "resuming once with laststep makes",
        )
    replaced = Path(absolute(target))
    replace = run is not None and _is_made_for(checkpoint, replaced, run)
    if not replace:
        check_absent(target)
    with new_folder(target, replace=replace) as folder:
        for source in [replaced] if replace else beside[-1:]:
            shutil.copytree(
                source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_MADE)
            )
        written = write_weights(checkpoint, folder, item="model", choices=Choices(drop_tied=True))
        files = dict(written.files)
        for item, name in _STATES.items():
            if item in items:
                state = state_of(checkpoint, item)
                save_file(_by_position(state) if item == "optimizer" else state, folder / name)
                files[name] = (folder / name).stat().st_size
        if "rng" in items:
            save_file(_random_numbers(checkpoint), folder / "rng_state.pth")
        document = json.dumps(stamp["state"], indent=2, sort_keys=True) + "\n"  # type: ignore[index]
        with new_file(folder / "trainer_state.json") as file:
            file.write(document.encode())
    return Exported(files=files, tensors=written.tensors, dropped=written.dropped)


def _is_made_for(checkpoint: Checkpoint, folder: Path, run: Path) -> bool:
    """Return True if laststep made this folder for the checkpoint, wherever the run was then."""
    try:
        made = json.loads((folder / MARK).read_bytes())
    except (OSError, ValueError):
        return False
    if folder.is_symlink() or not isinstance(made, dict):
        return False
    is_beside = folder.parent.resolve() == run.parent.resolve()
    return made.get("checkpoint") == checkpoint.folder and (
        is_beside or made.get("run") == absolute(run)
    )


def _number(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _by_position(state: Any) -> dict[str, object]:
    """Return the state of an optimizer with numbers for names, as torch itself writes it."""
    numbers: dict[str, int] = {}
    numbered = count()
    groups = []
    for group in state["param_groups"]:
        numbers |= {name: next(numbered) for name in group["params"]}
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    entries = {numbers[name]: entry for name, entry in state["state"].items()}
    return {"state": entries, "param_groups": groups}


def _random_numbers(checkpoint: Checkpoint) -> dict[str, object]:
    state: Any = state_of(checkpoint, "rng")
    cuda = state["torch"]["cuda"]
    return {
        "python": state["python"],
        "numpy": state["numpy"],
        "cpu": state["torch"]["cpu"],
        **({"cuda": cuda[0]} if cuda else {}),
    }
