"""Loading a state dict before a run has pages: at once into tensors that have storage, into the others when pages
exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_ptm.checkpoints.module_states import load_rest, named_items
from lightning_ptm.checkpoints.placeholders import Placeholders
from lightning_ptm.errors import UsageError, some
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.tensors.parts import Boxes, cut
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.torch_internals import buffers_in, unsaved_buffers_in, version_of


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
    """Loads a state dict as torch does into all tensors that have storage. Values for tensors on the meta device or
    behind a parameter guard are deferred. Values that are rounded to the module's dtype are kept in full, so that no
    precision is lost.

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
