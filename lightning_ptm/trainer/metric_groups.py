"""Reduction of a module's metrics (torchmetrics) under tensor parallelism, over the ranks with different data.

Over all ranks, torchmetrics' default, each batch would count once per tensor-parallel rank. Knows the method that reduces a
metric. The process group is not stored in the metric, which could then not be copied.
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
    """Replacement for a metric's reduce method, with a default process group; the metric's or caller's own group has
    precedence. A copy of the metric has a copy of it.

    Args:
        group: returns the process group; None after the run.
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
        return getattr, (self._metric, SYNC_METRIC)  # in another process the metric has its own method


def metrics_of(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Each metric of a module, with the name of the method that reduces it."""
    for each in module.modules():
        if isinstance(each, Metric):
            yield each, SYNC_METRIC
