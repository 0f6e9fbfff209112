"""First values of a unit's parameters: those the user built, or freshly initialised ones for the meta device.

Owns nothing; one unit at a time, so that a model on the meta device never exists whole.

How a module on the meta device gets its values, first that exists: `init_weights(module)` or `_init_weights(module)` of
its nearest ancestor that has one (the LightningModule included), else the module's own `reset_parameters()`, or
`_reset_parameters()` as in torch's attention. Inner modules come first, as when they are constructed.

I1: only the unit's own meta parameters get values. What else a module holds (a weight that is tied to another unit's) has
its values elsewhere already, and is replaced by a stand-in while the module initialises itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.units import Unit


def ancestors(root: nn.Module) -> dict[int, tuple[nn.Module, ...]]:
    """By id of a module: itself and its ancestors, nearest first."""
    found: dict[int, tuple[nn.Module, ...]] = {}

    def walk(module: nn.Module, above: tuple[nn.Module, ...]) -> None:
        if id(module) not in found:
            found[id(module)] = (module, *above)
            for child in module.children():
                walk(child, found[id(module)])

    walk(root, ())
    return found


def _initialiser(module: nn.Module, lineage: tuple[nn.Module, ...]) -> Callable[[], object]:
    for ancestor in lineage:
        for name in ("init_weights", "_init_weights"):
            method = getattr(ancestor, name, None)
            if callable(method) and _takes_a_module(method):
                return partial(method, module)
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            return partial(reset)
    raise ConfigError(
        f"a {type(module).__name__} was built on the meta device and nothing says how to initialise it; give it a "
        f"reset_parameters() method, or give the LightningModule an init_weights(module) method, or build it on the CPU"
    )


def _takes_a_module(method: Callable[..., object]) -> bool:
    required = [
        parameter
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 1


@torch.no_grad()
def materialize(unit: Unit, lineages: dict[int, tuple[nn.Module, ...]]) -> None:
    """Gives the unit's meta parameters real storage on the CPU and values; the others stay as they are.

    The parameters keep their identity, so optimizers go on naming them.

    Raises:
        ConfigError: nothing says how to initialise a module.
    """
    fresh = [item for item in unit.parameters if item.parameter.is_meta]
    holders = {id(module): module for item in fresh for module, _ in item.places}
    for module in holders.values():
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []  # weak references to the meta tensors; made again below
    for item in fresh:
        old = item.parameter
        real = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device="cpu"), requires_grad=old.requires_grad)
        try:
            torch.utils.swap_tensors(old, real)
        except RuntimeError as error:
            raise ConfigError(
                f"parameter {item.name} is on the meta device and something holds a weak reference to it, so it cannot "
                f"be given storage in place ({error}); build it on the CPU"
            ) from error
    ours = {id(item.parameter) for item in fresh}
    for module in sorted(holders.values(), key=lambda module: -len(lineages[id(module)])):
        _real_buffers(module)
        with _stand_ins(module, ours):
            _initialiser(module, lineages[id(module)])()
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


@contextmanager
def _stand_ins(module: nn.Module, ours: set[int]) -> Iterator[None]:
    others = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) not in ours
    }
    for name, parameter in others.items():
        module._parameters[name] = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=False
        )
    try:
        yield
    finally:
        module._parameters.update(others)


@torch.no_grad()
def materialize_buffers(root: nn.Module, lineages: dict[int, tuple[nn.Module, ...]]) -> None:
    """Gives buffers on the meta device, of modules without parameters there, their values."""
    for module in root.modules():
        on_meta = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if on_meta and not any(parameter.is_meta for parameter in module._parameters.values() if parameter is not None):
            initialise = _initialiser(module, lineages[id(module)])
            _real_buffers(module)
            initialise()


def _real_buffers(module: nn.Module) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
