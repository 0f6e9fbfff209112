"""Batches for a plan: on the meta device, of a sample or of shapes (`8x2048:int64`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.errors import ConfigError
from lightning_ptm.torch_internals import tree_map

_FORM = (
    "give a shape such as '8x2048:int64', or several with commas between them, with NAME= before each for a dictionary"
)


def meta_batch(batch: Any, dtype: str | torch.dtype | None = None) -> Any:
    """Returns a batch on the meta device.

    Args:
        batch: tensors, nested in tuples, lists and dictionaries; in place of a tensor, its shape as a tuple or list of
            numbers, or as a text. A text may have several, which are the parts of a tuple, or of a dictionary if they have
            names.
        dtype: of shapes that do not name theirs; None: float32.

    Raises:
        ConfigError: a part is neither.
    """
    default = _dtype(dtype) if dtype is not None else torch.float32
    made = _made(batch, default)
    leaves: list[Tensor] = []
    tree_map(lambda leaf: leaves.append(leaf) if isinstance(leaf, Tensor) else None, made)
    if not leaves:
        raise ConfigError(f"batch is {batch!r}, which has no tensor; {_FORM}")
    return made


def _made(batch: Any, default: torch.dtype) -> Any:
    if isinstance(batch, Tensor):
        return torch.empty_strided(batch.size(), batch.stride(), dtype=batch.dtype, device="meta")
    if isinstance(batch, str):
        return _parsed(batch, default)
    if isinstance(batch, (tuple, list)) and batch and all(type(size) is int for size in batch):
        return _of_shape(batch, default, repr(batch))
    if isinstance(batch, Mapping):
        return {name: _made(part, default) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_made(part, default) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return tree_map(lambda leaf: _made(leaf, default) if isinstance(leaf, Tensor) else leaf, batch)


def _parsed(text: str, default: torch.dtype) -> Any:
    parts, named = list[Tensor](), dict[str, Tensor]()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?\s*", part)
        if match is None:
            raise ConfigError(f"batch is {text!r}, and {part!r} is no shape; {_FORM}")
        name, sizes, dtype = match.groups()
        made = _of_shape([int(size) for size in sizes.split("x")], default if dtype is None else _dtype(dtype), text)
        if name is None:
            parts.append(made)
        else:
            named[name] = made
    if named and parts:
        raise ConfigError(f"batch is {text!r}, where some parts have names and some have none; {_FORM}")
    return named or (parts[0] if len(parts) == 1 else tuple(parts))


def _of_shape(sizes: tuple[int, ...] | list[int], dtype: torch.dtype, given: str) -> Tensor:
    if min(sizes) < 1:
        raise ConfigError(f"batch is {given}, and a batch has at least one element along each dimension; {_FORM}")
    return torch.empty(*sizes, dtype=dtype, device="meta")


def _dtype(given: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype is {given!r}; give a name of torch's, such as 'int64', 'float32' or 'bool'")
    return found
