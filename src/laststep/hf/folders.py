"""Create the Trainer's `checkpoint-N/` folder for each committed checkpoint.

A thread of its own does this while training continues. Files that do not change (config, tokenizer,
arguments) are produced once by the Trainer's own code, before training. The weights are hard links
to the checkpoint's file if `save_pretrained` would write the same file, else an export of it. A
folder appears only once it is complete. A failure to create one is logged; its checkpoint is not
affected.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import Trainer
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import rotate_checkpoints

from laststep.adapters.export.folder import ItemTensors, new_file, new_folder
from laststep.adapters.export.hf import Cast, Choices, export_hf
from laststep.adapters.export.trainer import MARK
from laststep.browse import open as open_run
from laststep.errors import LaststepError, NotFoundError
from laststep.storage.directory import TEMPORARY

if TYPE_CHECKING:
    from laststep.browse import Checkpoint
    from laststep.process.threads import WorkerPool

log = logging.getLogger(__name__)

_SHARD_BYTES = 50 * 10**9
"""The file size limit that `save_pretrained` uses."""


def path_of(output: Path, step: object) -> Path:
    return output / f"checkpoint-{step}"


def is_peft(model: object) -> bool:
    """Return True for a peft model, which trains only its adapters."""
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)


class Folders:
    def __init__(self, trainer: Any, output: Path, run: str, worker: WorkerPool) -> None:
        """`worker` has one thread, so that folders are created in the order of the requests."""
        self._trainer, self._output, self._run, self._worker = trainer, output, run, worker
        self._model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        self._fixed = _fixed_files(trainer)
        for left in output.glob(f".{path_of(output, '*').name}{TEMPORARY}*"):
            shutil.rmtree(left, ignore_errors=True)  # left by a killed process
        self._plain = not is_peft(self._model) and _keeps_names(self._model)
        """True if weights have the same names in the folder as in the checkpoint."""

    def make(self, step: int, *, again: bool = True) -> None:
        """Request the folder of a step; `again` also replaces an existing one."""
        self._worker.put(self._try, step, again)

    def _try(self, step: int, again: bool) -> None:  # noqa: FBT001 (a pool passes no keywords)
        try:
            if again or not path_of(self._output, step).is_dir():
                self._make(step)
        except NotFoundError:
            log.info("no folder for step %d: retention has deleted its checkpoint", step)
        except Exception as error:
            log.error(  # noqa: TRY400 (a traceback only for unexpected errors)
                "%s could not be made, the checkpoint of step %d is there all the same: %s",
                path_of(self._output, step),
                step,
                error,
                exc_info=not isinstance(error, LaststepError | OSError),
            )

    def _make(self, step: int) -> None:
        target = path_of(self._output, step)
        with open_run(self._run)[step] as checkpoint:
            state = TrainerState(**checkpoint.metadata["state"])  # type: ignore[index]
            best = path_of(self._output, state.best_global_step)
            if best == target or best.is_dir():  # its recorded path may be in another place
                state.best_model_checkpoint = str(best)
            with new_folder(target, replace=True) as folder:  # one of an abandoned lineage
                self._fill(folder, checkpoint)
                described = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True)
                _write(folder / "trainer_state.json", f"{described}\n".encode())
                whence = {"run": self._run, "checkpoint": checkpoint.folder}
                _write(folder / MARK, json.dumps(whence).encode())
        args = self._trainer.args
        rotate_checkpoints(
            str(self._output),
            args.save_total_limit,
            str(best) if best.is_dir() else None,
            use_mtime=True,
        )

    def _fill(self, folder: Path, checkpoint: Checkpoint) -> None:
        for name, content in self._fixed.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _write(folder / name, content)
        if not self._plain:
            tensors = ItemTensors(checkpoint, "model")
            full_names = filter(lambda name: name.startswith("model/"), checkpoint.tensors())
            names = [name.removeprefix("model/") for name in full_names]
            live: dict[str, Any] = dict(self._model.named_parameters(remove_duplicate=False))
            # One name per group of tied tensors.
            distinct = {id(live.get(name, name)): name for name in names}
            whole = {alike: tensors.whole(name) for alike, name in distinct.items()}
            held = {name: whole[id(live.get(name, name))] for name in names}
            # Frozen parameters, which peft may write along, do not change: the live ones are used.
            frozen = {
                name: parameter.detach()
                for name, parameter in self._model.named_parameters()
                if not parameter.requires_grad
            }
            self._model.save_pretrained(folder, state_dict={**frozen, **held})
            return
        if not self._link(folder / "model.safetensors", checkpoint.folder):
            parts = folder / "weights"
            # ZeRO's weights are stored in full precision, whatever the model computes with.
            dtype = str(self._model.dtype).removeprefix("torch.")
            casts = (Cast(pattern=None, dtype=dtype),) if self._trainer.is_deepspeed_enabled else ()
            choices = Choices(shard_bytes=_SHARD_BYTES, casts=casts, drop_tied=True)
            export_hf(checkpoint, parts, item="model", choices=choices)
            for file in parts.iterdir():
                file.rename(folder / file.name)
            parts.rmdir()

    def _link(self, target: Path, folder: str) -> bool:
        """Hard-link the model's file of a checkpoint folder to `target`. Return False if no single
        file is what `save_pretrained` would write, or if it cannot be linked."""
        files = Path(self._run, folder).glob("model*.safetensors")
        # A name with "~" is a file of an earlier checkpoint, which may lack later changes.
        found = [file for file in files if "~" not in file.name]
        if len(found) != 1 or not _is_whole(found[0], self._model):
            return False
        try:
            os.link(found[0], target)
        except OSError as error:  # another disk, or no hard links
            log.info("%s is copied: %s", found[0], error)
            return False
        return True


def _write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with new_file(path) as file:
        file.write(content)


def _fixed_files(trainer: Any) -> dict[str, bytes]:
    """Return all files that the Trainer writes besides weights and state, made by its own code."""
    # One element per tensor is enough: only the names are needed.
    names = {name: torch.zeros(1) for name in trainer.model.state_dict(keep_vars=True)}
    with tempfile.TemporaryDirectory(prefix="laststep-") as scratch:
        # Not `trainer._save`: a user's override may write the present weights under any name.
        Trainer._save(trainer, scratch, state_dict=names if is_peft(trainer.model) else {})
        return {
            str(file.relative_to(scratch)): file.read_bytes()
            for file in sorted(Path(scratch).rglob("*"))
            if file.is_file() and ".safetensors" not in file.name
        }


def _keeps_names(model: Any) -> bool:
    """Return True if `save_pretrained` writes all tensors under their names and shapes."""
    if not hasattr(model, "save_pretrained"):
        return True
    if getattr(model, "_keys_to_ignore_on_save", None):
        return False
    state = model.state_dict(keep_vars=True)
    meta = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in state.items()
    }
    return _shapes(revert_weight_conversion(model, meta)) == _shapes(state)


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _is_whole(file: Path, model: Any) -> bool:
    """Return True if a file holds a whole model; one of tied tensors is enough."""
    live = model.state_dict(keep_vars=True)
    with safe_open(file, "pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    known = shapes.items() <= _shapes(live).items()
    return known and {id(live[name]) for name in shapes} == set(map(id, live.values()))
