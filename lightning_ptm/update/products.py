"""Matrix products, counted while they are computed: what an update takes that is more than a pass over bytes (Muon, SOAP).

By torch's formulas, so decompositions that have none (`linalg.qr`, `linalg.eigh`) count for nothing. On the meta device as
anywhere: nothing is computed there, and all of it is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class CountedProducts(TorchDispatchMode):
    """While it is entered, operations of products by the dtype that they are computed in.

    Attributes:
        flops: so far; a multiplication and an addition are two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        # Torch has formulas for `addmm`, and none for `addmm_`.
        formula = flop_registry.get(packet) or flop_registry.get(
            getattr(torch.ops.aten, packet.__name__.rstrip("_"), None)
        )
        if formula is not None:
            dtype = next(leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.flops[dtype] += int(formula(*args, **(kwargs or {}), out_val=out))
        return out
