"""Which parameters runs of this process have trained: their values may be nowhere else, so they are never let go of.

Owns that one fact, by module and attribute, for as long as the module lives: what trains in one run may be frozen in the
next, of another Trainer. By module, since a parameter that somebody refers to weakly cannot change places with another one
(`torch.utils.swap_tensors`).
"""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

from torch import nn

from lightning_ptm.torch_internals import parameters_in

_LEARNT: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def note(root: nn.Module, trained: Collection[int]) -> None:
    """Optimizers update these parameters of a module from now on. Args: trained: by id."""
    for module in root.modules():
        names = {name for name, each in parameters_in(module).items() if id(each) in trained}
        if names:
            _LEARNT.setdefault(module, set()).update(names)


def learnt_in(root: nn.Module) -> frozenset[int]:
    """Ids of those parameters of a module that a run has trained."""
    # A scripted module has a dictionary of its own, which does not know `get`.
    return frozenset(
        id(parameters_in(module)[name])
        for module in root.modules()
        for name in _LEARNT.get(module, ())
        if name in parameters_in(module)
    )
