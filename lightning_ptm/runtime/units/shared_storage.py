"""Detection of parameters that share memory with another parameter or a buffer, which pages do not support.

Knows addresses of tensors, never pages. A parameter object that several modules refer to (tied weights) is one parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_ptm.runtime.units.parameter_guard import GuardedParameter


def overlap(module: nn.Module, changing: Iterable[Tensor]) -> tuple[str, str] | None:
    """Returns the names of two of a module's tensors that share memory and at least one of which is in `changing`; None if
    there are none."""
    known = {id(each) for each in changing}
    ends: dict[object, tuple[int, str, bool]] = {}
    for device, start, end, name, changes in sorted(_stretches(module, known), key=lambda each: each[1]):
        before = ends.get(device)
        if before is not None and start < before[0] and (changes or before[2]):
            return before[1], name
        if before is None or end > before[0]:
            ends[device] = end, name, changes
    return None


def _stretches(module: nn.Module, changing: set[int]) -> Iterator[tuple[object, int, int, str, bool]]:
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        if each.is_meta or isinstance(each, GuardedParameter) or not each.numel() or each.layout is not torch.strided:
            continue
        last = sum((size - 1) * step for size, step in zip(each.shape, each.stride(), strict=True))
        start = each.data_ptr()
        yield each.device, start, start + (last + 1) * each.element_size(), name, id(each) in changing
