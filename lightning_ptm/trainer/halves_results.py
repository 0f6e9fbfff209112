"""Logged values and results of a whole batch, made from those of its two halves.

I1: numbers are means weighted by samples, or what `reduce_fx` of `self.log` says; integers that a step returns are counts
    and are added. HalvesCheck compares them with those of a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ptm.errors import UsageError

SETTING = "TensorParallel(overlap='two_batches')"
WITHOUT = "use TensorParallel(overlap='none')"
_OVER_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, shares: (values * shares).sum(),
    "sum": lambda values, shares: values.sum(),
    "max": lambda values, shares: values.max(),
    "min": lambda values, shares: values.min(),
}
"""By `reduce_fx` of `self.log`, the value of a batch from those of its halves, and their shares of the samples."""

Logged = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""A call of `self.log`: name, value, and further arguments."""


def shares_of(sizes: tuple[int, int]) -> Tensor:
    """Returns the halves' shares of a batch's samples, in float64."""
    return torch.tensor(sizes, dtype=torch.float64) / sum(sizes)


def logged_of_batch(first: Sequence[Logged], second: Sequence[Logged], sizes: tuple[int, int]) -> list[Logged]:
    """Returns the calls of `self.log` of the whole batch, given those of its halves.

    Args:
        sizes: numbers of samples of the halves.

    Raises:
        UsageError: the halves log other names, or a metric whose value of each step would be that of a half.
    """
    names = [[name for name, *_ in each] for each in (first, second)]
    if names[0] != names[1]:
        raise UsageError(
            f"with {SETTING} one half of a batch has logged {names[0]} and the other one {names[1]}, so these have no "
            f"values of the whole batch; let training_step log the same names for each batch, or {WITHOUT}"
        )
    found: list[Logged] = []
    for (name, value, args, named), (_, other, _, others) in zip(first, second, strict=True):
        if isinstance(value, Metric):
            if named.get("on_step") is not False:
                raise UsageError(
                    f"with {SETTING} self.log({name!r}, a {type(value).__name__}) would log the second half's value of "
                    f"each step; call it with on_step=False and on_epoch=True, or with a tensor"
                )
            found.append((name, value, args, named))
            continue
        samples = {"batch_size": named["batch_size"] + others["batch_size"]} if named.get("batch_size") else {}
        how = named.get("reduce_fx", "mean")
        how = how if isinstance(how, str) else getattr(how, "__name__", "")
        found.append((name, _value_of_batch(value, other, how, sizes), args, {**named, **samples}))
    return found


def _value_of_batch(value: Any, other: Any, how: str, sizes: tuple[int, int]) -> Any:
    if isinstance(value, Mapping):
        return {name: _value_of_batch(each, other[name], how, sizes) for name, each in value.items()}
    values = torch.stack([torch.as_tensor(each).detach().double() for each in (value, other)])
    shares = shares_of(sizes).to(values.device)
    given = torch.as_tensor(value).dtype
    dtype = given if given.is_floating_point else torch.get_default_dtype()
    return _OVER_STEPS.get(how, _OVER_STEPS["mean"])(values, shares).to(dtype)


def result_of_batch(first: Any, second: Any, loss: Tensor, sizes: tuple[int, int]) -> Any:
    """Returns what a step returns for the whole batch, given what it has returned for the halves.

    Args:
        loss: of the whole batch.
        sizes: numbers of samples of the halves.

    Raises:
        UsageError: the halves return other names, or values of which none of a whole batch can be made.
    """
    if not isinstance(first, Mapping):
        return loss
    if first.keys() != second.keys():
        raise UsageError(
            f"with {SETTING} training_step returned {sorted(first)} for one half of a batch and {sorted(second)} for the "
            f"other; return the same keys for each batch, or {WITHOUT}"
        )
    return {name: loss if name == "loss" else _result(name, each, second[name], sizes) for name, each in first.items()}


def _result(name: str, one: Any, other: Any, sizes: tuple[int, int]) -> Tensor:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        raise UsageError(
            f"with {SETTING} training_step returned {name!r} of type {type(one).__name__}, and only tensors of two "
            f"halves make one of the batch; return a tensor, or {WITHOUT}"
        )
    if not one.dim():
        values = torch.stack([one, other])
        if not one.is_floating_point():
            return values.sum()
        return (values * shares_of(sizes).to(values)).sum()
    if one.shape[1:] == other.shape[1:]:
        return torch.cat([one, other])
    raise UsageError(
        f"with {SETTING} training_step returned {name!r} of shapes {tuple(one.shape)} and {tuple(other.shape)} for the "
        f"halves of a batch, which cannot be concatenated; return rows of one shape, or {WITHOUT}"
    )


def skipped(first: Any, second: Any) -> bool:
    """Whether a step skips the batch, by returning None.

    Raises:
        UsageError: it skips one half.
    """
    if (first is None) != (second is None):
        raise UsageError(
            f"with {SETTING} training_step returned None for one half of a batch and a loss for the other, so it would "
            f"skip half of a batch; return a loss for both (outputs.sum() * 0 where nothing is to be learnt), or {WITHOUT}"
        )
    return first is None


def loss_in(result: Any) -> Any:
    """Returns the loss in what a step returns."""
    return result["loss"] if isinstance(result, Mapping) else result
