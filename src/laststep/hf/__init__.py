"""Adapter for Hugging Face's Trainer and trl's trainers: they save to laststep and resume from it.

laststep.hf.attach(trainer, run="runs/a")
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

from laststep.adapters.framework import Framework
from laststep.hf.uses import USES

FRAMEWORK: Framework = Framework(
    package="transformers", extra="hf", oldest="5.22", newest="5.23", uses=USES
)
FRAMEWORK.check()  # before any module imports transformers

from laststep.hf.trainer import attach  # noqa: E402

__all__ = ["attach"]
