"""First values of a unit's parameters and buffers: initialises those that were built on the meta device.

A parameter's first value comes from files (`settings.weights`, a checkpoint), from the module that the user built, or,
on the meta device, from the module's own initialisation. Only the last is done here; what files provide is read later,
straight into pages (`ParameterValues.take_over`). Owns the stand-ins of other parameters while a module initialises
itself. Works on one unit at a time, so that a model on the meta device never exists whole.

A module on the meta device is initialised by the first of these that exists: `init_weights(module)` or
`_init_weights(module)` of its nearest ancestor that has one (the LightningModule included); the module's own
`reset_parameters()`; its `_reset_parameters()`, as in torch's attention. Inner modules come first, as in construction.
`_init_weights` is written for `Module.apply`, so it is also called with the ancestors of modules that have parameters,
and may set parameters inside of them.

I1: only the unit's own meta parameters get values. Other parameters of the module (a weight that is tied to another
unit's) have their values already, or get them later; stand-ins replace them while the module initialises itself.
I2: a value that no initialisation has set is refused: fresh memory is filled with NaN (integers: the least value).
I3: a module whose values all come from files is not initialised: it takes no time and draws no random numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.runtime.tensors.parts import Boxes, cut
from lightning_ptm.runtime.units.discovery import Unit, UnitParameter
from lightning_ptm.torch_internals import (
    INIT_WEIGHTS,
    RESET_PARAMETERS,
    buffers_in,
    fill_flat_weights,
    flat_weight_names,
    parameters_in,
)

Read = Callable[[], Tensor]
"""Returns a tensor of a memory-mapped file; its elements are read from the file when they are accessed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """First values that files provide, in the right shapes. Which files and which names match is decided by the caller.

    Attributes:
        parameters: what reads each value, by id of the parameter.
        buffers: what reads each value, by id of the module and attribute name.
    """

    parameters: Mapping[int, Read] = dataclasses.field(default_factory=dict)
    buffers: Mapping[tuple[int, str], Read] = dataclasses.field(default_factory=dict)

    def without(self, known: Container[int | tuple[int, str]]) -> Given:
        """Returns these values without those in `known`: values of a checkpoint take precedence over those of files."""
        return Given(
            {key: read for key, read in self.parameters.items() if key not in known},
            {key: read for key, read in self.buffers.items() if key not in known},
        )


def _lineages(root: nn.Module) -> dict[int, tuple[nn.Module, ...]]:
    """Returns each module and its ancestors, nearest first, by id of the module."""
    found: dict[int, tuple[nn.Module, ...]] = {}

    def walk(module: nn.Module, above: tuple[nn.Module, ...]) -> None:
        if id(module) not in found:
            found[id(module)] = (module, *above)
            for child in module.children():
                walk(child, found[id(module)])

    walk(root, ())
    return found


def _method(module: nn.Module, name: str) -> Callable[..., object] | None:
    method = getattr(module, name, None)
    return method if callable(method) and _takes_a_module(method) else None


