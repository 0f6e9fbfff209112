"""Which parameters runs of this process have trained: such values may exist nowhere else, so a run never drops them.

Owns that fact alone, by module and attribute name, for as long as the module lives: a parameter that one run has
trained may be frozen in the next run, of another Trainer. It is kept by module, because a weak reference to a parameter
would keep it from being exchanged (`torch.utils.swap_tensors`).
"""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

from torch import nn

from lightning_ptm.torch_internals import parameters_in

_TRAINED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def note(root: nn.Module, trained: Collection[int]) -> None:
    """Records that optimizers update these parameters of a module. Args: trained: ids of parameters."""
    for module in root.modules():
        names = {name for name, each in parameters_in(module).items() if id(each) in trained}
        if names:
            _TRAINED.setdefault(module, set()).update(names)


def trained_in(root: nn.Module) -> frozenset[int]:
    """Returns the ids of those parameters of a module that a run has trained."""
    # The `_parameters` of a scripted module is a class without `get`.
    return frozenset(
        id(parameters_in(module)[name])
        for module in root.modules()
        for name in _TRAINED.get(module, ())
        if name in parameters_in(module)
    )
