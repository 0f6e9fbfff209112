"""The module's state dict as Lightning loads it: into pages during a run, and into the module before there are pages.

The dictionary is the one that a single device would have saved, fp32 weights by name, so checkpoints move freely
between angel_ptm, DDP and one device (as do optimizer states: optimizer_states.py). The module's own
`load_state_dict` handles buffers, hooks and the report of names; in place of parameters without storage it gets
meta tensors (`Placeholders`), which detect writes that would be lost. Every function with an engine argument is
collective.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_ptm.errors import ConfigError, UsageError, some
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.tensors.parts import Boxes, cut
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.torch_internals import (
    IncompatibleKeys,
    OpOverload,
    TorchDispatchMode,
    buffers_in,
    parameters_in,
    schema_of,
    storage_id,
    unsaved_buffers_in,
    version_of,
)


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
    with engine.gathered_parameters.substituted(None):
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
    missing_names = result.missing_keys if isinstance(result, IncompatibleKeys) else None
    missing = {
        id(named[name])
        for name in (named.keys() - state.keys() if missing_names is None else missing_names)
        if name in named
    }
    known = {of for _, of in given}
    for name, item in named.items():
        if id(item) in shapes and id(item) not in known and id(item) not in missing:
            raise ConfigError(
                f"{name} is not in the checkpoint under this name; a hook of the module provides it during loading, "
                "and values that hooks provide do not reach pages; rename the checkpoint's keys in on_load_checkpoint"
            )
    return missing_names


class Placeholders:
    """Context in which meta tensors replace the parameters in `shapes` in the module.

    Args:
        shapes: shapes of the meta tensors, by id of the parameter.
    """

    def __init__(self, module: torch.nn.Module, shapes: Mapping[int, tuple[int, ...]]) -> None:
        self._module = module
        self._shapes = shapes
        self._replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter, torch.nn.Parameter]] = []
        self._of: dict[int, torch.nn.Parameter] = {}
        self.changed: set[int] = set()
        """Ids of parameters that, inside of `watched`, got other values than those given."""

    def __enter__(self) -> None:
        for owner in self._module.modules():
            for name, parameter in parameters_in(owner).items():
                if id(parameter) in self._shapes:
                    assert parameter is not None
                    empty = torch.empty(self._shapes[id(parameter)], dtype=parameter.dtype, device="meta")
                    stand_in = torch.nn.Parameter(empty, requires_grad=False)
                    self._replaced.append((owner, name, parameter, stand_in))
                    self._of[id(stand_in)] = parameter
                    parameters_in(owner)[name] = stand_in

    def __exit__(self, *exception: object) -> None:
        for owner, name, parameter, _ in self._replaced:
            parameters_in(owner)[name] = parameter

    def stands_for(self, item: Any) -> Any:
        """Returns the parameter that a placeholder in the module's state dict replaces; other items unchanged."""
        return self._of.get(id(item), item)

    @contextmanager
    def watched(self, given: Sequence[tuple[Tensor, int]]) -> Iterator[None]:
        """Context in which `changed` records parameters that get other values than those given, (value, id of
        parameter).

        Must end before the placeholders are removed.
        """
        if not self._replaced:
            yield
            return
        owners = {_storage(stand_in): id(parameter) for _, _, parameter, stand_in in self._replaced}
        owners |= {_storage(value): of for value, of in given}
        with _Writes(owners, self.changed):
            yield
        for owner, name, parameter, _ in self._replaced:
            if owners.get(_storage(parameters_in(owner).get(name))) != id(parameter):  # replaced by another tensor
                self.changed.add(id(parameter))


class _Writes(TorchDispatchMode):
    """Mode that finds writes to placeholders, except copies of the value given for the same parameter.

    Args:
        owners: id of the parameter that a meta tensor stands for, by the tensor's storage.
        changed: set to which ids of written parameters are added.
    """

    supports_higher_order_operators = True  # they write to none of their arguments

    def __init__(self, owners: Mapping[int | None, int], changed: set[int]) -> None:
        super().__init__()
        self._owners = owners
        self._changed = changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            written = [args[0]] if self._owner(args[0]) != self._owner(args[1]) else []
        elif not isinstance(func, OpOverload):
            written = []
        else:
            values = [*args, *(kwargs.get(each.name) for each in schema_of(func).arguments[len(args) :])]
            marks = [each.alias_info is not None and each.alias_info.is_write for each in schema_of(func).arguments]
            chosen = [value for value, is_written in zip(values, marks, strict=False) if is_written]
            written = [each for value in chosen for each in (value if isinstance(value, (list, tuple)) else (value,))]
        self._changed.update(of for of in map(self._owner, written) if of is not None)
        return func(*args, **kwargs)

    def _owner(self, value: Any) -> int | None:
        return self._owners.get(_storage(value))


def _storage(value: Any) -> int | None:
    """Returns a key that views of one meta tensor share; None for other values."""
    is_meta = isinstance(value, Tensor) and value.is_meta and value.layout is torch.strided
    return storage_id(value.untyped_storage()) if is_meta else None


