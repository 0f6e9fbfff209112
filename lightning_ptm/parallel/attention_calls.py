"""Interception of torch's `scaled_dot_product_attention` for a run, at its dispatcher: however a module calls it, also by a
name that was imported before, by nn.MultiheadAttention, or in a recomputation.

Knows the operator, not what replaces it. Autocast has done its casts before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.torch_internals import close_library, dispatch_key_of_device

_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default


class AttentionCalls:
    """Sends calls of the operator to a function from its construction until `close`.

    Args:
        device_type: of the tensors whose calls are intercepted.
        replaces: whether the next call goes to `attention`; else torch computes it.
        attention: takes the operator's arguments.
    """

    def __init__(self, device_type: str, replaces: Callable[[], bool], attention: Callable[..., Tensor]) -> None:
        self._replaces = replaces
        self._attention = attention
        self._recorded: list[list[Tensor]] | None = None
        """Queries, keys and values of each call while they are recorded, else None."""
        key = dispatch_key_of_device(device_type)
        self._library = torch.library.Library("aten", "IMPL")
        for each in (f"Autograd{key}", key):  # inference mode passes over the first one
            self._library.impl("scaled_dot_product_attention", self._kernel, each)

    def close(self) -> None:
        """Gives the operator back to torch. Idempotent."""
        close_library(self._library)

    @contextmanager
    def recording(self) -> Iterator[list[list[Tensor]]]:
        """Yields a list that gets the queries, keys and values of each call."""
        found = self._recorded = []
        try:
            yield found
        finally:
            self._recorded = None

    def _kernel(self, *args: Any, **kwargs: Any) -> Any:
        if self._recorded is not None:
            self._recorded.append([each.detach() for each in args[:3]])
        if self._replaces():
            return self._attention(*args, **kwargs)
        return _OPERATOR.decompose(*args, **kwargs)
