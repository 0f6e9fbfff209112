"""Weights as an ordinary dictionary: what Lightning saves and loads.

The same bytes as a single device would have saved: fp32 weights by name, so a checkpoint moves freely between angel_ptm,
DDP and one device (as do optimizer states: optimizer_states.py). Built unit by unit; the dictionary itself is whole, on rank
0 only (assembly_memory.py says where). Every function that is given an engine is collective.
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
    """The module's state dict with precise, full weights; empty where not `keep` (other ranks than 0)."""
    engine.drain("state dict")
    engine.executor.release_all()
    values: dict[int, Tensor] = {}
    copy_of = copies(engine)
    for name, parameter, value in engine.values.parameters():
        if keep:
            values[id(parameter)] = copy_of(name, value)
    if not keep:
        return {}
    # The module's own state_dict names everything (tied weights, buffers, extra state, users' overrides), and its hooks may
    # change values. It also carries the modules' versions, which `load_state_dict` asks for.
    with engine.lent_parameters.lent(values):
        return module.state_dict()


def takes_keywords(module: torch.nn.Module) -> bool:
    """Whether the module's `state_dict` can be asked for the parameters themselves; an override of the user's, as there are
    with `strict_loading=False`, may take no arguments."""
    try:
        inspect.signature(type(module).state_dict).bind(module, keep_vars=True)
    except TypeError:
        return False
    return True


def parameters_by_name(module: torch.nn.Module) -> dict[str, Any]:
    """The module's state dict with the parameters themselves.

    Raises:
        UsageError: it cannot be asked for them.
    """
    if not takes_keywords(module):
        raise UsageError(
            f"{type(module).__name__}.state_dict takes no keywords, and sharded checkpoints ask it for the parameters "
            f"themselves; write `def state_dict(self, *args, **kwargs)` and hand them on to super().state_dict, or save with "
            f"state_dict_type='full'"
        )
    return module.state_dict(keep_vars=True)


def load_module_state(engine: Engine, module: LightningModule, state: Mapping[str, Any], *, strict: bool) -> None:
    """Writes a state dict into pages and buffers.

    Raises:
        RuntimeError: names are missing or unexpected under `strict`, in torch's own words.
        ConfigError: a shape differs.
        UsageError: the module's own code changes values of parameters while they are loaded.
    """
    engine.drain("load a state dict")
    engine.executor.release_all()
    with engine.lent_parameters.lent(None):
        named = named_items(module)
    parameters = engine.gathered_flats.shapes()
    by_id = {id(item): state[name] for name, item in named.items() if name in state and id(item) in parameters}
    engine.values.load_parameters(by_id)
    with engine.state_dicts.as_they_are():
        load_rest(module, state, named, parameters, strict=strict)


def named_items(module: LightningModule) -> dict[str, Any]:
    """Parameters, and what else there is, by name: as a part of the module names its parameters itself, and otherwise as it
    would say, but for hooks that change values."""
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
    elsewhere: Mapping[int, tuple[int, ...]],
    *,
    strict: bool,
) -> Collection[str] | None:
    """Has the module load all but the parameters in `elsewhere`, by id, whose values get where they are on another way.

    Args:
        elsewhere: with the shapes that a state dict has for them.

    Returns:
        Names that the state lacks; None where an override does not say.
    """
    # Buffers, extra state, hooks and the report of names are torch's: it is given the parameters that it expects,
    # as empty meta tensors of the right shape, so that it copies nothing into released storage.
    rest = cast(dict[str, Any], copy(state))
    given: list[tuple[Tensor, int]] = []
    for name, value in state.items():
        if name in named and id(named[name]) in elsewhere:
            rest[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            given.append((rest[name], id(named[name])))
    stand_ins = Placeholders(module, elsewhere)
    with stand_ins, stand_ins.watched(given), warnings.catch_warnings():
        if given:
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        result = module.load_state_dict(rest, strict=strict)
    if stand_ins.changed:
        names = [name for name, item in named.items() if id(item) in stand_ins.changed]
        raise UsageError(
            f"{some(names, 3)}: changed by a hook or an override of load_state_dict of the {type(module).__name__} while a "
            f"checkpoint is loaded; these parameters have no storage of their own then, since they are on the meta device or "
            f"in pages, so the change would be lost; change checkpoint['state_dict'] in the LightningModule's "
            f"on_load_checkpoint instead"
        )
    # An override of the user's may return anything, such as nothing.
    told = result.missing_keys if isinstance(result, IncompatibleKeys) else None
    missing = {id(named[name]) for name in (named.keys() - state.keys() if told is None else told) if name in named}
    known = {of for _, of in given}
    for name, item in named.items():
        if id(item) in elsewhere and id(item) not in known and id(item) not in missing:
            raise ConfigError(
                f"{name} is not in the checkpoint under this name and a hook of the module provides it while loading; pages "
                f"cannot follow such hooks: rename the checkpoint's keys in on_load_checkpoint"
            )
    return told
