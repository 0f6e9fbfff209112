"""First values of a unit's parameters: those of somebody's files, those the user built, or freshly initialised ones for
the meta device.

Owns nothing; one unit at a time, so that a model on the meta device never exists whole. What files provide is read later,
straight into pages (`Values.take_over`); here it is only not initialised.

How a module on the meta device gets its values, first that exists: `init_weights(module)` or `_init_weights(module)` of
its nearest ancestor that has one (the LightningModule included), else the module's own `reset_parameters()`, or
`_reset_parameters()` as in torch's attention. Inner modules come first, as when they are constructed.

I1: only the unit's own meta parameters get values. What else a module holds (a weight that is tied to another unit's) has
its values elsewhere already, and is replaced by a stand-in while the module initialises itself.
I2: a module that files provide whole is not initialised: it takes no time and draws no random numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.units import Unit

Read = Callable[[], Tensor]
"""Yields a tensor of a mapped file; what is read of it is read from the file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """First values that files provide, of the right shapes; of which files, and for which names, is decided elsewhere.

    Attributes:
        parameters: by id of the parameter.
        buffers: by id of the module and attribute.
    """

    parameters: Mapping[int, Read] = dataclasses.field(default_factory=dict)
    buffers: Mapping[tuple[int, str], Read] = dataclasses.field(default_factory=dict)


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
        if hasattr(ancestor, "reset_lora_parameters"):
            # The base model's own rule, which is the next to be asked, would give random numbers to what must be zero.
            raise ConfigError(
                f"an adapter of peft's ({type(ancestor).__name__}) was built on the meta device, and only peft knows its "
                f"first values; when the model is built, give each such layer its own memory, layer.lora_A.to_empty("
                f"device='cpu') and the same for lora_B, and call layer.reset_lora_parameters('default', True)"
            )
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
def materialize(unit: Unit, lineages: dict[int, tuple[nn.Module, ...]], given: Collection[int] = ()) -> None:
    """Gives the unit's meta parameters real storage on the CPU and values; the others stay as they are.

    The parameters keep their identity, so optimizers go on naming them.

    Args:
        given: ids of parameters that get their values from elsewhere. Their storage is not written to, so it takes
            addresses and no memory, unless the module that holds them has to be initialised for others' sake.

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
    wanting = {id(module) for item in fresh if id(item.parameter) not in given for module, _ in item.places}
    for module in sorted(holders.values(), key=lambda module: -len(lineages[id(module)])):
        if id(module) in wanting or _meta_buffers(module):  # I2
            with _real_buffers(module), _stand_ins(module, ours):
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
def materialize_buffers(
    root: nn.Module,
    lineages: dict[int, tuple[nn.Module, ...]],
    given: Mapping[tuple[int, str], Read],
) -> None:
    """Gives buffers on the meta device their values, but for those of modules whose parameters are there, too. Of those
    that are given, memory alone: see `fill_buffers`."""
    for module in root.modules():
        for name in _meta_buffers(module):
            if (id(module), name) in given:
                module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")  # type: ignore[arg-type]
    for module in root.modules():
        on_meta = any(parameter.is_meta for parameter in module._parameters.values() if parameter is not None)
        if _meta_buffers(module) and not on_meta:
            initialise = _initialiser(module, lineages[id(module)])
            with _real_buffers(module):
                initialise()


@torch.no_grad()
def fill_buffers(root: nn.Module, given: Mapping[tuple[int, str], Read]) -> None:
    """Gives buffers the values that files have for them; after all initialisation, which may write to them."""
    for module in root.modules():
        for name, buffer in module._buffers.items():
            read = given.get((id(module), name))
            if read is not None and buffer is not None:
                buffer.copy_(read())


def _meta_buffers(module: nn.Module) -> list[str]:
    return [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]


@contextmanager
def _real_buffers(module: nn.Module) -> Iterator[None]:
    """Buffers on the meta device get memory; what is done inside must give them values."""
    fresh = _meta_buffers(module)
    for name in fresh:
        real = torch.empty_like(module._buffers[name], device="cpu")  # type: ignore[arg-type]
        module._buffers[name] = real.fill_(float("nan")) if real.is_floating_point() else real.zero_()
    yield
    for name in fresh:
        buffer = module._buffers[name]
        if buffer is not None and buffer.is_floating_point() and buffer.numel() and bool(buffer.isnan().all()):
            raise ConfigError(
                f"buffer {name} of a {type(module).__name__} was built on the meta device and nothing gave it values when "
                f"the module was initialised; set it in init_weights(module) or reset_parameters(), or build it on the CPU"
            )
