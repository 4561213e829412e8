"""Storage for torch.distributed.checkpoint (DCP) that saves to and loads from a run."""

from laststep.dcp.reader import Reader
from laststep.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
