"""The user's own module for `plan`: a LightningModule on the meta device, from an instance or from the name of its class.

Owns what is assumed where a module has no training step or no optimizer.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_ptm.commands.meta_twin import meta_twin
from lightning_ptm.commands.mistakes import nearest
from lightning_ptm.errors import AngelPTMError, ConfigError
from lightning_ptm.torch_internals import tree_leaves
from lightning_ptm.trainer.other_front_ends import check_planned

NO_OPTIMIZER = "optimizer: assumed Adam, as the module has no configure_optimizers"
NO_LOSS = "loss: assumed to be `.loss` of the output or else the sum of it, as the module has no training_step"


class _Trained(LightningModule):
    """Trains a plain module, called with the parts of the batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, Mapping):
            return _loss_of(self.module(**batch))
        return _loss_of(self.module(*batch) if isinstance(batch, (tuple, list)) else self.module(batch))


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    sums = [leaf.float().sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not sums:
        raise ValueError("its output has no tensor with a gradient")
    return torch.stack(sums).sum()


def trained(module: nn.Module) -> tuple[LightningModule, list[str]]:
    """Returns a LightningModule on the meta device for a module, which stays as it is, and what was assumed.

    Raises:
        ConfigError: it is of the other package of Lightning; see also `meta_twin`.
    """
    check_planned(module, LightningModule)
    twin, assumed = meta_twin(module), list[str]()
    optimizers = getattr(twin, "configure_optimizers", None)
    if isinstance(twin, LightningModule) and is_overridden("training_step", twin):
        model = twin
        optimizers = optimizers if is_overridden("configure_optimizers", twin) else None
    else:
        kind = type(type(module).__name__, (_Trained,), {})  # its name is in messages
        model = kind(twin)
        assumed.append(NO_LOSS)
        if isinstance(twin, LightningModule) and not is_overridden("configure_optimizers", twin):
            optimizers = None
    if not callable(optimizers):
        assumed.append(NO_OPTIMIZER)

    def configure() -> Any:
        return optimizers() if callable(optimizers) else torch.optim.Adam(_trainable(model))

    vars(model)["configure_optimizers"] = configure
    with torch.device("meta"):
        model.configure_model()
    return model, assumed


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def with_adapters(model: nn.Module, rank: int) -> bool:
    """Freezes a model on the meta device and gives each linear layer an adapter of this rank (LoRA); returns whether it has
    such a layer."""
    model.requires_grad_(False)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.register_parameter("lora_down", nn.Parameter(torch.empty(rank, linear.in_features, device="meta")))
        linear.register_parameter("lora_up", nn.Parameter(torch.empty(linear.out_features, rank, device="meta")))
        linear.register_forward_hook(_add_adapter)
    return bool(linears)


def _add_adapter(linear: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + args[0] @ linear.lora_down.T @ linear.lora_up.T


def named(target: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Returns the module that a text such as `my_package.my_module:MyModel` names: an instance, or what a class or function
    of that name returns on the meta device.

    Args:
        target: `module:name`, or `file.py:name` of a file below the current folder.
        arguments: for the class or function.

    Raises:
        ConfigError: there is none; the text says where was looked.
    """
    module_name, _, name = target.rpartition(":")
    if module_name.endswith(".py"):
        module_name = os.path.normpath(module_name.removesuffix(".py")).replace(os.sep, ".")
    found: Any = _imported(module_name, target)
    for part in name.split("."):
        if not hasattr(found, part):
            where = getattr(found, "__file__", None) or getattr(found, "__name__", module_name)
            raise ConfigError(f"{target}: {where} has no {part!r}{nearest(part, _classes_in(found))}")
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        if arguments:
            raise ConfigError(
                f"{target} is an object that exists already, so it takes no init ({', '.join(arguments)})"
            )
        return found
    if not callable(found):
        raise ConfigError(
            f"{target} is {type(found).__name__}; name a class, a function that returns a module, or a module"
        )
    return _built(found, target, arguments)


def _imported(name: str, target: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        absent = error.name or name
        if not f"{name}.".startswith(f"{absent}."):
            raise ConfigError(
                f"{target}: importing {name} needs the module {absent!r}, which is not installed"
            ) from error
        looked = ", ".join(repr(folder or os.getcwd()) for folder in sys.path if os.path.isdir(folder or "."))
        raise ConfigError(
            f"{target}: there is no module {absent!r}; looked in {looked}; go to the folder that has it, or install it"
        ) from error
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"{target}: importing {name} failed ({type(error).__name__}: {error})") from error


def _classes_in(found: Any) -> list[str]:
    return [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]


def _built(make: Any, target: str, arguments: Mapping[str, Any]) -> nn.Module:
    try:
        with torch.device("meta"):
            made = make(**arguments)
    except AngelPTMError:
        raise
    except Exception as error:  # a user's model may raise anything
        raise ConfigError(
            f"{target}{_signature(make)} cannot be built on the meta device with "
            f"{', '.join(f'{name}={value!r}' for name, value in arguments.items()) or 'no arguments'} "
            f"({type(error).__name__}: {error}); give its arguments as --init.NAME=VALUE, or name a function without any"
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{target} returns {type(made).__name__}; a torch.nn.Module is needed")
    return made


def _signature(make: Any) -> str:
    try:
        return str(inspect.signature(make))
    except (TypeError, ValueError):
        return ""
