"""The module's weights as an ordinary state dict, as Lightning saves and loads it.

The dictionary is the one that a single device would have saved, fp32 weights by name, so checkpoints move freely
between angel_ptm, DDP and one device (as do optimizer states: optimizer_states.py). It is gathered unit by unit, and
only rank 0 keeps it whole (assembly_memory.py says in which memory). Every function with an engine argument is
collective.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Mapping
from copy import copy
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_ptm.checkpoints.assembly_memory import copies
from lightning_ptm.checkpoints.placeholders import Placeholders
from lightning_ptm.errors import ConfigError, UsageError, some
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.torch_internals import IncompatibleKeys


def module_state(engine: Engine, module: LightningModule, *, keep: bool) -> dict[str, Any]:
    """Returns the module's state dict with precise, full weights; empty unless `keep` (on ranks other than 0)."""
    engine.drain("state dict")
    engine.executor.release_all()
    values: dict[int, Tensor] = {}
    copy_of = copies(engine)
    for name, parameter, value in engine.values.parameters():
        if keep:
            values[id(parameter)] = copy_of(name, value)
    if not keep:
        return {}
    # The module's own state_dict knows all names (tied weights, buffers, extra state, overrides), its hooks may change
    # values, and it adds the modules' versions, which `load_state_dict` reads.
    with engine.lent_parameters.substituted(values):
        return module.state_dict()


def takes_keywords(module: torch.nn.Module) -> bool:
    """Returns whether the module's `state_dict` takes `keep_vars`. A user's override, as is common with
    `strict_loading=False`, may take no arguments."""
    try:
        inspect.signature(type(module).state_dict).bind(module, keep_vars=True)
    except TypeError:
        return False
    return True


def parameters_by_name(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the module's state dict with the parameters themselves in place of their values.

    Raises:
        UsageError: an override of `state_dict` takes no `keep_vars`.
    """
    if not takes_keywords(module):
        raise UsageError(
            f"{type(module).__name__}.state_dict takes no keywords, and sharded checkpoints call it with "
            "keep_vars=True; write `def state_dict(self, *args, **kwargs)` and pass them to super().state_dict, "
            "or save with checkpoints=Checkpoints(state_dict_type='full')"
        )
    return module.state_dict(keep_vars=True)


def load_module_state(engine: Engine, module: LightningModule, state: Mapping[str, Any], *, strict: bool) -> None:
    """Writes a state dict into pages and buffers.

    Raises:
        RuntimeError: names are missing or unexpected under `strict`; torch's own error.
        ConfigError: a shape differs.
        UsageError: the module's own code changes values of parameters during loading.
    """
    engine.drain("load a state dict")
    engine.executor.release_all()
    with engine.lent_parameters.substituted(None):
        named = named_items(module)
    parameters = engine.gathered_flats.shapes()
    by_id = {id(item): state[name] for name, item in named.items() if name in state and id(item) in parameters}
    engine.values.load_parameters(by_id)
    with engine.state_dicts.without_gathering():
        load_rest(module, state, named, parameters, strict=strict)


def named_items(module: LightningModule) -> dict[str, Any]:
    """Returns parameters and other items of the state dict by name: parameters under the names of their modules, other
    items under those that the module's `state_dict` gives them."""
    named: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    names_of = module.state_dict if takes_keywords(module) else partial(torch.nn.Module.state_dict, module)
    named |= {
        name: item
        for name, item in names_of(keep_vars=True).items()
        if name not in named or isinstance(item, torch.nn.Parameter)
    }
    return named


def load_rest(
    module: LightningModule,
    state: Mapping[str, Any],
    named: Mapping[str, Any],
    shapes: Mapping[int, tuple[int, ...]],
    *,
    strict: bool,
) -> Collection[str] | None:
    """Has the module load all items but the parameters in `shapes`, whose values are written in another way.

    Args:
        shapes: by id of parameter, the shape of its value in a state dict.

    Returns:
        Names that the state lacks; None where an override does not return them.
    """
    # torch's load_state_dict handles buffers, extra state, hooks and the report of names. In place of the parameters
    # it gets empty meta tensors of the right shapes, so that it copies nothing into released storage.
    rest = cast(dict[str, Any], copy(state))
    given: list[tuple[Tensor, int]] = []
    for name, value in state.items():
        if name in named and id(named[name]) in shapes:
            rest[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            given.append((rest[name], id(named[name])))
    stand_ins = Placeholders(module, shapes)
    with stand_ins, stand_ins.watched(given), warnings.catch_warnings():
        if given:
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        result = module.load_state_dict(rest, strict=strict)
    if stand_ins.changed:
        names = [name for name, item in named.items() if id(item) in stand_ins.changed]
        raise UsageError(
            f"{some(names, 3)} {'was' if len(names) == 1 else 'were'} changed by a hook or an override of "
            f"load_state_dict of the {type(module).__name__} while a checkpoint was loaded; the change would be lost, "
            "since parameters on the meta device or in pages have no storage of their own; change "
            "checkpoint['state_dict'] in the LightningModule's on_load_checkpoint instead"
        )
    # A user's override may return anything, None included.
    told = result.missing_keys if isinstance(result, IncompatibleKeys) else None
    missing = {id(named[name]) for name in (named.keys() - state.keys() if told is None else told) if name in named}
    known = {of for _, of in given}
    for name, item in named.items():
        if id(item) in shapes and id(item) not in known and id(item) not in missing:
            raise ConfigError(
                f"{name} is not in the checkpoint under this name, and a hook of the module provides it during "
                "loading, which does not reach pages; rename the checkpoint's keys in on_load_checkpoint"
            )
    return told
