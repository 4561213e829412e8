"""A run as storage of torch.distributed.checkpoint (DCP)."""

from laststep.adapters.dcp.reader import Reader
from laststep.adapters.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
