"""Parameters of a module: which it has since set-up, and whether two share memory, which pages do not support.

Knows objects and addresses, reads no values. A parameter object that several modules refer to (tied weights) is one
parameter.

I1: `KnownParameters` is used before each batch, and therefore reads no tensor.
I2: names do not matter: pruning renames a parameter, which keeps its place in pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.torch_internals import parameters_in


class KnownParameters:
    """Parameters of `module` and its submodules at the time of construction.

    Args:
        optimizers: optimizers whose parameters that are not in the module become `outside_module`.

    Attributes:
        outside_module: parameters in the optimizers' groups that no module has.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        self._module = module
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._held = _places(module)  # keeps the objects alive, so that their ids are not reused
        known = {id(parameter) for _, parameter in self._held.values()}
        in_groups = chain.from_iterable(group["params"] for each in optimizers for group in each.param_groups)
        self.outside_module: list[Tensor] = [parameter for parameter in in_groups if id(parameter) not in known]

    def new(self) -> list[str]:
        """Returns the names of parameters that no module had at set-up."""
        return [name for name, parameter in self._module.named_parameters() if id(parameter) not in self._names]

    def gone(self) -> list[str]:
        """Returns the former names of parameters that no module has any more."""
        left = {id(parameter) for parameter in self._module.parameters()}
        return [name for known, name in self._names.items() if known not in left]

    def changed(self) -> bool:
        """Whether a parameter, or a module with parameters, was added, removed or exchanged since set-up."""
        return _places(self._module).keys() != self._held.keys()


def _places(module: nn.Module) -> dict[tuple[int, int], tuple[nn.Module, nn.Parameter]]:
    """Returns (module, parameter), by their ids, for each parameter of each module; tied parameters once per module."""
    found = {}
    for each in module.modules():
        for parameter in parameters_in(each).values():
            if parameter is not None:
                found[id(each), id(parameter)] = each, parameter
    return found


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
