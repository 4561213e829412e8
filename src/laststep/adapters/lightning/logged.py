"""What is logged, within an epoch: the sums behind `self.log(…, on_epoch=True)`, the states
of torchmetrics, and the last value of each metric, which schedulers and callbacks look at.

Each rank has its own, since Lightning adds up those of all ranks at the end of an epoch.
"""

# ruff: noqa: SLF001 (Lightning's results have no public names; package.py compares what is used)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laststep.adapters.lightning.package import Metric, MetricCollection

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_SUMS = ("value", "cumulated_batch_size")


def describe(trainer: Any) -> dict[str, object]:
    """Of this rank, now."""
    results = trainer.fit_loop.epoch_loop._results
    return {
        "last": dict(trainer.callback_metrics),
        "sums": {
            key: {name: getattr(result, name) for name in _SUMS if hasattr(result, name)}
            for key, result in results.items()
            if result.is_tensor and result.meta.on_epoch and not result.has_reset
        },
        "metrics": {
            name: {"state": dict(metric.metric_state), "updates": metric._update_count}
            for name, metric in _metrics_of(trainer.lightning_module)
        },
    }


def put_back(trainer: Any, described: dict[str, Any], epochs: int) -> None:
    """What `describe` gave, when so many epochs were begun."""
    trainer._logger_connector._callback_metrics.update(described["last"])
    for name, metric in _metrics_of(trainer.lightning_module):
        stored = described["metrics"].get(name)
        if stored is not None and stored["state"].keys() == metric.metric_state.keys():
            for key, value in stored["state"].items():
                setattr(metric, key, _on(metric.device, value))
            metric._update_count, metric._computed = stored["updates"], None
    results, sums = trainer.fit_loop.epoch_loop._results, dict(described["sums"])
    original = results.update_metrics

    def go_on(key: str, *more: object) -> None:
        """A value is added to a sum, which is there only now."""
        if trainer.fit_loop.epoch_progress.current.ready > epochs:
            sums.clear()  # of an epoch that is over
        for name, value in sums.pop(key, {}).items():
            setattr(results[key], name, value.to(results[key].value.device))
        if not sums:
            results.update_metrics = original
        original(key, *more)

    if sums:
        results.update_metrics = go_on


def _metrics_of(module: Any) -> Iterator[tuple[str, Any]]:
    modules = list(module.named_modules())
    for _, one in modules:
        if isinstance(one, MetricCollection):
            one.values()  # of those that share a state, all have it from now on
    for name, one in modules:
        if isinstance(one, Metric):
            yield name, one


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, list):
        return [one.to(device) for one in value]
    return value.to(device)
