"""Adapter for Hugging Face's Trainer and trl's trainers: they save to laststep and resume from it.

laststep.hf.attach(trainer, run="runs/a")
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

from laststep.adapters.framework import Framework

FRAMEWORK: Framework = Framework(package="transformers", extra="hf", tested="5.22")
FRAMEWORK.check()  # before any module imports transformers

from laststep.hf.trainer import attach  # noqa: E402

__all__ = ["attach"]
