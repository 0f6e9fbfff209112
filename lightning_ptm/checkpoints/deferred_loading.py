"""A state dict that is loaded before there are pages: into what has storage at once, into the rest when a run begins."""

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
from lightning_ptm.runtime.units.guarded_parameter import GuardedParameter
from lightning_ptm.torch_internals import buffers_in, unsaved_buffers_in, version_of


@dataclasses.dataclass(frozen=True, slots=True)
class DeferredState:
    """What became of a state dict that was loaded before there are pages.

    Args:
        parameters: values for parameters without storage, which pages will have.
        buffers: the same of buffers: module, attribute, value.
        versions: of these parameters, when the state dict was loaded.
        precise: what the module had to round: parameter, or module and attribute of a buffer, value, and dtype there.
        here: what has been loaded, as `Given` files it: by id of the parameter, or of the module and attribute.
    """

    parameters: tuple[tuple[torch.nn.Parameter, Tensor], ...] = ()
    buffers: tuple[tuple[torch.nn.Module, str, Tensor], ...] = ()
    versions: tuple[tuple[torch.nn.Parameter, int], ...] = ()
    precise: tuple[tuple[torch.nn.Parameter | tuple[torch.nn.Module, str], Tensor, torch.dtype], ...] = ()
    here: frozenset[int | tuple[int, str]] = frozenset()

    def refuse_written(self, module: torch.nn.Module) -> None:
        """Raises:
        UsageError: parameters without storage were written to since.
        """
        written = {id(parameter) for parameter, version in self.versions if version_of(parameter) != version}
        names = [name for name, parameter in module.named_parameters() if id(parameter) in written]
        if names:
            raise UsageError(
                f"{some(names, 3)}: written to between the loading of a checkpoint and the start of the run, while on the "
                f"meta device, so what was written would be lost; build the module with real weights, change "
                f"checkpoint['state_dict'] in the LightningModule's on_load_checkpoint, or edit weights in on_fit_start, "
                f"inside of `with self.trainer.strategy.gathered(self):`"
            )

    def untouched(self, module: torch.nn.Module, boxes: Boxes = MappingProxyType({})) -> DeferredState:
        """Before pages take over: what the module had to round, and nobody has changed since, gets its whole value there.

        Args:
            boxes: of parameters that have been cut since.
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
        """Writes into pages what has waited for them.

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
    """Loads a state dict as torch does, at once, into all that has storage; what is on the meta device or closed waits, and
    what is rounded there has its whole value kept: no run loses precision by going on.

    Args:
        boxes: of parameters that are parts of larger ones, which the state dict has.

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
    here: set[int | tuple[int, str]] = set()
    here |= {id(item) for name, item in named.items() if name not in missing} - lacking.keys()
    here |= {(id(owner), name) for owner, name, path, buffer in places if not buffer.is_meta and path not in missing}
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
        frozenset(here),
    )


def _rounds(item: Any, value: Any) -> bool:
    """Whether a value lost something when it was copied into a parameter or buffer with storage."""
    if (
        not isinstance(item, Tensor)
        or not isinstance(value, Tensor)
        or item.is_meta
        or isinstance(item, GuardedParameter)
    ):
        return False
    floats = item.is_floating_point() and value.is_floating_point() and item.shape == value.shape
    return floats and torch.promote_types(item.dtype, value.dtype) != item.dtype
