"""Micro-batches of a pipeline: equal parts of a batch, and what a step logs of all of them.

The last stage alone comes to what a step logs, and to the metrics that it updates. `LogRecorder` records both there, and
repeats them on the other stages. Knows nested data, Lightning's `log` and metrics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_ptm.errors import UsageError
from lightning_ptm.trainer.internals import (
    forget_value_of_metric,
    last_of_metric,
    put_last_of_metric,
    put_updates_of_metric,
)

_LOG = "log"
_TOGETHER: Mapping[Any, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    torch.mean: torch.mean,
    "sum": torch.sum,
    torch.sum: torch.sum,
    "max": torch.max,
    torch.max: torch.max,
    "min": torch.min,
    torch.min: torch.min,
}


def samples_of(batch: Any) -> int:
    """Returns the size of dimension 0 of a batch's first tensor that has one; 0 if none has."""
    found: list[Tensor] = []
    apply_to_collection(batch, dtype=Tensor, function=found.append)
    return next((each.shape[0] for each in found if each.dim()), 0)


def micro_batches(batch: Any, count: int) -> list[Any]:
    """Returns equal parts of a batch; cuts each tensor with as many elements along dimension 0 as the first one.

    Raises:
        UsageError: there are no such tensors, or the samples cannot be divided equally.
    """
    samples = samples_of(batch)
    if not samples or samples % count:
        raise UsageError(
            f"micro_batches={count} divides the samples of each batch, dimension 0 of its tensors, and a batch "
            f"({type(batch).__name__}) has {samples} samples; give the data loader a batch_size that is a multiple of "
            f"{count}, and drop_last=True"
        )
    size = samples // count

    def part(each: Tensor, at: int) -> Tensor:
        return each.narrow(0, at * size, size) if each.dim() and each.shape[0] == samples else each

    return [apply_to_collection(batch, dtype=Tensor, function=part, at=at) for at in range(count)]


@dataclasses.dataclass(frozen=True, slots=True)
class LogEntry:
    """One call of `log` for all micro-batches of a step.

    Attributes:
        value: a number, or the name of the module's metric.
    """

    name: str
    value: Tensor | str
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class MetricState:
    """States of a metric of the module."""

    states: Mapping[str, Any]
    updates: int
    last: Any


@dataclasses.dataclass(frozen=True, slots=True)
class StepLogs:
    """Logged values of a step, and the metrics that it has updated, by name."""

    entries: Sequence[LogEntry]
    metrics: Mapping[str, MetricState]


