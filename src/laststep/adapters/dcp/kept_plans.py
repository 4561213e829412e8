"""Plans that planners keep (`DefaultSavePlanner(enable_plan_caching=True)`): in dicts of their
class, by the name of the planner alone, whichever storage they were made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import SavePlanner

if TYPE_CHECKING:
    from collections.abc import Callable

_CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)


def forget_others(is_ours: Callable[[object], bool]) -> None:
    """Let go of the plans of other storages, before a planner looks for its own. All ranks MUST
    call this at the same point of a save: then all have kept a plan, or none has."""
    finished = getattr(SavePlanner, "_cached_final_save_plan", {})
    for key in [key for key, plan in finished.items() if not is_ours(plan.storage_data)]:
        for cache in _CACHES:
            getattr(SavePlanner, cache, {}).pop(key, None)
