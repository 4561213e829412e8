"""A run as storage of torch.distributed.checkpoint (DCP)."""

from laststep.adapters.dcp.storage import Reader, Writer

__all__ = ["Reader", "Writer"]