@dataclasses.dataclass(frozen=True, slots=True)
class DeferredState:
    """The part of a loaded state dict that is written when pages exist.

    Args:
        parameters: values for parameters without storage.
        buffers: (module, attribute, value) of buffers without storage.
        versions: autograd versions of these parameters when the state dict was loaded.
        precise: values that were rounded to the module's dtype: (parameter, or module and attribute of a buffer; value;
            dtype in the module).
        loaded: what was loaded, with the keys of `Given`: id of a parameter, or id of a module and attribute.
    """

    parameters: tuple[tuple[torch.nn.Parameter, Tensor], ...] = ()
    buffers: tuple[tuple[torch.nn.Module, str, Tensor], ...] = ()
    versions: tuple[tuple[torch.nn.Parameter, int], ...] = ()
    precise: tuple[tuple[torch.nn.Parameter | tuple[torch.nn.Module, str], Tensor, torch.dtype], ...] = ()
    loaded: frozenset[int | tuple[int, str]] = frozenset()

    def refuse_written(self, module: torch.nn.Module) -> None:
        """Checks that parameters without storage were not written to after the state dict was loaded.

        Raises:
            UsageError: some were.
        """
        written = {id(parameter) for parameter, version in self.versions if version_of(parameter) != version}
        names = [name for name, parameter in module.named_parameters() if id(parameter) in written]
        if names:
            raise UsageError(
                f"{some(names, 3)} {'was' if len(names) == 1 else 'were'} written to on the meta device, between the "
                "loading of a checkpoint and the start of the run, so the write would be lost; build the module with "
                "real weights, change checkpoint['state_dict'] in the LightningModule's on_load_checkpoint, or edit "
                "weights in on_fit_start, inside of `with self.trainer.strategy.gathered(self):`"
            )

    def with_precise_values(self, module: torch.nn.Module, boxes: Boxes = MappingProxyType({})) -> DeferredState:
        """Returns this state with the precise values of those rounded tensors that were not changed since. Called
        before pages take over.

        Args:
            boxes: slices of parameters that have been cut since.
        """
        parameters, buffers = list(self.parameters), list(self.buffers)
        known = {id(parameter) for parameter in module.parameters()}
        for place, value, dtype in self.precise:
            now = buffers_in(place[0]).get(place[1]) if isinstance(place, tuple) else place
            if now is None or now.is_meta:
                continue
            part = cut(value, boxes.get(id(place)))
            if not torch.equal(now, part.to(now.device, dtype).to(now.dtype)):
                continue
            if isinstance(place, tuple):
                buffers.append((*place, value))
            elif id(place) in known:
                parameters.append((place, value))
        return dataclasses.replace(self, parameters=tuple(parameters), buffers=tuple(buffers), precise=())

    @torch.no_grad()
    def fill(self, engine: Engine) -> None:
        """Writes the deferred values into pages and buffers.

        Raises:
            ConfigError: a shape differs.
        """
        if self.parameters:
            engine.drain("load a state dict")
            engine.executor.release_all()
            engine.values.load_parameters({id(parameter): value for parameter, value in self.parameters})
        for owner, name, value in self.buffers:
            buffer = buffers_in(owner).get(name)
            if buffer is not None:
                buffer.copy_(value)


def load_before_pages(
    module: LightningModule, state: Mapping[str, Any], boxes: Boxes = MappingProxyType({}), *, strict: bool
) -> DeferredState:
    """Loads a state dict as torch does into all tensors that have storage.

    Values of parameters on the meta device, and of guarded ones (parameter_guard.py), are deferred. Values that are
    rounded to the module's dtype are kept in full, so that no precision is lost.

    Args:
        boxes: slices of parameters that are parts of larger ones; the state dict has the larger ones.

    Raises: as `load_module_state`.
    """
    lacking = {
        id(each): boxes[id(each)].shape if id(each) in boxes else tuple(each.shape)
        for each in module.parameters()
        if each.is_meta or isinstance(each, GuardedParameter)
    }
    stand_ins = Placeholders(module, lacking)
    with stand_ins:
        named = {name: stand_ins.stands_for(item) for name, item in named_items(module).items()}
    state = copy(state)
    for name, item in named.items():
        box = boxes.get(id(item))
        if box is not None and id(item) not in lacking and name in state and tuple(state[name].shape) == box.shape:
            cast(dict[str, Any], state)[name] = cut(state[name], box)
    result = load_rest(module, state, named, lacking, strict=strict)
    parameters = {
        id(item): (item, state[name]) for name, item in named.items() if name in state and id(item) in lacking
    }
    missing = result if result is not None else named.keys() - state.keys()
    places = [
        (owner, name, f"{path}.{name}" if path else name, buffer)
        for path, owner in module.named_modules()
        for name, buffer in buffers_in(owner).items()
        if buffer is not None and name not in unsaved_buffers_in(owner)
    ]
    loaded: set[int | tuple[int, str]] = set()
    loaded |= {id(item) for name, item in named.items() if name not in missing} - lacking.keys()
    loaded |= {(id(owner), name) for owner, name, path, buffer in places if not buffer.is_meta and path not in missing}
    held = {id(item): (item, item, name) for name, item in named.items() if name not in missing}
    held |= {id(buffer): ((owner, name), buffer, path) for owner, name, path, buffer in places if path not in missing}
    precise = tuple(
        (place, state[name], item.dtype)
        for place, item, name in held.values()
        if name in state and _rounds(item, state[name])
    )
    return DeferredState(
        tuple(parameters.values()),
        tuple((owner, name, state[path]) for owner, name, path, buffer in places if buffer.is_meta and path in state),
        tuple((parameter, version_of(parameter)) for parameter in module.parameters() if id(parameter) in lacking),
        precise,
        frozenset(loaded),
    )


def _rounds(item: Any, value: Any) -> bool:
    """Returns whether a value lost precision when it was copied into a parameter or buffer with storage."""
    if (
        not isinstance(item, Tensor)
        or not isinstance(value, Tensor)
        or item.is_meta
        or isinstance(item, GuardedParameter)
    ):
        return False
    floats = item.is_floating_point() and value.is_floating_point() and item.shape == value.shape
    return floats and torch.promote_types(item.dtype, value.dtype) != item.dtype