def _takes_a_module(method: Callable[..., object]) -> bool:
    required = [
        parameter
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 1


def _resets(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", RESET_PARAMETERS):
        reset = getattr(module, name, None)
        if callable(reset):
            return partial(reset)
    return None


class FirstValues:
    """Initialises the modules of one model, unit by unit.

    Args:
        root: the LightningModule; some of its parameters may be on the meta device.
        given: the values that files provide.
        boxes: slices of the parameters that are parts of larger ones. Such a parameter is initialised whole and
            then cut, so that its values do not depend on the number of parts.
    """

    def __init__(self, root: nn.Module, given: Given, boxes: Boxes = MappingProxyType({})) -> None:
        self._root = root
        self._given = given
        self._boxes = boxes
        self._stand_ins: dict[int, nn.Parameter] = {}
        self._made: list[tuple[nn.Module, str]] = []  # buffers that got memory here, for `check`

    @cached_property
    def _lineages(self) -> dict[int, tuple[nn.Module, ...]]:
        return _lineages(self._root)

    @torch.no_grad()
    def buffers(self) -> None:
        """Initialises the buffers on the meta device of modules that have no meta parameters; `parameters` does all
        other modules.

        Buffers whose values come from files only get storage here; `fill_buffers` copies the values.

        Raises:
            ConfigError: nothing says how to initialise a module.
        """
        for module in self._root.modules():
            for name, buffer in buffers_in(module).items():
                if buffer is not None and buffer.is_meta and (id(module), name) in self._given.buffers:
                    buffers_in(module)[name] = torch.empty_like(buffer, device="cpu")
        for module in self._root.modules():
            on_meta = [name for name, buffer in buffers_in(module).items() if buffer is not None and buffer.is_meta]
            if on_meta and not any(item.is_meta for item in parameters_in(module).values() if item is not None):
                initialise = self._initialiser(module)
                self._real_buffers(module)
                initialise()

    @torch.no_grad()
    def parameters(self, unit: Unit) -> None:
        """Gives the meta parameters of the unit's modules storage on the CPU, and values. Other parameters stay as they
        are.

        The parameters keep their identity, so optimizers keep referring to them. The storage of parameters that files
        provide is not written to, so it takes address space and no memory.

        Raises:
            ConfigError: nothing says how to initialise a module, or a parameter has no value afterwards.
        """
        fresh = [item for item in unit.own if item.parameter.is_meta]
        if not fresh:
            return
        holders = {id(module): module for item in fresh for module, _ in item.places}
        for module in holders.values():
            if isinstance(module, nn.RNNBase):
                setattr(module, flat_weight_names()[1], [])  # weak references to the meta tensors; made again below
        wanting = [item for item in fresh if id(item.parameter) not in self._given.parameters]
        for item in fresh:
            given = id(item.parameter) in self._given.parameters
            _real_storage(item, None if given else self._boxes.get(id(item.parameter)), given=given)
        unset = {id(module) for item in wanting for module, _ in item.places}
        unset |= {
            key for key, module in holders.items() if any(b is not None and b.is_meta for b in module.buffers(False))
        }
        for module in holders.values():
            self._real_buffers(module)
        if unset:  # I3
            self._initialise_all(wanting, [module for key, module in holders.items() if key in unset])
        for item in wanting:
            box = self._boxes.get(id(item.parameter))
            if box is not None:
                item.parameter.data = cut(item.parameter.data, box).clone()
        for module in holders.values():
            if isinstance(module, nn.RNNBase):
                fill_flat_weights(module)

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Copies the values of files into buffers. Called after all initialisation, which may write to them."""
        for module in self._root.modules():
            for name, buffer in buffers_in(module).items():
                read = self._given.buffers.get((id(module), name))
                if read is not None and buffer is not None:
                    buffer.copy_(read())

    def _initialise_all(self, fresh: list[UnitParameter], holders: list[nn.Module]) -> None:
        self._initialise(fresh, holders)
        missed = _without_values(fresh)
        if missed:
            # As in a constructor: each module resets itself before an ancestor's `init_weights` changes its values.
            for module in {id(place): place for item in missed for place, _ in item.places}.values():
                reset = _resets(module)
                if reset is not None:
                    with self._others_stand_in([module], fresh, "cpu"):
                        reset()
            self._initialise(fresh, holders)
            self._refuse(_without_values(fresh))

    def check(self) -> None:
        """Checks that every buffer from the meta device was set. Called when all units have their values.

        Raises:
            ConfigError: a buffer was built on the meta device and nothing has set it (I2).
        """
        if not self._made:
            return
        names = {id(module): f"{name}." if name else "" for name, module in self._root.named_modules()}
        for module, name in self._made:
            buffer = buffers_in(module)[name]
            if buffer is None or not buffer.numel() or _unset(buffer.dtype) == 0:
                continue  # the marker of unset memory is an ordinary value of this dtype
            numbers = buffer.is_floating_point() or buffer.is_complex()
            unset = buffer != buffer if numbers else buffer == _unset(buffer.dtype)
            if bool(unset.all()):
                raise ConfigError(
                    f"buffer {names[id(module)]}{name} of a {type(module).__name__} was built on the meta device and "
                    "has no value after its initialisation; let init_weights(module) or its reset_parameters() set "
                    "it, or build it on the CPU"
                )
        self._made = []

    def _real_buffers(self, module: nn.Module) -> None:
        for name, buffer in buffers_in(module).items():
            if buffer is not None and buffer.is_meta:
                buffers_in(module)[name] = torch.full_like(buffer, _unset(buffer.dtype), device="cpu")
                self._made.append((module, name))

    def _initialise(self, fresh: list[UnitParameter], holders: Iterable[nn.Module]) -> None:
        inside = {id(module) for module in holders}
        around = {id(module): module for holder in holders for module in self._lineages[id(holder)]}
        calls = []
        for module in sorted(around.values(), key=lambda module: -len(self._lineages[id(module)])):
            if id(module) in inside:
                calls.append((module, self._initialiser(module)))
            else:
                applied = self._applied(module)
                if applied is not None:
                    calls.append((module, applied))
        for module, initialise in calls:
            if id(module) in inside:
                with self._others_stand_in([module], fresh, "cpu"):
                    initialise()
                continue
            with self._others_stand_in(module.modules(), fresh, "meta"):
                try:
                    initialise()
                except (
                    RuntimeError
                ) as error:  # NotImplementedError among them: torch raises it when the meta device is read
                    if not isinstance(error, NotImplementedError) and "meta" not in str(error):
                        raise
                    raise ConfigError(
                        f"the initialisation of a {type(module).__name__} on the meta device reads weights of several "
                        f"units, and only one unit exists at a time ({error}); build the model on the CPU"
                    ) from error

    def _initialiser(self, module: nn.Module) -> Callable[[], object]:
        for ancestor in self._lineages[id(module)]:
            if hasattr(ancestor, "reset_lora_parameters"):
                # The base model's rule would be the next candidate; it would draw random numbers for lora_B, which must
                # be zero.
                raise ConfigError(
                    f"an adapter of peft ({type(ancestor).__name__}) was built on the meta device, and only peft "
                    "knows its first values; after building the model, give each such layer memory of its own, "
                    "layer.lora_A.to_empty(device='cpu') and the same for lora_B, and call "
                    "layer.reset_lora_parameters('default', True)"
                )
            for name in ("init_weights", INIT_WEIGHTS):
                method = _method(ancestor, name)
                if method is not None:
                    return partial(method, module)
        reset = _resets(module)
        if reset is None:
            raise ConfigError(
                f"a {type(module).__name__} was built on the meta device and has no way to initialise its parameters, "
                "so its weights would be random memory; give it a reset_parameters() method, or give the "
                "LightningModule an init_weights(module) method, or build it on the CPU"
            )
        return reset

    def _applied(self, module: nn.Module) -> Callable[[], object] | None:
        """Returns the `_init_weights` call for a module without parameters of the unit, or None."""
        for ancestor in self._lineages[id(module)]:
            if _method(ancestor, "init_weights") is not None:
                return None
            method = _method(ancestor, INIT_WEIGHTS)
            if method is not None:
                return partial(method, module)
        return None

    @contextmanager
    def _others_stand_in(self, modules: Iterable[nn.Module], fresh: list[UnitParameter], device: str) -> Iterator[None]:
        """Context in which stand-ins replace all parameters of `modules` but `fresh` ones (I1)."""
        ours = {id(item.parameter) for item in fresh}
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in modules:
            for name, parameter in parameters_in(module).items():
                if parameter is not None and id(parameter) not in ours and not (device == "meta" and parameter.is_meta):
                    replaced.append((module, name, parameter))
        for module, name, parameter in replaced:
            parameters_in(module)[name] = self._stand_in(parameter, device)
        try:
            yield
        finally:
            for module, name, parameter in replaced:
                parameters_in(module)[name] = parameter

    def _stand_in(self, parameter: nn.Parameter, device: str) -> nn.Parameter:
        if device != "meta":
            return nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        known = self._stand_ins.get(id(parameter))
        if known is None:
            known = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
            self._stand_ins[id(parameter)] = known
        return known

    def _refuse(self, missed: list[UnitParameter]) -> None:
        if missed:
            holder = missed[0].places[0][0]
            raise ConfigError(
                f"parameter {missed[0].name} of a {type(holder).__name__} was built on the meta device and has no "
                f"value after its initialisation ({len(missed)} such in its unit); let init_weights(module) or its "
                f"reset_parameters() set it, or build it on the CPU"
            )


def _unset(dtype: torch.dtype) -> float | int:
    """Returns the filling of fresh memory: a value that no initialisation sets, or 0 where the dtype has no such
    value."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _real_storage(item: UnitParameter, box: TensorSlice | None, *, given: bool) -> None:
    """Gives a meta parameter storage on the CPU, in place.

    Args:
        box: the slice that the parameter is of a larger one, whose shape the storage gets; None: the parameter's own
            shape.
        given: a file provides the value, so that the storage is not written to.
    """
    old = item.parameter
    values = torch.empty_like(old, device="cpu", requires_grad=False)
    if box is not None:
        values = values.new_empty(box.shape)
    if not given:
        values.fill_(float("nan"))  # I2
    try:
        torch.utils.swap_tensors(old, nn.Parameter(values, requires_grad=old.requires_grad))
    except RuntimeError as error:
        raise ConfigError(
            f"parameter {item.name} is on the meta device and a weak reference to it exists (weakref, such as one "
            f"of a hook or an optimizer), so it cannot be given storage in place ({error}); build it on the CPU"
        ) from error


def _without_values(fresh: list[UnitParameter]) -> list[UnitParameter]:
    def unset(values: Tensor) -> bool:
        # The sum is the cheap test; it is NaN as well where infinities of both signs are added.
        return bool(values.sum().isnan()) and bool(values.isnan().any())

    return [item for item in fresh if unset(item.parameter)]
