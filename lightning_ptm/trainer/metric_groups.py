"""Metrics of a module (torchmetrics) under tensor parallelism: each adds up over ranks with different data. Over all ranks,
which it does by itself, it would count each batch as often as a layer has parts.

Knows torchmetrics' method that adds up; a process group in a metric itself would be in nobody's copies of it, since process
groups cannot be copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric

from lightning_ptm.trainer.internals import SYNC_METRIC


class InGroup:
    """In the place of a metric's method: the same, in a group, unless the metric or who calls names another. A copy of the
    metric has a copy of it.

    Args:
        group: of ranks; None once the run has ended.
    """

    def __init__(self, metric: Any, group: Callable[[], ProcessGroup | None]) -> None:
        self._metric = metric
        self._group = group

    def __call__(self, dist_sync_fn: Callable[..., Any], process_group: Any = None) -> None:
        metric = self._metric
        chosen = process_group or metric.process_group or self._group()
        getattr(type(metric), SYNC_METRIC)(metric, dist_sync_fn, process_group=chosen)

    def __deepcopy__(self, known: dict[int, Any]) -> InGroup:
        return InGroup(copy.deepcopy(self._metric, known), self._group)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._metric, SYNC_METRIC)  # another process has the metric's own


def metrics_of(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """(metric, name of the method that adds it up) of all that a module has."""
    for each in module.modules():
        if isinstance(each, Metric):
            yield each, SYNC_METRIC
