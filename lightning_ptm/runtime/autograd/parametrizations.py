"""Support for torch parametrizations that are registered and removed within a forward.

PEFT does so for LoRA on packed experts (`target_parameters`). Owns nothing. Registering a parametrization sets the
parameter's data to itself (`parameter.set_(parameter)`), which changes nothing but which torch counts as a write.
Writes to parameters in pages are refused, since they would be lost (binding.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.utils import parametrize

from lightning_ptm.torch_internals import PUT_ON


@contextmanager
def parametrizing_is_no_write() -> Iterator[None]:
    """Inside, a parametrization that leaves its parameter's data alone does not count as a write to it."""
    original: Any = getattr(parametrize, PUT_ON)

    def set_data(target: Tensor, source: Tensor) -> None:
        if target is not source:
            original(target, source)

    setattr(parametrize, PUT_ON, set_data)
    try:
        yield
    finally:
        setattr(parametrize, PUT_ON, original)
