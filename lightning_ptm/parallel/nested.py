"""Tensors in the arguments and results of a block, wherever they are in these."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Each, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def copied(value: Any, tracked: Collection[int]) -> Any:
    """The same arguments for another call: numbers in fp32, everything else a copy.

    Args:
        tracked: ids of tensors that become leaves with a gradient.
    """
    if isinstance(value, Tensor):
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        return value.detach().to(dtype, copy=True).requires_grad_(id(value) in tracked)
    if isinstance(value, dict):
        return {key: copied(each, tracked) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(copied(each, tracked) for each in value)
    if type(value).__name__.endswith("Cache"):
        return None  # keys and values of what was read before: nothing that a block needs
    return copy.deepcopy(value)


__all__ = ["copied", "tensors_in"]
