"""Which parameters the modules of a model had when its pages were laid out, and whether they have others now.

Knows objects, never values. I1: it is asked before each batch, so it looks at no tensor. I2: names do not count: pruning
gives a parameter another one and it stays where it was, in pages, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ptm.torch_internals import parameters_in


class KnownParameters:
    """Those of `module` and all modules inside, from now on.

    Args:
        optimizers: what they have of others is in `strangers`.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        self._module = module
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._held = list(_places(module))  # so that none of the ids is somebody else's later
        self._known = _ids(self._held)
        known = {id(parameter) for _, parameter in self._held}
        in_groups = chain.from_iterable(group["params"] for each in optimizers for group in each.param_groups)
        self.strangers: list[Tensor] = [parameter for parameter in in_groups if id(parameter) not in known]

    def new(self) -> list[str]:
        """Names of parameters that no module had then."""
        return [name for name, parameter in self._module.named_parameters() if id(parameter) not in self._names]

    def gone(self) -> list[str]:
        """Names, of then, of parameters that no module has any more."""
        left = {id(parameter) for parameter in self._module.parameters()}
        return [name for known, name in self._names.items() if known not in left]

    def changed(self) -> bool:
        """Whether a module has got, lost or changed a parameter since, or the model a module with parameters."""
        return _ids(_places(self._module)) != self._known


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """(module, parameter) of each parameter of each module; tied ones with each of their modules."""
    for each in module.modules():
        for parameter in parameters_in(each).values():
            if parameter is not None:
                yield each, parameter


def _ids(places: Iterable[tuple[nn.Module, nn.Parameter]]) -> set[tuple[int, int]]:
    return {(id(module), id(parameter)) for module, parameter in places}
