"""Micro-batches of a pipeline: equal parts of a batch, and one log entry for what a step logs of all of them.

Knows nested data and Lightning's `log`, not stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_ptm.errors import UsageError

Told = list[tuple[str, float, dict[str, Any]]]
"""Log entries: name, value and options."""

_LOG = "log"
_SUMS: Mapping[Any, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    torch.mean: torch.mean,
    "sum": torch.sum,
    torch.sum: torch.sum,
    "max": torch.max,
    torch.max: torch.max,
    "min": torch.min,
    torch.min: torch.min,
}


def micro_batches(batch: Any, count: int) -> list[Any]:
    """Returns equal parts of a batch: of each tensor with as many elements along dimension 0 as the first one.

    Raises:
        UsageError: there are no such tensors, or the samples cannot be divided equally.
    """
    found: list[Tensor] = []
    apply_to_collection(batch, dtype=Tensor, function=found.append)
    samples = next((each.shape[0] for each in found if each.dim()), 0)
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


class MicroLogs:
    """What one step logs, of all its micro-batches."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._logged: dict[str, tuple[list[Tensor], dict[str, Any]]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which `self.log` of the module logs nothing, and is recorded."""
        vars(self._module)[_LOG] = self._record
        try:
            yield
        finally:
            del vars(self._module)[_LOG]

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if args:
            raise UsageError(
                f"self.log({name!r}, ...) got options by their places, which pipeline stages do not send to each other; give "
                f"them by name"
            )
        if not isinstance(value, (Tensor, int, float)) or torch.as_tensor(value).numel() != 1:
            raise UsageError(
                f"self.log({name!r}, ...) of a {type(value).__name__} in training_step: with pipeline_parallel_size a step "
                f"logs numbers, which are put together from its micro-batches; give it a number"
            )
        if options.get("reduce_fx", "mean") not in _SUMS:
            raise UsageError(
                f"self.log({name!r}, reduce_fx=...) with pipeline_parallel_size: numbers of micro-batches are put together "
                f"by 'mean', 'sum', 'max' or 'min'; use one of them"
            )
        self._logged.setdefault(name, ([], options))[0].append(torch.as_tensor(value).detach().reshape(()))

    def told(self, micro_batches: int) -> Told:
        """Returns one entry for each name, of all micro-batches.

        Raises:
            UsageError: only some of them have logged it.
        """
        entries: Told = []
        for name, (values, options) in self._logged.items():
            if len(values) != micro_batches:
                raise UsageError(
                    f"self.log({name!r}) was called {len(values)} times for {micro_batches} micro-batches; call it "
                    f"once for each name in each training_step"
                )
            if options.get("batch_size") is not None:
                options = {**options, "batch_size": options["batch_size"] * micro_batches}
            put_together = _SUMS[options.get("reduce_fx", "mean")]
            entries.append((name, float(put_together(torch.stack(values).double())), options))
        return entries

    def log(self, entries: Told) -> None:
        """Logs entries, of this rank or another one."""
        for name, value, options in entries:
            self._module.log(name, value, **options)
