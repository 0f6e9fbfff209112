"""First values of a unit's parameters: those the user built, or freshly initialised ones for the meta device.

Owns nothing; one unit at a time, so that a model on the meta device never exists whole.

How a module on the meta device gets its values, first that exists: `init_weights(module)` or `_init_weights(module)` of
its nearest ancestor that has one (the LightningModule included), else the module's own `reset_parameters()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

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
                return lambda method=method: method(module)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        return reset  # type: ignore[no-any-return]
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
    modules: dict[int, nn.Module] = {}
    for item in unit.parameters:
        if not item.parameter.is_meta:
            continue
        old = item.parameter
        real = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device="cpu"), requires_grad=old.requires_grad)
        try:
            torch.utils.swap_tensors(old, real)
        except RuntimeError as error:
            raise ConfigError(
                f"parameter {item.name} is on the meta device and something holds a weak reference to it, so it cannot "
                f"be given storage in place ({error}); build it on the CPU"
            ) from error
        for module, _ in item.places:
            modules[id(module)] = module
    for module in modules.values():
        _real_buffers(module)
        _initialiser(module, lineages[id(module)])()


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
