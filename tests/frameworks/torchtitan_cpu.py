"""torchtitan on CPUs, and beside the released torch: import this before anything of it.

torchtitan asks torch for an accelerator, and that for its name and its memory. One of its modules
holds kernels for Triton, which is not there without a GPU, and which nothing here calls. It is
written for a torch later than 2.13, in which process groups have timeouts to set, and pipelines
take batches that are cut already. gloo cannot multiply while it sums, as FSDP asks it to.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1, name="CPU")
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.current_device = lambda: 0
torch.cpu.memory_stats = lambda device=None: {}
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()


def _setting_with_plain_sums(set_factor):
    def set_both(self, factor):
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    return set_both


FSDPModule.set_gradient_divide_factor = _setting_with_plain_sums(
    FSDPModule.set_gradient_divide_factor
)

if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda timeout, group: None

    def _taking_whole_batches(step):
        def taking_cut_ones(self, *, arg_mbs, kwarg_mbs, target_mbs, **more):
            batch = [torch.cat(parts) for parts in zip(*arg_mbs or [], strict=True)]
            target = None if target_mbs is None else torch.cat(target_mbs)
            return step(self, *batch, target=target, **more)

        return taking_cut_ones

    for kind in (PipelineScheduleMulti, PipelineScheduleSingle):
        kind.step = _taking_whole_batches(kind.step)