class LogRecorder:
    """Records what a step logs on the last stage, and logs it on all stages.

    Args:
        micro_batches: into how many the step divides its batch.
    """

    def __init__(self, module: LightningModule, micro_batches: int) -> None:
        self._module = module
        self._micro_batches = micro_batches
        self._metrics = {name: each for name, each in module.named_modules() if isinstance(each, Metric)}
        self._updates = {name: each.update_count for name, each in self._metrics.items()}
        # state
        self._logged: dict[str, tuple[list[Any], dict[str, Any]]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which `self.log` of the module logs nothing, and is recorded."""
        vars(self._module)[_LOG] = self._record
        try:
            yield
        finally:
            del vars(self._module)[_LOG]

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Context within `recorded` in which nothing is recorded, and after which metrics are as before: a step that does not
        come to its end is one of several forwards of a micro-batch."""
        recording = vars(self._module)[_LOG]
        vars(self._module)[_LOG] = _ignore
        before = [(each, _state_of(each)) for each in self._metrics.values()]
        try:
            yield
        finally:
            vars(self._module)[_LOG] = recording
            for metric, state in before:
                if metric.update_count != state.updates:
                    _put(metric, state)

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if args:
            raise UsageError(
                f"self.log({name!r}, ...) got options by their places, which pipeline stages do not send to each other; give "
                f"them by name"
            )
        if isinstance(value, Metric):
            found = next((place for place, each in self._metrics.items() if each is value), None)
            if found is None or options.get("on_step") is not False:
                raise UsageError(
                    f"self.log({name!r}, ...) of a {type(value).__name__} with pipeline_parallel_size: a step updates it for "
                    f"each micro-batch; make it an attribute of the module, and give on_step=False and on_epoch=True"
                )
            self._logged.setdefault(name, ([], options))[0].append(found)
            return
        if not isinstance(value, (Tensor, int, float)) or torch.as_tensor(value).numel() != 1:
            raise UsageError(
                f"self.log({name!r}, ...) of a {type(value).__name__}: with pipeline_parallel_size a step logs numbers and "
                f"metrics, which are put together from its micro-batches; give it one of these"
            )
        if options.get("reduce_fx", "mean") not in _TOGETHER:
            raise UsageError(
                f"self.log({name!r}, reduce_fx=...) with pipeline_parallel_size: numbers of micro-batches are put together "
                f"by 'mean', 'sum', 'max' or 'min'; use one of them"
            )
        number = torch.as_tensor(value).detach().reshape(()).cpu()
        number = number if number.is_floating_point() else number.to(torch.get_default_dtype())
        self._logged.setdefault(name, ([], options))[0].append(number)

    def found(self) -> StepLogs:
        """Returns what the step has logged and updated on this rank.

        Raises:
            UsageError: only some micro-batches have logged a name.
        """
        entries = [self._entry(name, values, options) for name, (values, options) in self._logged.items()]
        metrics = {
            name: _moved(MetricState(each.metric_state, each.update_count, last_of_metric(each)), "cpu")
            for name, each in self._metrics.items()
            if each.update_count != self._updates[name]
        }
        return StepLogs(entries, metrics)

    def _entry(self, name: str, values: Sequence[Any], options: Mapping[str, Any]) -> LogEntry:
        if len(values) != self._micro_batches:
            raise UsageError(
                f"self.log({name!r}) was called {len(values)} times for {self._micro_batches} micro-batches; call it once "
                f"for each name in each step"
            )
        if options.get("batch_size") is not None:
            options = {**options, "batch_size": options["batch_size"] * self._micro_batches}
        if isinstance(values[0], str):
            return LogEntry(name, values[0], options)
        return LogEntry(name, _TOGETHER[options.get("reduce_fx", "mean")](torch.stack(list(values))), options)

    def log(self, logs: StepLogs, *, own: bool) -> None:
        """Logs what a step has logged on the last stage.

        Args:
            own: whether that was on this rank.
        """
        for name, state in logs.metrics.items() if not own else ():
            _put(self._metrics[name], _moved(state, self._metrics[name].device))
        for entry in logs.entries:
            value = self._metrics[entry.value] if isinstance(entry.value, str) else entry.value
            self._module.log(entry.name, value, **entry.options)


def _ignore(*_: Any, **__: Any) -> None:
    """Replaces `log` in forwards that end before the step does."""


def _state_of(metric: Metric) -> MetricState:
    """Returns copies of a metric's states, of which updates change tensors, and the lists that they are in."""
    states = {
        name: value.clone() if isinstance(value, Tensor) else list(value) for name, value in metric.metric_state.items()
    }
    return MetricState(states, metric.update_count, last_of_metric(metric))


def _put(metric: Metric, state: MetricState) -> None:
    for attribute, value in state.states.items():
        setattr(metric, attribute, value)
    put_updates_of_metric(metric, state.updates)
    put_last_of_metric(metric, state.last)
    forget_value_of_metric(metric, None)


def _moved(state: MetricState, device: torch.device | str) -> MetricState:
    return MetricState(_on_device(state.states, device), state.updates, _on_device(state.last, device))


def _on_device(value: Any, device: torch.device | str) -> Any:
    return apply_to_collection(value, dtype=Tensor, function=lambda each: each.detach().to(device))
