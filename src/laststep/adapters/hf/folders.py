"""Make `checkpoint-N/` of a committed checkpoint, as the Trainer would have saved it.

On a thread of its own, beside training. What does not change (config, tokenizer, arguments) is made
once by the Trainer's own code, before training; the weights are hard links to the checkpoint's file
where that is what `save_pretrained` would write, else an export of it. A folder appears whole, and
one that could not be made is told in the log: its checkpoint is there all the same.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import queue
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import Trainer
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import rotate_checkpoints

from laststep.adapters.export.folder import new_file, new_folder
from laststep.adapters.export.hf import Cast, Choices, export_hf
from laststep.adapters.export.pieces import ItemTensors
from laststep.adapters.hf.items import is_peft
from laststep.browse import open as open_run
from laststep.errors import LaststepError, NotFoundError
from laststep.storage.directory import TEMPORARY

if TYPE_CHECKING:
    from laststep.browse import Checkpoint

log = logging.getLogger(__name__)

MARK = "laststep.json"
"""A file that tells such a folder from one that the Trainer has saved itself."""
_SHARD_BYTES = 50 * 10**9
"""As `save_pretrained` cuts files."""


def path_of(output: Path, step: object) -> Path:
    """As the Trainer names the folder of a step."""
    return output / f"checkpoint-{step}"


def state_json(state: TrainerState) -> bytes:
    """As the Trainer writes its `trainer_state.json`."""
    text = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True)
    return f"{text}\n".encode()


class Folders:
    """Makes folders in `output` of the checkpoints of `run`, in the order in which they come."""

    def __init__(self, trainer: Any, output: Path, run: str) -> None:
        self._trainer, self._output, self._run = trainer, output, run
        self._model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        self._fixed = _fixed_files(trainer)
        for left in output.glob(f".{path_of(output, '*').name}{TEMPORARY}*"):
            shutil.rmtree(left, ignore_errors=True)  # by a kill
        self._plain = not is_peft(self._model) and _keeps_names(self._model)
        """Whether the weights go into the folder by the names that they have here."""
        self._todo: queue.Queue[tuple[int, bool] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="laststep-folders", daemon=True)
        self._thread.start()

    def make(self, step: int, *, again: bool = True) -> None:
        """Have the folder of a step made; `again`: also where there is one."""
        self._todo.put((step, again))

    def wait(self) -> None:
        """Until all are made that were asked for."""
        self._todo.join()

    def close(self) -> None:
        """Make all that were asked for, and end."""
        self._todo.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (wanted := self._todo.get()) is not None:
            step, again = wanted
            try:
                if again or not path_of(self._output, step).is_dir():
                    self._make(step)
            except NotFoundError:
                log.info("no folder for step %d: retention has deleted its checkpoint", step)
            except Exception as error:
                log.error(  # noqa: TRY400 (a traceback only where it tells something)
                    "%s could not be made, the checkpoint of step %d is there all the same: %s",
                    path_of(self._output, step),
                    step,
                    error,
                    exc_info=not isinstance(error, LaststepError | OSError),
                )
            finally:
                self._todo.task_done()
        self._todo.task_done()

    def _make(self, step: int) -> None:
        target = path_of(self._output, step)
        with open_run(self._run)[step] as checkpoint:
            state = TrainerState(**checkpoint.metadata["state"])  # type: ignore[index]
            with new_folder(target, replace=True) as folder:  # that of an abandoned branch
                self._fill(folder, checkpoint)
                _write(folder / "trainer_state.json", state_json(state))
                whence = {"run": self._run, "checkpoint": checkpoint.folder}
                _write(folder / MARK, json.dumps(whence).encode())
        args = self._trainer.args
        best = path_of(self._output, state.best_global_step)  # which may have been elsewhere
        rotate_checkpoints(
            str(self._output),
            args.save_total_limit,
            str(best) if best.is_dir() else None,
            use_mtime=True,
        )
        if args.push_to_hub:
            self._push(str(target), state)

    def _fill(self, folder: Path, checkpoint: Checkpoint) -> None:
        for name, content in self._fixed.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _write(folder / name, content)
        if not self._plain:
            tensors = ItemTensors(checkpoint, "model")
            names = [
                name.partition("/")[2] for name in checkpoint.tensors() if name.startswith("model/")
            ]
            live: dict[str, Any] = dict(self._model.named_parameters(remove_duplicate=False))
            one = {id(live.get(name, name)): name for name in names}  # of those that are tied
            whole = {alike: tensors.whole(name) for alike, name in one.items()}
            held = {name: whole[id(live.get(name, name))] for name in names}
            self._model.save_pretrained(folder, state_dict={**self._frozen(), **held})
            return
        if not self._link(folder / "model.safetensors", checkpoint.folder):
            parts = folder / "weights"
            export_hf(checkpoint, parts, item="model", choices=self._choices())
            for file in parts.iterdir():
                file.rename(folder / file.name)
            parts.rmdir()

    def _frozen(self) -> dict[str, Any]:
        """What peft may want to write beside what is trained; it does not change."""
        return {
            name: parameter.detach()
            for name, parameter in self._model.named_parameters()
            if not parameter.requires_grad
        }

    def _choices(self) -> Choices:
        # ZeRO's weights are stored in full precision, whatever the model computes with.
        dtype = str(self._model.dtype).removeprefix("torch.")
        casts = (Cast(pattern=None, dtype=dtype),) if self._trainer.is_deepspeed_enabled else ()
        return Choices(shard_bytes=_SHARD_BYTES, casts=casts)

    def _link(self, target: Path, folder: str) -> bool:
        """Whether one file of it is what `save_pretrained` would write, and is linked."""
        files = Path(self._run, folder).glob("model*.safetensors")
        # A file of an earlier checkpoint may lack what has changed since.
        found = [file for file in files if "~" not in file.name]
        if len(found) != 1 or not _is_whole(found[0], self._model):
            return False
        try:
            os.link(found[0], target)
        except OSError as error:  # another disk, or one without links
            log.info("%s is copied: %s", found[0], error)
            return False
        return True

    def _push(self, target: str, state: TrainerState) -> None:
        """As the Trainer does when it has saved, with its state at that time."""
        then = copy.copy(self._trainer)
        then.state = state
        then.processing_class = None  # its files are written here: training may be using it
        for name, content in self._fixed.items():
            if os.sep not in name:
                Path(self._trainer.args.output_dir, name).write_bytes(content)
        then._push_from_checkpoint(target)
        self._trainer.push_in_progress = then.push_in_progress


def _write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with new_file(path) as file:
        file.write(content)


def _fixed_files(trainer: Any) -> dict[str, bytes]:
    """All that the Trainer writes beside weights and state, by its own code."""
    # One element stands for each tensor: names are all that it needs.
    names = {name: torch.zeros(1) for name in trainer.model.state_dict(keep_vars=True)}
    with tempfile.TemporaryDirectory(prefix="laststep-") as scratch:
        # A `_save` of the user's own may write weights, as they are now, under any name.
        Trainer._save(trainer, scratch, state_dict=names if is_peft(trainer.model) else {})
        return {
            str(file.relative_to(scratch)): file.read_bytes()
            for file in sorted(Path(scratch).rglob("*"))
            if file.is_file() and ".safetensors" not in file.name
        }


def _keeps_names(model: Any) -> bool:
    """Whether `save_pretrained` writes tensors as they are here: of some models it leaves some out,
    or renames and cuts them, as they were in the checkpoint that they came from."""
    if not hasattr(model, "save_pretrained"):
        return True
    if getattr(model, "_keys_to_ignore_on_save", None):
        return False
    meta = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    saved = revert_weight_conversion(model, dict(meta))
    return {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
        name: tuple(tensor.shape) for name, tensor in meta.items()
    }


def _is_whole(file: Path, model: Any) -> bool:
    """Whether a file has each tensor of a model, whole and as it is; tied ones once."""
    live = model.state_dict(keep_vars=True)
    with safe_open(file, "pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    stored = {id(live[name]) for name in shapes if name in live}
    return all(
        name in live and tuple(live[name].shape) == shape for name, shape in shapes.items()
    ) and stored == set(map(id, live.values()))
