"""Bytes that torch copies while somebody else's code runs: for bars of work that is not ours to cut into pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptm.progress import Seen


class CopiesSeen(TorchDispatchMode):
    """Inside, `seen` is told of each `copy_` how many bytes it has written."""

    supports_higher_order_operators = True  # they are torch's own inside: what these copy is not seen

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._seen(args[0].nbytes)
        return result
